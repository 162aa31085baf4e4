"""What the experiments share: arguments, seeds with a progress bar, minibatches, tables of results, figures.

An experiment is a function of a seed that gives one dictionary of scores per row:

    def main(arguments=None):
        parser = experiment_parser(__doc__)
        parser.add_argument("--epochs", type=int, default=60)
        args = parse(parser, arguments, smoke={"seeds": 2, "epochs": 1})
        table = Table("Test accuracy", {"accuracy, %": ".1f"}, reference="hard")
        for seed, progress in each_seed(args, steps=2 * args.epochs):
            for row in ("hard", "soft"):
                table.add(row, {"accuracy, %": train(row, seed, args.epochs, progress.update)})
        table.find("soft beats hard", "soft", "hard")
        table.save(args, "my_experiment")
        return table
"""

import argparse
import json
import random
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, TextIO

import matplotlib

matplotlib.use("Agg")  # write files, open no window
import numpy as np
import torch
from matplotlib.figure import Figure
from PIL import Image
from scipy.stats import t as student
from torch import Tensor
from tqdm import tqdm

SMOKE = {"images": 300, "processes": 1}
COUNTS = ("seeds", "images", "processes", "patience", "epochs", "steps", "draws", "samples", "sequences", "k")
MANY_SECONDS = 1800  # of training, which a reader is told


