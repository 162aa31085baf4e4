"""Processes that run a list of cases together, each in its rank: started once, as that takes seconds.

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
from collections.abc import Callable, Sequence
from datetime import timedelta
from importlib import import_module
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch
import torch.distributed as dist

ROOT = Path(__file__).parents[2]
PATIENCE = 180  # seconds that a rank waits for the others, one of which may compile, on a busy machine

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
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)]),
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
    }
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "tests.distributed.group", folder, str(ranks), str(limit), *modules]
        subprocess.run(command, cwd=ROOT, env=environment, check=True, timeout=limit + PATIENCE)
        reports = [_report(Path(folder), rank) for rank in range(ranks)]
        failed, died = json.loads((Path(folder) / "ends").read_text())
    return [f"rank {rank}, {line}" for rank, lines in enumerate(reports) for line in lines] + failed, died


def _report(folder: Path, rank: int) -> list[str]:
    """What a rank has written: what failed, or that it was cut off in the middle."""
    file = folder / f"report{rank}"
    lines = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    failed = [f"case {name}: {error}" for name, error in lines if error]
    if not failed and (not lines or lines[-1][0] != "all"):
        failed.append(f"ended after case {lines[-1][0] if lines else 'none'}")
    return failed


def _main(folder: str, ranks: str, limit: str, *modules: str) -> None:
    """Starts the ranks, and writes which of them were late or ended by a signal.

    Where processes can be forked, the ranks are copies of this one, in which all is imported.
    """
    group = import_module("tests.distributed.group")  # not this file once more, which runs as __main__
    context = get_context("fork" if sys.platform == "linux" else "spawn")
    if context.get_start_method() == "fork":
        group._import_cases(modules)
    started = [
        context.Process(target=group._run_rank, args=(folder, int(ranks), r, modules)) for r in range(int(ranks))
    ]
    for process in started:
        process.start()
    late = _wait(started, float(limit))
    failed = [f"rank {rank} did not end within {limit} s" for rank in late]
    died = [rank for rank, process in enumerate(started) if (process.exitcode or 0) < 0 and rank not in late]
    (Path(folder) / "ends").write_text(json.dumps([failed, died]))


def _wait(processes: Sequence[BaseProcess], limit: float) -> list[int]:
    late = []
    for rank, process in enumerate(processes):
        process.join(0.5 if late else limit)
        if process.is_alive():
            late.append(rank)
    for process in processes:
        process.kill()
        process.join()
    return late


def _import_cases(modules: Sequence[str]) -> None:
    torch.set_num_threads(1)
    for module in modules:
        import_module(module)


def _run_rank(folder: str, ranks: int, rank: int, modules: Sequence[str]) -> None:
    _import_cases(modules)
    meeting = f"file://{folder}/meeting"
    dist.init_process_group(
        "gloo", init_method=meeting, world_size=ranks, rank=rank, timeout=timedelta(seconds=PATIENCE)
    )
    only, verbose = os.environ.get("KHOT_DISTRIBUTED_CASES", ""), "KHOT_DISTRIBUTED_CASES" in os.environ
    with open(Path(folder) / f"report{rank}", "w", buffering=1) as report:
        for name, function in CASES.items():
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
            if verbose and rank == 0:
                sys.stderr.write(f"{time.monotonic() - started:6.1f} s  {name}\n")
        report.write(json.dumps(["all", ""]) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    _main(*sys.argv[1:])
