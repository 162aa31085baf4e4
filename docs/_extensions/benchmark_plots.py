"""Plots and tables of the benchmarks page, from the measurements in benchmarks/results."""

import csv
from collections.abc import Callable, Iterable
from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # write files, open no window
import matplotlib.pyplot as plt

Row = dict[str, str]


def draw(results: Path, folder: Path) -> None:
    """Writes the plots and tables into a folder of the build."""
    folder.mkdir(parents=True, exist_ok=True)
    masks = _read(results / "cpu_masks.csv")
    _mask_plot(masks).savefig(folder / "masks.png", dpi=110)
    _shape_table(
        masks,
        folder / "masks.csv",
        ["forward and backward, ms (of softmax)", "backend"],
        lambda row: (row["operation"], row["backend"] or "torch"),
        lambda row: f"{float(row['ms']):.3g} ({row['of softmax']})",
    )
    _shape_table(
        _read(results / "cpu_designs.csv"),
        folder / "one_hot.csv",
        ["construct, draw, backward, ms (of one-hot)", "with", "backend"],
        lambda row: (row["design"], row["with"], row["backend"] or "torch"),
        lambda row: f"{float(row['ms']):.3g} ({row['of one-hot']})",
    )
    _lines(_read(results / "cpu_growth.csv"), "ms", lambda row: row["operation"], "one row, k = n / 10").savefig(
        folder / "growth.png", dpi=110
    )
    growth = _read(results / "distributions_growth.csv")
    _growth_plot(growth).savefig(folder / "designs.png", dpi=110)
    _shape_table(
        _read(results / "distributions_samplers.csv"),
        folder / "draws.csv",
        ["one draw, ms"],
        lambda row: (row["function"],),
        lambda row: f"{float(row['median_ms']):.3g}",
    )
    over_n = [row for row in _read(results / "estimators_cpu.csv") if row["table"] == "over n"]
    _lines(over_n, "median_ms", lambda row: row["function"], "inclusion probabilities, 16 rows").savefig(
        folder / "inclusion.png", dpi=110
    )
    (folder / "machine.txt").write_text(_machine(masks[0]))
    plt.close("all")


def _read(path: Path) -> list[Row]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def _machine(row: Row) -> str:
    return f"torch {row['torch']}, Python {row['python']}, {row['machine']}\n"


def _shape(row: Row) -> str:
    return f"({row['batch']}, {row['n']}), k = {row['k']}"


def _shapes(rows: Iterable[Row]) -> list[str]:
    return list(dict.fromkeys(map(_shape, rows)))


def _mask_plot(rows: list[Row]) -> plt.Figure:
    """The cost of the relaxed masks in multiples of softmax, each backend a panel."""
    figure, axes = plt.subplots(1, 2, figsize=(10, 4), sharey=True, layout="constrained")
    shapes = _shapes(rows)
    for axis, backend in zip(axes, ("numba", "torch"), strict=True):
        for name in ("sigmoid_topk", "lapsum_topk", "normal_topk", "sparse_topk p=2"):
            of = {_shape(row): row for row in rows if (row["operation"], row["backend"]) == (name, backend)}
            axis.plot([float(of[shape]["of softmax"]) for shape in shapes], marker="o", label=name)
        axis.set(title=f"{backend} backend", yscale="log")
        axis.set_xticks(range(len(shapes)), shapes, rotation=40, ha="right", fontsize="small")
        axis.axhline(1, color="0.6", linewidth=0.8)
    axes[0].set_ylabel("multiples of torch.softmax")
    axes[0].legend(fontsize="small")
    figure.suptitle("forward and backward on a CPU")
    return figure


def _shape_table(
    rows: list[Row], path: Path, heading: list[str], line: Callable[[Row], tuple[str, ...]], cell: Callable[[Row], str]
) -> None:
    """A line for each kind of row, under as many headings as it has names, and a column for each shape."""
    shapes = _shapes(rows)
    cells = {(line(row), _shape(row)): cell(row) for row in rows}
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow([*heading, *shapes])
        for names in dict.fromkeys(map(line, rows)):
            writer.writerow([*names, *(cells.get((names, shape), "") for shape in shapes)])


def _growth_plot(rows: list[Row]) -> plt.Figure:
    """Draws and scores of the designs over the length of a row."""
    operations = ("sample", "log_prob")
    figure, axes = plt.subplots(1, len(operations), figsize=(10, 4), layout="constrained")
    for axis, operation in zip(axes, operations, strict=True):
        chosen = [row for row in rows if row["operation"] == operation and row["batch"] == "1" and _is_half(row)]
        _plot_lines(axis, chosen, "median_ms", lambda row: row["function"])
        axis.set(title=operation, xlabel="n")
    axes[0].set_ylabel("ms, one row, k = n/2")
    axes[0].legend(fontsize="x-small")
    return figure


def _is_half(row: Row) -> bool:
    return 2 * int(row["k"]) == int(row["n"])


def _lines(rows: list[Row], value: str, label: Callable[[Row], str], title: str) -> plt.Figure:
    figure, axis = plt.subplots(figsize=(6, 4), layout="constrained")
    _plot_lines(axis, rows, value, label)
    axis.set(title=title, xlabel="n", ylabel="ms")
    axis.legend(fontsize="small")
    return figure


def _plot_lines(axis: plt.Axes, rows: list[Row], value: str, label: Callable[[Row], str]) -> None:
    for name in dict.fromkeys(map(label, rows)):
        of = [row for row in rows if label(row) == name]
        axis.plot([int(row["n"]) for row in of], [float(row[value]) for row in of], marker=".", label=name)
    axis.set(xscale="log", yscale="log")
