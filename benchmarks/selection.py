"""topk_mask, which counts, compared with torch.topk and scatter: over shapes, and over kinds of rows.

Run `python benchmarks/selection.py --threads 1`. Ordinary rows are normal scores; the other kinds are finite masks,
heavy tails, ties, offsets that differ from row to row, constant rows, and dtypes. Targets on one thread, for normal
scores in float32: at most 0.1, 0.25, 0.3, 0.6, 0.2 and 0.2 of the time of topk and scatter at the six shapes below.

Then the positions: topk_indices of whole rows, of scores of which ReLU made most equal and of parts of rows, and
TopK.select, as shares of the time of ``torch.topk(x, k).indices.sort()``, into a table of its own.
"""

from collections.abc import Callable
from functools import partial

import torch
from timing import arguments, interleaved, write_csv
from torch import Tensor

import khot
from khot.nn import TopK

TARGETS = {
    (128, 1000, 500): 0.1,
    (128, 1000, 50): 0.25,
    (8192, 64, 8): 0.3,
    (256, 16_384, 64): 0.6,
    (100, 10_000, 1000): 0.2,
    (1, 1_000_000, 100_000): 0.2,
}
KINDS: dict[str, Callable[[Tensor], Tensor]] = {
    "normal": lambda x: x,
    "finite_masks": lambda x: torch.where(torch.rand(x.shape) < 1 / 3, -1e9, x),
    "heavy_tails": lambda x: 10 * x**3,
    "ties": lambda x: (3 * x).round(),
    "offsets": lambda x: x + 1e4 * torch.rand(len(x), 1),
    "constant": torch.zeros_like,
    "float64": Tensor.double,
    "float64_ties": lambda x: (3 * x).round().double(),
    "bfloat16": Tensor.bfloat16,
}


POSITIONS = {(128, 1000, 50): 0.15, (8192, 64, 8): 0.2, (64, 131_072, 2048): 0.4, (1, 1_000_000, 2048): 0.45}


def topk_and_scatter(x: Tensor, k: int) -> Tensor:
    return torch.zeros_like(x).scatter_(1, x.topk(k, 1).indices, 1.0)


def check(x: Tensor, k: int) -> None:
    """Asserts that the mask has k ones a row, and the same sum of scores as that of topk."""
    y, other = khot.topk_mask(x, k), topk_and_scatter(x, k)
    assert torch.equal(y.double().sum(-1), other.double().sum(-1))
    assert torch.equal((x.double() * y).sort(-1).values, (x.double() * other).sort(-1).values)


def main() -> None:
    options = arguments(__doc__.splitlines()[0], "selection_cpu.csv")
    torch.manual_seed(0)
    rows: list[dict[str, object]] = []
    print(f"{'batch':>6} {'n':>8} {'k':>7}  {'rows':<13}{'topk_mask':>13}{'topk, scatter':>16}   ratio  target")
    for (batch, n, k), target in TARGETS.items():
        scores = torch.randn(batch, n)
        for kind, make in KINDS.items():
            x = make(scores)
            check(x, k)
            calls = {"topk_mask": partial(khot.topk_mask, x, k), "topk_scatter": partial(topk_and_scatter, x, k)}
            timings = interleaved(calls, options.seconds)
            ours, theirs = (timing.median * 1e3 for timing in timings.values())
            aim = target if kind == "normal" else ""
            print(f"{batch:>6} {n:>8} {k:>7}  {kind:<13}{ours:>10.3f} ms{theirs:>13.3f} ms{ours / theirs:>8.3f}  {aim}")
            rows.append({
                "batch": batch, "n": n, "k": k, "rows": kind, "topk_mask_ms": f"{ours:.4f}",
                "topk_scatter_ms": f"{theirs:.4f}", "ratio": f"{ours / theirs:.3f}", "target": aim,
            })  # fmt: skip
    write_csv(options.csv, rows)
    write_csv(options.csv.with_name("selection_positions_cpu.csv"), positions(options.seconds))


def positions(seconds: float) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    for (batch, n, k), target in POSITIONS.items():
        x = torch.randn(batch, n)
        ties, starts = (x - 1.5).relu(), torch.zeros(batch, dtype=torch.long)
        assert torch.equal(khot.topk_indices(x, k), x.topk(k).indices.sort().values)
        calls: dict[str, Callable[[], object]] = {
            "topk, sort": lambda x=x, k=k: x.topk(k).indices.sort(),
            "topk_indices": partial(khot.topk_indices, x, k),
            "of ReLU": partial(khot.topk_indices, ties, k),
            "of parts": partial(khot.topk_indices, x, k, starts=starts, lengths=starts + n),
            "TopK.select": partial(TopK(k).select, x),
        }
        base, *ours = (timing.median for timing in interleaved(calls, seconds).values())
        ratios = {name: f"{time / base:.3f}" for name, time in zip([*calls][1:], ours, strict=True)}
        rows.append({"batch": batch, "n": n, "k": k, "topk_sort_ms": f"{base * 1e3:.3f}", **ratios, "target": target})
        print(rows[-1])
    return rows


if __name__ == "__main__":
    main()
