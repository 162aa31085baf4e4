"""One way to time things for every benchmark: interleaved, in one process, as quantiles and as ratios to a baseline."""

import argparse
import csv
import importlib
import platform
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile

RESULTS = Path(__file__).parent / "results"


class Timing(NamedTuple):
    """Seconds per call: median, 20th and 80th percentile."""

    median: float
    low: float
    high: float


def interleaved(
    calls: Mapping[str, Callable[[], object]],
    seconds: float = 1.0,
    rounds: int = 15,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, Timing]:
    """Times the calls in turns, so that whatever else the machine does falls on all of them alike.

    Args:
        calls: Name to function.
        seconds: About how long each function is run in all.
        rounds: Number of measurements of each.
        clock: What tells the time; ``time.process_time`` leaves out what other processes take, and adds up threads.
    """
    repeats = {}
    for name, call in calls.items():
        call()
        start = clock()
        call()
        repeats[name] = max(1, int(seconds / rounds / max(clock() - start, 1e-7)))
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            start = clock()
            for _ in range(repeats[name]):
                call()
            samples[name].append((clock() - start) / repeats[name])
    timings = {}
    for name, values in samples.items():
        low, median, high = torch.tensor(values, dtype=torch.float64).quantile(
            torch.tensor([0.2, 0.5, 0.8], dtype=torch.float64)
        )
        timings[name] = Timing(median.item(), low.item(), high.item())
    return timings


def peak_bytes(call: Callable[[], object]) -> int:
    """Largest sum of tensor memory that the call holds at a time beyond what was there."""
    call()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        call()
    held = peak = 0
    for event in profiler.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            peak = max(peak, held)
    return peak


def environment() -> dict[str, str]:
    """What the numbers depend on."""
    return {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": f"{platform.machine()}, {torch.get_num_threads()} threads",
    }


def write_csv(path: Path, rows: list[dict[str, object]]) -> None:
    """Rows with the same keys, each with the environment appended."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=[*rows[0], *environment()], lineterminator="\n")
        writer.writeheader()
        writer.writerows({**row, **environment()} for row in rows)


def optional(name: str) -> ModuleType | None:
    """A peer's module; where it cannot be imported, None and a line that says why."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        print(f"without {name}: {error}")
        return None


def arguments(description: str, default_csv: str, seconds: float = 1.0) -> argparse.Namespace:
    """The options every benchmark takes; ``seconds`` is the default of ``--seconds``."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--seconds", type=float, default=seconds, help="time spent on each measurement")
    parser.add_argument("--csv", type=Path, default=RESULTS / default_csv, help="where the table goes")
    parser.add_argument("--threads", type=int, help="torch threads (default: torch's choice)")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    return options


def run_parts(
    description: str,
    name: str,
    parts: Mapping[str, Callable[[float], list[dict[str, object]]]],
    seconds: float = 1.0,
    threads: int | None = None,
) -> None:
    """The command line of a benchmark of several parts, each of which returns the rows of its table.

    Args:
        description: What ``--help`` says.
        name: What the files of the tables begin with.
        parts: Name to function, of the seconds for each measurement.
        seconds: Default of ``--seconds``.
        threads: Default of ``--threads``; torch's choice if not given.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=[[], *parts], help="which parts to run")
    parser.add_argument("--seconds", type=float, default=seconds, help="time spent on each measurement")
    parser.add_argument(
        "--threads", type=int, default=threads, help=f"torch threads (default: {threads or 'its choice'})"
    )
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    for part in options.parts or parts:
        write_csv(RESULTS / f"{name}_{part}.csv", parts[part](options.seconds))
