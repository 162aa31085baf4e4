"""Trains every row of an experiment with every seed, in several processes; can be interrupted and resumed.

An experiment names its rows. A function of its module, which other processes find by its name, trains one row with one
seed, and returns what JSON can store:

    def run_row(run, args):
        model, optimizer = ...
        fitted = run.fit(model, optimizer, train_epoch, validate, args.epochs, args.patience)
        return {"scores": {"loss": test(model), "epochs": fitted.best + 1}}

    results = run_grid(args, "my_experiment", ("hard", "soft"), run_row)    # results["soft"][i] is of the i-th seed

In the folder `--runs`, a finished row leaves <row>_seed_<seed>.json, and an interrupted one <row>_seed_<seed>.pt, the
state after its last whole epoch. The same command continues from there, and the numbers are those of an uninterrupted
run.
"""

import json
import multiprocessing
import os
import random
import re
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

VALIDATION_SEED = 2**20  # every epoch is validated with the same draws
# What a result does not depend on. Seeds and lengths of sequences are in the names of the files.
IRRELEVANT = ("command", "data_dir", "lengths", "out", "processes", "rows", "runs", "seed", "seeds")

Result = dict[str, Any]
RunRow = Callable[["Run", Namespace], Result]


def add_run_arguments(parser: ArgumentParser) -> None:
    """Arguments of experiments that call `run_grid`."""
    cores = os.cpu_count() or 1
    parser.add_argument("--processes", type=int, default=cores, help="of one thread each (default: %(default)s)")
    parser.add_argument("--rows", nargs="+", help="of the table (default: all)")
    parser.add_argument("--runs", type=Path, help="folder of finished and interrupted runs, to go on from")


@dataclass
class Fitted:
    """For each epoch: validation loss, seconds of a core, and a number that the experiment records."""

    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    notes: list[float] = field(default_factory=list)

    @property
    def best(self) -> int:
        """The epoch of least validation loss, the first of them, from 0; NaN is never the least."""
        return min(range(len(self.losses)), key=lambda epoch: np.nan_to_num(self.losses[epoch], nan=np.inf))


