"""Exported programs mean in a fresh process what they mean here."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import khot.relaxations
from tests.every_map import MAPS
from tests.inputs import normal

ROOT = Path(__file__).parents[2]


def test_every_public_map_is_under_test():
    names = {name for name in khot.relaxations.__all__ if name.islower()} - {
        "straight_through_value"
    }  # of values, no map
    assert {name for name in names if not any(case.name.startswith(name) for case in MAPS)} == set()


LOADS = """
import sys, torch
import khot
x = torch.zeros(3)
for p in (1.9, 1.1, 2.0, 1.3):  # links in another order, of other values and of the same names
    khot.sparse_topk(x, 1, p=p)
inputs, results = torch.load(sys.argv[1])
for name, expected in results.items():
    program = torch.export.load(f"{sys.argv[2]}/{name}.pt2").module()
    for x, y in zip(inputs, expected, strict=True):
        # Eager order maps go tile by tile, which rounds in another way than the whole row of a program.
        torch.testing.assert_close(program(x), y, rtol=1e-13, atol=1e-13, msg=lambda text: f"{name}: {text}")
print(len(results), "programs")
"""


class Program(torch.nn.Module):
    def __init__(self, call):
        super().__init__()
        self.call = call

    def forward(self, x):
        return self.call(x, 0.7)


def in_fresh_process(code, *arguments):
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.slow
@pytest.mark.needs_torch("2.8")  # earlier, the exporter fixes some of these sizes
def test_maps_are_the_same_in_a_fresh_process(tmp_path):
    inputs, results = (normal(3, 6), normal(2, 9)), {}
    axes = {0: torch.export.Dim("rows"), 1: torch.export.Dim("n", min=4)}
    for strict, cases in ((False, MAPS[::4]), (True, MAPS[1::16])):
        for case in cases:
            program = torch.export.export(Program(case.call), inputs[:1], dynamic_shapes={"x": axes}, strict=strict)
            torch.export.save(program, tmp_path / f"{case.name}.pt2")
            results[case.name] = [case.call(x, 0.7) for x in inputs]
    torch.save((inputs, results), tmp_path / "results")
    loaded = in_fresh_process(LOADS, tmp_path / "results", tmp_path)
    assert loaded.stdout.strip() == f"{len(results)} programs", loaded.stderr[-4000:]
