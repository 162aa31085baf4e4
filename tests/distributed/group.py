"""Processes that run a list of cases together, each in its rank: spawned once, as starting them takes seconds.

A case is a function that every rank calls. The first one that fails ends the run, since ranks that have parted do not
meet again; a collective that some rank does not join fails after ``PATIENCE``, and everything after the time limit.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from importlib import import_module
from pathlib import Path

import torch
import torch.distributed as dist

ROOT = Path(__file__).parents[2]
PATIENCE = 60  # seconds that a rank waits for the others, one of which may compile

Case = Callable[[], None]
CASES: dict[str, Case] = {}


def case(function: Case) -> Case:
    """Decorator: every group runs this function."""
    CASES[function.__name__] = function
    return function


def run_group(ranks: int, modules: list[str], limit: float) -> list[str]:
    """Runs the cases of these modules in as many processes; returns what failed, case by case and rank by rank.

    A group that loses a rank to a signal is run once more, and says so: gloo's own thread was seen to die in the C
    library, once in several runs. What dies each time fails.
    """
    failed, died = _run_once(ranks, modules, limit)
    if died:
        sys.stderr.write(f"ranks {died} of {ranks} were ended by a signal: once more\n")
        failed, died = _run_once(ranks, modules, limit)
    return failed + [f"rank {rank} was ended by a signal" for rank in died]


def _run_once(ranks: int, modules: list[str], limit: float) -> tuple[list[str], list[int]]:
    """What failed, and which ranks died."""
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)]),
            "GLOO_SOCKET_IFNAME": "lo",
            "OMP_NUM_THREADS": "1",
        }
        arguments = [sys.executable, "-m", "tests.distributed.group", folder, str(ranks)]
        processes = [
            subprocess.Popen([*arguments, str(rank), *modules], cwd=ROOT, env=environment) for rank in range(ranks)
        ]
        late = _wait(processes, limit)
        died = [rank for rank, process in enumerate(processes) if (process.returncode or 0) < 0 and rank not in late]
        reports = [_report(Path(folder), rank) for rank in range(ranks)]
    failed = [f"rank {rank}, {line}" for rank, lines in enumerate(reports) for line in lines]
    return failed + [f"rank {rank} did not end within {limit} s" for rank in late], died


def _wait(processes: list[subprocess.Popen], limit: float) -> list[int]:
    late = []
    for rank, process in enumerate(processes):
        try:
            process.wait(0.5 if late else limit)
        except subprocess.TimeoutExpired:
            late.append(rank)
    for process in processes:
        process.kill()
        process.wait()
    return late


def _report(folder: Path, rank: int) -> list[str]:
    """What a rank has written: what failed, or that it was cut off in the middle."""
    file = folder / f"report{rank}"
    lines = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    failed = [f"case {name}: {error}" for name, error in lines if error]
    if not failed and (not lines or lines[-1][0] != "all"):
        failed.append(f"ended after case {lines[-1][0] if lines else 'none'}")
    return failed


def _main(folder: str, ranks: str, rank: str, *modules: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/meeting",
        world_size=int(ranks),
        rank=int(rank),
        timeout=timedelta(seconds=PATIENCE),
    )
    group = import_module("tests.distributed.group")  # not this file once more, which runs as __main__
    for module in modules:
        import_module(module)
    only, verbose = os.environ.get("KHOT_DISTRIBUTED_CASES", ""), "KHOT_DISTRIBUTED_CASES" in os.environ
    with open(Path(folder) / f"report{rank}", "w", buffering=1) as report:
        for name, function in group.CASES.items():
            if only not in name:
                continue
            started = time.monotonic()
            try:
                function()
                dist.barrier()  # nobody starts the next case while another one fails in this
            except BaseException:
                report.write(json.dumps([name, traceback.format_exc()]) + "\n")
                os._exit(1)  # without waiting for the others
            report.write(json.dumps([name, ""]) + "\n")
            if verbose and rank == "0":
                sys.stderr.write(f"{time.monotonic() - started:6.1f} s  {name}\n")
        report.write(json.dumps(["all", ""]) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    _main(*sys.argv[1:])