@dataclass(frozen=True)
class Run:
    """One row with one seed.

    Args:
        row: Its name.
        seed: Of Python, NumPy and torch.
        settings: What the result depends on besides.
        file: Where it is kept, but for the suffix; None for nowhere.
    """

    row: str
    seed: int
    settings: dict[str, Any]
    file: Path | None = None

    def say(self, text: str) -> None:
        print(f"seed {self.seed}, {self.row}: {text}", flush=True)

    def fit(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        train_epoch: Callable[[int], object],
        validate: Callable[[], float],
        epochs: int,
        patience: int | None,
        note: Callable[[], float] = lambda: 0.0,
    ) -> Fitted:
        """Trains until the validation loss has had no new minimum for ``patience`` epochs, at most ``epochs``.

        ``train_epoch`` is told which it is, from 0. The model is left as it was after the best epoch; with ``patience``
        None, after the last of all ``epochs``.
        """
        fitted, best = Fitted(), {}
        if saved := self._load(".pt"):
            model.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
            torch.set_rng_state(saved["generator"])
            fitted, best = Fitted(**saved["fitted"]), saved["best"]
            self.say(f"goes on after epoch {len(fitted.losses)}")
        while not _ended(fitted, epochs, patience):
            start = time.process_time()  # of its one thread: others may share the core
            train_epoch(len(fitted.losses))
            with torch.random.fork_rng(devices=()):
                torch.manual_seed(VALIDATION_SEED)
                fitted.losses.append(validate())
            fitted.notes.append(note())
            fitted.seconds.append(time.process_time() - start)
            if patience is not None and fitted.best == len(fitted.losses) - 1:
                best = deepcopy(model.state_dict())
            self._save_state(model, optimizer, fitted, best)
            self.say(f"epoch {len(fitted.losses)}, validation {fitted.losses[-1]:.4f}, {fitted.seconds[-1]:.1f} s")
        if best:
            model.load_state_dict(best)
        return fitted

    def _save_state(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, fitted: Fitted, best: dict[str, torch.Tensor]
    ) -> None:
        if self.file is None:
            return
        state = {"settings": self.settings, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
        state |= {"generator": torch.get_rng_state(), "best": best, "fitted": asdict(fitted)}
        unfinished = _with(self.file, ".part")
        torch.save(state, unfinished)
        unfinished.replace(
            _with(self.file, ".pt")
        )  # atomic, so that there is always a whole one if the run is interrupted

    def _load(self, suffix: str) -> dict[str, Any] | None:
        """What is kept of this run; a ValueError if it was made with other settings."""
        path = self.file and _with(self.file, suffix)
        if path is None or not path.is_file():
            return None
        saved = torch.load(path, weights_only=True) if suffix == ".pt" else json.loads(path.read_text(encoding="utf-8"))
        for name in sorted(self.settings.keys() | saved["settings"].keys()):
            now, then = self.settings.get(name), saved["settings"].get(name)
            if now != then:
                raise ValueError(f"{path} was made with {name} = {then!r}, not {now!r}: give another folder by --runs")
        return saved

    def result_of(self, run_row: RunRow, args: Namespace) -> Result:
        """That of the finished run, if it is kept; else that of ``run_row``, which it begins or continues."""
        if saved := self._load(".json"):
            self.say("was finished before")
            return saved["result"]
        torch.set_num_threads(1)  # processes share the cores, and so the numbers do not depend on their number
        for set_seed in (random.seed, np.random.seed, torch.manual_seed):
            set_seed(self.seed)
        with _without_denormals():
            result = run_row(self, args)
        if self.file is not None:
            unfinished = _with(self.file, ".part")
            document = {"settings": self.settings, "result": result}
            unfinished.write_text(json.dumps(document, separators=(",", ":")) + "\n", encoding="utf-8")
            unfinished.replace(_with(self.file, ".json"))
            _with(self.file, ".pt").unlink(missing_ok=True)
        return result


@contextmanager
def _without_denormals() -> Iterator[None]:
    """Adam's averages of a weight whose gradient has become 0 sink to denormal numbers, and double a step's time."""
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(False)


def _ended(fitted: Fitted, epochs: int, patience: int | None) -> bool:
    done = len(fitted.losses)
    return done >= epochs or (patience is not None and done > 0 and done - 1 - fitted.best >= patience)


def _with(file: Path, suffix: str) -> Path:
    return file.parent / f"{file.name}{suffix}"  # names of rows have dots


def _make_runs(args: Namespace, name: str, rows: Sequence[str]) -> Iterator[Run]:
    """Seed by seed, so that the first seeds are complete if the run is interrupted."""
    settings = {key: value for key, value in vars(args).items() if key not in IRRELEVANT}
    if args.runs is not None:
        (args.runs / name).mkdir(parents=True, exist_ok=True)
    stems = [re.sub(r"[^\w.=+-]+", "_", row) for row in rows]
    if len(set(stems)) < len(rows):
        raise ValueError(f"rows must have names that differ as files, but are {list(rows)}")
    for seed in range(args.seed, args.seed + args.seeds):
        for row, stem in zip(rows, stems, strict=True):
            yield Run(row, seed, settings, args.runs and args.runs / name / f"{stem}_seed_{seed}")


def run_grid(args: Namespace, name: str, rows: Sequence[str], run_row: RunRow) -> dict[str, list[Result]]:
    """Results of ``run_row`` by row, a list over the seeds; ``args`` are those of `add_run_arguments` and more."""
    if unknown := set(args.rows or ()) - set(rows):
        raise ValueError(f"--rows must be some of {list(rows)}, but has {sorted(unknown)}")
    rows = [row for row in rows if row in (args.rows or rows)]
    runs = list(_make_runs(args, name, rows))
    if args.processes == 1:
        results = [run.result_of(run_row, args) for run in runs]
    else:
        # Spawned, not forked: a fork of a process whose libraries have threads may hang.
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(min(args.processes, len(runs)), mp_context=context) as pool:
            futures: list[Future[Result]] = [pool.submit(run.result_of, run_row, args) for run in runs]
            try:
                for done, future in enumerate(as_completed(futures), 1):
                    future.result()
                    print(f"{name}: {done} of {len(runs)} runs done", flush=True)
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise
            results = [future.result() for future in futures]
    by_row: dict[str, list[Result]] = {row: [] for row in rows}
    for run, result in zip(runs, results, strict=True):
        by_row[run.row].append(result)
    return by_row
