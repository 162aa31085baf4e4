"""Writes tables of measurements into the pages, as Markdown, so that a repository shows them as well.

    python docs/_extensions/result_tables.py

takes them from the results of benchmarks and experiments; a test compares the pages with these.
"""

import csv
import json
from collections.abc import Callable, Iterable
from pathlib import Path

DOCS = Path(__file__).parents[1]
RESULTS = DOCS.parent / "benchmarks" / "results"
EXPERIMENTS = DOCS.parent / "experiments" / "results"
Row = dict[str, str]


def peers(rows: list[Row]) -> Iterable[list[str]]:
    yield ["library", "what is compared", "there", "here"]
    yield from ([f"{row['library']} {row['version']}", row["question"], row["there"], row["here"]] for row in rows)


def times_of_peers(rows: list[Row]) -> Iterable[list[str]]:
    yield ["library", "function", "ms", "multiples of softmax"]
    for row in rows:
        yield [f"{row['library']} {row['version']}", f"`{row['function']}`", row["ms"], row["of softmax"]]


def steps(rows: list[Row]) -> Iterable[list[str]]:
    """A line for each estimator, a column for each shape."""
    shapes = list(dict.fromkeys(f"{row['batch']} rows, {row['k']} of {row['n']}" for row in rows))
    yield ["estimator", *shapes]
    cells = {
        (row["estimator"], f"{row['batch']} rows, {row['k']} of {row['n']}"): (
            f"{float(row['median_ms']):.3g} ({float(row['of one-hot']):.3g})"
        )
        for row in rows
    }
    for name in dict.fromkeys(row["estimator"] for row in rows):
        yield [name, *(cells.get((name, shape), "–") for shape in shapes)]


def hard_masks(rows: list[Row]) -> Iterable[list[str]]:
    yield ["rows × n, k", "`topk_mask`, ms", "`torch.topk` and scatter, ms", "ratio"]
    for row in rows:
        if row["rows"] == "normal":
            times = (f"{float(row[name]):.2f}" for name in ("topk_mask_ms", "topk_scatter_ms", "ratio"))
            yield [f"{row['batch']} × {row['n']}, {row['k']}", *times]


def positions(rows: list[Row]) -> Iterable[list[str]]:
    ratios = ("topk_indices", "of ReLU", "of parts", "TopK.select")
    yield ["rows × n, k", "`torch.topk` and sort, ms", "`topk_indices`", "of tied rows", "of parts", "`TopK.select`"]
    for row in rows:
        size = f"{row['batch']} × {row['n']}, {row['k']}"
        yield [size, f"{float(row['topk_sort_ms']):.2f}", *(f"{float(row[name]):.2f}" for name in ratios)]


def chains(rows: list[Row]) -> Iterable[list[str]]:
    columns = {
        "steps per second": "steps_per_second",
        "seconds to within 1 % of the truth": "seconds_to_truth",
        "effective samples per second, log joint": "ess_per_second_log_joint",
        "the same, uncertain inclusions": "ess_per_second_inclusions",
    }
    yield ["proposals, start", *columns]
    for row in rows:
        shown = (f"{float(row[name]):.2g}" if row[name] else "–" for name in columns.values())
        yield [f"{row['kernel']}, {row['start']}", *shown]


def samplers(rows: list[Row]) -> Iterable[list[str]]:
    """A line for each sampler, a column for each noise."""
    noises = list(dict.fromkeys(row["noise"] for row in rows))
    yield ["effective samples per second", *(f"noise {float(noise):g}" for noise in noises)]
    for kernel, chains in dict.fromkeys((row["kernel"], row["chains"]) for row in rows):
        of_sampler = [row for row in rows if (row["kernel"], row["chains"]) == (kernel, chains)]
        sizes = (f"{float(row['ess_per_second_inclusions']):,.0f}" for row in of_sampler)
        yield [f"{kernel}, {chains} chain{'s' * (chains != '1')}", *sizes]


TABLES: dict[str, tuple[str, Callable[[list[Row]], Iterable[list[str]]]]] = {  # the file of results, to page and table
    "peers": ("coming_from.md", peers),
    "peer_times": ("coming_from.md", times_of_peers),
    "selection_cpu": ("guide/costs.md", hard_masks),
    "selection_positions_cpu": ("guide/costs.md", positions),
    "estimator_steps": ("guide/costs.md", steps),
    "khot_swap": ("guide/mcmc.md", chains),
    "khot_chains": ("guide/mcmc.md", samplers),
}
OF_EXPERIMENTS = {  # the results of an experiment, to the page that shows their table
    "variable_selection_methods_diabetes": "guide/variable_selection.md",
    "variable_selection_methods_genomics": "guide/variable_selection.md",
}
PAGES = {home for home, _ in TABLES.values()} | set(OF_EXPERIMENTS.values())


def filled(page: Path) -> str:
    """The text of a page with each of its tables as the measurements have it."""
    text = page.read_text(encoding="utf-8")
    for name, (home, table) in TABLES.items():
        if page == DOCS / home:
            text = _replaced(text, f"benchmarks/results/{name}.csv", _markdown(table(_read(name))))
    for name, home in OF_EXPERIMENTS.items():
        if page == DOCS / home:
            saved = json.loads((EXPERIMENTS / f"{name}.json").read_text(encoding="utf-8"))
            lines = saved["markdown"].splitlines(keepends=True)
            text = _replaced(text, f"experiments/results/{name}.json", "".join(v for v in lines if v.startswith("|")))
    return text


def _replaced(text: str, source: str, table: str) -> str:
    before, after = f"<!-- from {source} -->\n\n", "\n<!-- end -->"
    start = text.index(before) + len(before)
    return text[:start] + table + text[text.index(after, start - 1) :]


def _read(name: str) -> list[Row]:
    with (RESULTS / f"{name}.csv").open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def _markdown(lines: Iterable[list[str]]) -> str:
    head, *rows = ("| " + " | ".join(cells) + " |\n" for cells in lines)
    return head + "|---" * (head.count(" | ") + 1) + "|\n" + "".join(rows)


if __name__ == "__main__":
    for home in PAGES:
        (DOCS / home).write_text(filled(DOCS / home), encoding="utf-8")