def experiment_parser(doc: str, data: Sequence[str] = ()) -> argparse.ArgumentParser:
    """Arguments of all experiments; ``doc`` is the module docstring, ``data`` its data sets, default first."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5, help="number of seeds (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="the first of them (default: %(default)s)")
    parser.add_argument("--smoke", action="store_true", help="the smallest settings: seconds, meaningless numbers")
    parser.add_argument("--out", type=Path, default=Path("demo-output"), help="folder for table and figures")
    if data:
        parser.add_argument("--data", choices=data, default=data[0], help="data set (default: %(default)s)")
        parser.add_argument("--data-dir", type=Path, help="folder with the standard files of the data set")
        parser.add_argument("--images", type=int, help="to train on, and to validate and to test with (default: all)")
    return parser


def parse(
    parser: argparse.ArgumentParser, arguments: list[str] | None, smoke: Mapping[str, object]
) -> argparse.Namespace:
    """The arguments; with ``--smoke`` the values in ``smoke`` are the defaults, with few images and one process."""
    known = parser.parse_known_args(arguments)[0]
    if known.smoke:
        small = {name: value for name, value in SMOKE.items() if name in known}
        parser.set_defaults(**small | dict(smoke))
    args = parser.parse_args(arguments)
    for name in COUNTS:
        if getattr(args, name, None) is not None and getattr(args, name) < 1:
            parser.error(f"--{name} must be at least 1, but is {getattr(args, name)}")
    if arguments is None:
        args.command = shown_command(sys.argv)
    return args


def shown_command(words: Sequence[str]) -> str:
    """The command without the folders of this machine."""
    shown = ["python", f"experiments/{Path(words[0]).name}"]
    apart = [part for word in words for part in (word.split("=", 1) if word.startswith("--") else [word])]
    for before, word in pairwise(apart):
        if before == "--data-dir":
            shown.append("DIR")
        elif before not in ("--out", "--runs", "--processes") and word not in ("--out", "--runs", "--processes"):
            shown.append(f'"{word}"' if " " in word else word)
    return " ".join(shown)


class Progress(tqdm):
    """A bar on a terminal; elsewhere a line every ten seconds, so that a log shows how far a long run has come."""

    def __init__(self, total: int) -> None:
        self.on_terminal = sys.stderr.isatty()
        super().__init__(total=total, mininterval=0.1 if self.on_terminal else 10, miniters=1)

    @staticmethod
    def status_printer(file: TextIO) -> Callable[[str], None]:
        return tqdm.status_printer(file) if file.isatty() else partial(print, file=file, flush=True)


def each_seed(args: argparse.Namespace, steps: int) -> Iterator[tuple[int, tqdm]]:
    """Seeds Python, NumPy and torch in turn.

    A progress bar counts ``steps`` per seed; where there is no terminal, lines do, and one for each seed that is done.
    """
    torch.set_num_threads(1)  # the tensors are too small to share out, and so the numbers do not depend on the cores
    with Progress(args.seeds * steps) as progress:
        for done, seed in enumerate(range(args.seed, args.seed + args.seeds), 1):
            start = time.monotonic()
            progress.set_description(f"seed {seed}", refresh=progress.on_terminal)
            for set_seed in (random.seed, np.random.seed, torch.manual_seed):
                set_seed(seed)
            yield seed, progress
            if not progress.on_terminal:
                print(f"seed {seed}: {time.monotonic() - start:.0f} s ({done} of {args.seeds})", flush=True)


def minibatches(size: int, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """One epoch in random order, in batches of ``size``; those left over at the end are left out."""
    order = torch.randperm(len(tensors[0]))
    for start in range(0, len(order) - size + 1, size):
        batch = order[start : start + size]
        yield tuple(tensor[batch] for tensor in tensors)


@dataclass
class Table:
    """Scores of rows (methods) by seed, their means, and their differences to one row, paired by seed.

    A difference is given with its standard error. A finding holds, or is contradicted, where Student's 95 % interval
    of the paired difference lies on the one side of zero or the other, and is otherwise open.

    Args:
        title: What is measured, on which data.
        columns: The scores of a row, each with its number format, as in ``{"accuracy, %": ".1f"}``.
        reference: The row that the others are compared with; None for no such column.
        paper: Columns of numbers from papers: heading to row to text.
        compared: The columns with differences to the reference; None for all.
        notes: Sentences below the table, such as what differs from the paper.
    """

    title: str
    columns: Mapping[str, str]
    reference: str | None = None
    paper: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    compared: Sequence[str] | None = None
    notes: Sequence[str] = ()
    scores: dict[str, list[Mapping[str, float]]] = field(default_factory=dict, init=False)
    claims: list[tuple[str, str, str, str, bool, float]] = field(default_factory=list, init=False)
    seconds: float = field(default=0, init=False)

    def add(self, row: str, scores: Mapping[str, float]) -> None:
        """Adds the scores of one seed."""
        if scores.keys() != self.columns.keys():
            raise ValueError(f"the scores of {row!r} are {list(scores)}, the columns {list(self.columns)}")
        self.scores.setdefault(row, []).append(scores)

    def add_all(self, results: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
        """Adds the "scores" of all rows and seeds, as `run_grid` returns them, and the time that they took."""
        for row, of_seeds in results.items():
            for result in of_seeds:
                self.add(row, result["scores"])
        self.add_time(results)

    def add_time(self, results: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
        """Adds the "seconds" that trainings took."""
        self.seconds += sum(result.get("seconds", 0) for of_seeds in results.values() for result in of_seeds)

    def find(
        self,
        claim: str,
        better: str,
        worse: str,
        column: str | None = None,
        *,
        lower: bool = False,
        margin: float = 0.0,
    ) -> None:
        """States that row ``better`` scores higher (``lower``: lower) in ``column``, the first one by default.

        ``margin``: how much worse it may be for that. Nothing is found where only other rows were run.
        """
        self.claims.append((claim, better, worse, column or next(iter(self.columns)), lower, margin))

    def values(self, row: str, column: str) -> np.ndarray:
        return np.array([scores[column] for scores in self.scores[row]])

    def paired(self, row: str, other: str, column: str) -> tuple[float, float]:
        """Mean over the seeds of ``row - other``, and its standard error (NaN for a single seed)."""
        return _mean_and_sd(self.values(row, column) - self.values(other, column), of_mean=True)

    def verdict(self, better: str, worse: str, column: str, lower: bool, margin: float = 0.0) -> str:
        difference, error = self.paired(better, worse, column)
        seeds = len(self.scores[better])
        if seeds < 2:
            return "open (one seed)"
        half_width = float(student.ppf(0.975, seeds - 1)) * error
        gain = margin + (-difference if lower else difference)
        return "holds" if gain > half_width else "does not hold" if gain < -half_width else "open"

    def markdown(self) -> str:
        if not self.scores:
            return f"{self.title}. No row is complete.\n"
        seeds = len(next(iter(self.scores.values())))
        lines = [f"{self.title}. Mean ± sd over {seeds} seeds." if seeds > 1 else f"{self.title}. One seed."]
        if self.reference in self.scores:
            lines[0] += f" Δ: paired difference from “{self.reference}” ± its standard error."
        headings = [""]
        for column in self.columns:
            headings += [column] + (["Δ"] if self._has_differences(column) else [])
        headings += self.paper
        lines += ["", _line(headings), _line(["---"] + ["---:"] * (len(headings) - 1))]
        for row in self.scores:
            cells = [row]
            for column, digits in self.columns.items():
                cells.append(_plus_minus(*_mean_and_sd(self.values(row, column)), digits))
                if self._has_differences(column):
                    other = row != self.reference
                    cells.append(_plus_minus(*self.paired(row, self.reference, column), f"+{digits}") if other else "")
            lines.append(_line(cells + [texts.get(row, "") for texts in self.paper.values()]))
        for note in self.notes:
            lines += ["", note]
        for finding in self._findings():
            digits = self.columns[finding["column"]]
            difference = _plus_minus(finding["difference"], finding["standard error"], f"+{digits}")
            lines += ["", f"Finding: {finding['claim']}: **{finding['verdict']}**, {difference} ({finding['column']})."]
        return "\n".join(lines) + "\n"

    def _has_differences(self, column: str) -> bool:
        return self.reference in self.scores and (self.compared is None or column in self.compared)

    def _findings(self) -> list[dict[str, Any]]:
        findings = []
        for claim, better, worse, column, lower, margin in self.claims:
            if not {better, worse} <= self.scores.keys():
                continue
            difference, error = self.paired(better, worse, column)
            verdict = self.verdict(better, worse, column, lower, margin)
            findings.append({"claim": claim, "better": better, "worse": worse, "column": column})
            findings[-1] |= {"difference": difference, "standard error": error, "verdict": verdict}
        return findings

    def as_dict(self) -> dict[str, Any]:
        rows: dict[str, Any] = {}
        for row in self.scores:
            rows[row] = {"paper": {name: texts[row] for name, texts in self.paper.items() if row in texts}}
            for column in self.columns:
                mean, sd = _mean_and_sd(self.values(row, column))
                rows[row][column] = {"mean": mean, "sd": sd, "by seed": self.values(row, column).tolist()}
                if self.reference in self.scores:
                    difference, error = self.paired(row, self.reference, column)
                    rows[row][column] |= {"difference": difference, "standard error": error}
        return {"title": self.title, "reference": self.reference, "rows": rows, "findings": self._findings()}

    def save(self, args: argparse.Namespace, name: str) -> None:
        """Prints the table with its settings; writes it with its numbers as ``<out>/<name>.json``."""
        folders = "out", "data_dir", "runs"  # of this machine, which nobody else has
        settings = {key: value for key, value in vars(args).items() if key not in folders}
        hidden = "processes", "command"
        shown = ", ".join(
            f"{key} {value}" for key, value in settings.items() if key not in hidden and value is not None
        )
        text = f"{self.markdown()}\nSettings: {shown}.\n"
        if self.seconds > MANY_SECONDS:
            text += f"\nAll trainings together took {self.seconds / 3600:.1f} hours of one core.\n"
        if "command" in settings:
            text += f"\nCommand: `{settings['command']}`\n"
        document = {"settings": settings, **self.as_dict(), "markdown": text}
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / f"{name}.json").write_text(json.dumps(_without_nan(document), indent=1), encoding="utf-8")
        print(f"\n{text}\ntable: {args.out / name}.json")


def _mean_and_sd(values: np.ndarray, of_mean: bool = False) -> tuple[float, float]:
    if len(values) < 2:
        return float(values.mean()), float("nan")
    sd = float(values.std(ddof=1))
    return float(values.mean()), sd / len(values) ** 0.5 if of_mean else sd


def _plus_minus(mean: float, deviation: float, digits: str) -> str:
    if np.isnan(mean):
        return ""
    return f"{mean:{digits}}" if np.isnan(deviation) else f"{mean:{digits}} ± {deviation:{digits.lstrip('+')}}"


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _without_nan(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nan(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_without_nan(item) for item in value]
    return None if isinstance(value, float) and np.isnan(value) else value


def save_figure(figure: Figure, args: argparse.Namespace, name: str) -> None:
    """Writes ``<out>/<name>.png``."""
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / f"{name}.png"
    figure.savefig(path, dpi=120)
    with Image.open(path) as image:  # 256 colours will do, and take a third of the space
        few = image.convert("RGB").quantize(256, dither=Image.Dither.NONE)
    few.save(path, optimize=True)
    print(f"figure: {path}")
