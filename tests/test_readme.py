"""Every block of the README runs, its numbers are the benchmarks', its links lead somewhere, and it is short."""

import csv
import math
import re
import sys
from pathlib import Path
from typing import Any

import pyro
import pytest
import torch
from pyro.infer import Trace_ELBO, TraceEnum_ELBO

import khot

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # which pytest brings along

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", README, flags=re.DOTALL | re.MULTILINE)
IDEA, *SCRIPTS = [text for language, text in BLOCKS if language == "python"]
COMMANDS = [text for language, text in BLOCKS if language == "sh"]
ARRIVES = (  # what each script prints
    torch.tensor([0.0, 0, 1, 0, 0, 1, 0, 1]),
    torch.tensor(10.0),
    torch.full((5,), 16.0),
    torch.tensor([3.0, 20.0]),
)
SIZE = {"batch": "128", "n": "1000", "k": "500"}
MASKS, MAPS, DESIGNS = "cpu_masks", "relaxations_maps", "cpu_designs"
COSTS = {  # label to file, line, columns
    "`torch.softmax`": (MASKS, {"operation": "softmax"}, ("ms", "of softmax")),
    "`sigmoid_topk` with numba": (MASKS, {"operation": "sigmoid_topk", "backend": "numba"}, ("ms", "of softmax")),
    "`sigmoid_topk` in plain torch": (MASKS, {"operation": "sigmoid_topk", "backend": "torch"}, ("ms", "of softmax")),
    "`torch.topk`, forward": (MASKS, {"operation": "topk"}, ("ms", "of softmax")),
    "`torch.sort`, forward": (MASKS, {"operation": "sort"}, ("ms", "of softmax")),
    "successive softmax in plain torch, k = 10": (
        MAPS,
        {"function": "successive_softmax_topk", "k": "10"},
        ("both_ms",),
    ),
    "a step of one-hot straight-through": (DESIGNS, {"design": "one-hot", "k": "50"}, ("ms",)),
    "a step of `Pivotal`, k = 50": (DESIGNS, {"design": "Pivotal", "with": "", "backend": "numba", "k": "50"}, ("ms",)),
    "a step of `ConditionalPoisson`, k = 50": (
        DESIGNS,
        {"design": "ConditionalPoisson", "with": "log_prob", "backend": "numba", "k": "50"},
        ("ms",),
    ),
}


def test_every_block_is_run():
    assert {language for language, _ in BLOCKS} == {"sh", "python", "bibtex"}
    assert len(SCRIPTS) == len(ARRIVES)


def numbers(text):
    return torch.tensor([float(number) for number in re.findall(r"-?\d+\.\d*", text)])


def test_the_idea(capsys):
    """Each line of the first block that prints something says what, to two digits."""
    torch.manual_seed(0)
    names: dict[str, Any] = {}
    exec(IDEA, names)
    said = re.findall(r"^print.*# (.*?):", IDEA, flags=re.MULTILINE)
    printed = capsys.readouterr().out.splitlines()
    assert len(said) == len(printed) == 4
    for line, comment in zip(printed, said, strict=True):
        torch.testing.assert_close(numbers(line), numbers(comment), rtol=0, atol=0.005)
    scores, mask = names["scores"], names["mask"]  # the draw includes entry 0 with probability mask[0]
    torch.testing.assert_close(scores.grad, torch.autograd.grad(khot.sigmoid_topk(scores, 2)[0], scores)[0])
    torch.testing.assert_close(mask, khot.sigmoid_topk(scores, 2))


@pytest.mark.parametrize(("script", "result"), list(zip(SCRIPTS, ARRIVES, strict=True)))
def test_script(script, result, capsys):
    pyro.clear_param_store()
    torch.manual_seed(0)
    exec(script, {})
    printed = capsys.readouterr().out.partition("grad_fn")[0]
    found = torch.tensor([float(number) for number in re.findall(r"\d+(?:\.\d*)?", printed)])
    torch.testing.assert_close(found, result.flatten(), rtol=0, atol=0.5)
    pyro.clear_param_store()


def test_models_take_batches_of_vectors(capsys):
    """Enumeration and vectorised particles put batch dimensions to the left of x."""
    for script in SCRIPTS:
        if "pyro.sample" in script:
            pyro.clear_param_store()
            names: dict[str, Any] = {}
            exec(script.replace("range(200)", "range(1)"), names)
            model, guide = names["model"], names["guide"]
            enumerated = pyro.infer.config_enumerate(model, "parallel")
            assert math.isfinite(TraceEnum_ELBO(max_plate_nesting=1).loss(enumerated, lambda: None))
            particles = Trace_ELBO(num_particles=3, vectorize_particles=True, max_plate_nesting=1)
            assert math.isfinite(particles.loss(model, guide))
            pyro.clear_param_store()


def test_commands():
    targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    assert set(re.findall(r"\bmake (\w+)", README)) - {"their"} <= set(targets)
    ours = [line for text in COMMANDS for line in text.splitlines()]
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for line in ours:
        assert re.match(r"make \w+ +#|pip install ", line)
        assert set(re.findall(r"\[(\w+)\]", line)) <= set(extras)


def test_costs():
    section = README.split("<!-- from benchmarks/results -->")[1].split("<!-- end -->")[0]
    rows = re.findall(r"^\| (.+?) \|([\d. |]+)\|$", section, flags=re.MULTILINE)
    table = {label: cells.replace("|", " ").split() for label, cells in rows}
    assert table.keys() == COSTS.keys()
    for label, (file, line, columns) in COSTS.items():
        with (ROOT / "benchmarks" / "results" / f"{file}.csv").open(newline="", encoding="utf-8") as lines:
            (row,) = (row for row in csv.DictReader(lines) if {**SIZE, **line}.items() <= row.items())
        for column, cell in zip(columns, table[label], strict=True):
            digits = len(cell.partition(".")[2])
            assert cell == f"{float(row[column]):.{digits}f}", (label, column)


def test_times_of_other_libraries():
    section = README.split("<!-- peers -->")[1].split("<!-- end -->")[0]
    with (ROOT / "benchmarks" / "results" / "peer_times.csv").open(newline="", encoding="utf-8") as lines:
        measured = {row["function"]: row["of softmax"] for row in csv.DictReader(lines)}
    quoted = [(time.replace(",", ""), name) for time, name in re.findall(r"([\d.,]+) \(`(.+?)`\)", section)]
    assert len(quoted) == 8
    wrong = [name for time, name in quoted if f"{float(measured[name]):.{len(time.partition('.')[2])}f}" != time]
    assert wrong == []


def test_links_and_length():
    links = re.findall(r"\]\(([^)#]+)\)", README)
    assert [link for link in links if "://" not in link and not (ROOT / link).exists()] == []
    prose = re.sub(r"^```.*?^```$|^\|.*?$|<!--.*?-->", "", README, flags=re.DOTALL | re.MULTILINE)
    assert len(prose.split()) <= 700
