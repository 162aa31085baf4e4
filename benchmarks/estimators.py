"""What straight-through costs beyond its sample and its relaxed map, and k-hot probabilities over n by four ways.

Run `python benchmarks/estimators.py`. First table: an estimate on the pivotal design, forward and backward, against one
sample and one relaxed map, the map forward only or with its backward. The target is at most 2.5 times the sum.

Second table and figure, after figure 6 of "Differentiable top-k: from one-hot to k-hot", forward and backward over n:
sigmoid_topk against Sinkhorn's iteration for the same map, and the inclusion probabilities of conditional Poisson by
the product tree and by the plain O(nk) recursion. The members of each pair are compared before they are timed.
"""

from collections.abc import Callable
from pathlib import Path

import matplotlib
import torch
from timing import Timing, arguments, interleaved, write_csv
from torch import Tensor
from torch.nn.functional import pad

from khot import ConditionalPoisson, Pivotal, ReinMax, StraightThrough, sigmoid_topk, straight_through_value

matplotlib.use("Agg")  # write files, open no window
import matplotlib.pyplot as plt

OVERHEAD_SHAPES = [(128, 1000, 10), (128, 1000, 100), (128, 1000, 500)]
BATCH, FRACTION, SIZES = 16, 10, (10, 30, 100, 300, 1000, 3000, 10_000)
LARGEST = {"O(nk) recursion": 1000}  # it takes n steps one after the other
SINKHORN_ITERATIONS = 200


def backward(value: Tensor, leaf: Tensor, cotangent: Tensor) -> tuple[Tensor, Tensor]:
    return value.detach(), torch.autograd.grad(value, leaf, cotangent)[0]


def overhead(seconds: float) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    print(f"{'batch':>6}{'n':>7}{'k':>6}  {'':<24}{'median':>10}  / (sample + map), (sample + map with backward)")
    for batch, n, k in OVERHEAD_SHAPES:
        logits, cotangent = torch.randn(batch, n, requires_grad=True), torch.randn(batch, n)
        probs = sigmoid_topk(logits.detach(), k)

        def estimate(wrapper, logits=logits, cotangent=cotangent, k=k):
            return backward(wrapper(Pivotal(logits=logits, k=k)).rsample(), logits, cotangent)

        calls: dict[str, Callable[[], object]] = {
            "sample": lambda probs=probs, k=k: Pivotal(probs=probs, k=k).sample(),
            "map": lambda logits=logits, k=k: sigmoid_topk(logits, k),
            "map with backward": lambda a=(logits, cotangent), k=k: backward(sigmoid_topk(a[0], k), *a),
        }
        calls |= {wrapper.__name__: lambda wrapper=wrapper: estimate(wrapper) for wrapper in (StraightThrough, ReinMax)}
        timings = interleaved(calls, seconds)
        for name, timing in timings.items():
            sums = [timings["sample"].median + timings[other].median for other in ("map", "map with backward")]
            ratios = "".join(f"{timing.median / total:>18.2f}" for total in sums)
            print(f"{batch:>6}{n:>7}{k:>6}  {name:<24}{timing.median * 1e3:>7.2f} ms{ratios}")
            rows.append(row("overhead", batch, n, k, name, timing))
    return rows


def sinkhorn(x: Tensor, k: int) -> Tensor:
    """Unsorted SOFT at epsilon = 2, which is sigmoid_topk at temperature 1; the implicit derivative of the paper."""
    n = x.shape[-1]
    with torch.no_grad():
        scores = torch.stack((x, torch.zeros_like(x)))  # minus the cost of either anchor, 1 and 0, over epsilon
        log_mass = torch.tensor([k, n - k], dtype=x.dtype).log().view(2, *(1,) * x.dim())
        g = torch.zeros_like(log_mass)
        for _ in range(SINKHORN_ITERATIONS):
            f = -torch.logsumexp(scores + g, 0, keepdim=True)
            g = log_mass - torch.logsumexp(scores + f, -1, keepdim=True)
        y = torch.sigmoid(x + g[0] - g[1])
        w = y * (1 - y)
    linear = w * (x - (w * x).sum(-1, keepdim=True) / w.sum(-1, keepdim=True))
    return straight_through_value(y, linear)


def recursion_marginals(logits: Tensor, k: int) -> Tensor:
    """The gradient of log Z, with Z from the law of the number of ones, one Bernoulli unit added after the other."""
    with torch.no_grad():
        shift = sigmoid_topk(logits, k).logit() - logits  # so that k ones are likely and nothing underflows
    p = torch.sigmoid(logits + shift)
    law = pad(torch.ones_like(p[..., :1]), (0, k))
    for i in range(logits.shape[-1]):
        one = p[..., i : i + 1]
        law = law * (1 - one) + pad(law[..., :-1], (1, 0)) * one
    return p + torch.autograd.grad(law[..., k].log().sum(), logits, create_graph=True)[0]


PAIRS: list[dict[str, Callable[[Tensor, int], Tensor]]] = [
    {"sigmoid_topk": sigmoid_topk, "Sinkhorn": sinkhorn},
    {
        "ConditionalPoisson.mean": lambda x, k: ConditionalPoisson(logits=x, k=k, validate_args=False).mean,
        "O(nk) recursion": recursion_marginals,
    },
]


def over_n(seconds: float) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    print(f"\n{'batch':>6}{'n':>7}{'k':>6}  {'':<28}{'median':>10}")
    for n in SIZES:
        k = n // FRACTION
        x, cotangent = torch.randn(BATCH, n, dtype=torch.float64, requires_grad=True), torch.randn(BATCH, n).double()
        calls = {}
        for pair in PAIRS:
            usable = {name: f for name, f in pair.items() if n <= LARGEST.get(name, n)}
            results = [backward(f(x, k), x, cotangent) for f in usable.values()]
            for result in results[1:]:
                torch.testing.assert_close(result, results[0], rtol=1e-4, atol=1e-6)
            calls |= {name: lambda f=f, a=(x, cotangent), k=k: backward(f(a[0], k), *a) for name, f in usable.items()}
        for name, timing in interleaved(calls, seconds, rounds=5).items():
            print(f"{BATCH:>6}{n:>7}{k:>6}  {name:<28}{timing.median * 1e3:>7.2f} ms")
            rows.append(row("over n", BATCH, n, k, name, timing))
    return rows


def draw_figure(rows: list[dict[str, object]], path: Path) -> None:
    figure, axes = plt.subplots(figsize=(7, 5), layout="constrained")
    for name in (name for pair in PAIRS for name in pair):
        points = [(r["n"], float(str(r["median_ms"]))) for r in rows if r["function"] == name]
        axes.loglog(*zip(*points, strict=True), marker="o", label=name)
    axes.set(xlabel=f"n, with k = n / {FRACTION}", ylabel="ms, forward and backward")
    axes.set_title(f"inclusion probabilities of {BATCH} rows, {torch.get_num_threads()} threads")
    axes.legend()
    figure.savefig(path, dpi=150)
    plt.close(figure)


def row(table: str, batch: int, n: int, k: int, name: str, timing: Timing) -> dict[str, object]:
    return {
        "table": table, "batch": batch, "n": n, "k": k, "function": name, "median_ms": f"{timing.median * 1e3:.4f}",
        "p20_ms": f"{timing.low * 1e3:.4f}", "p80_ms": f"{timing.high * 1e3:.4f}",
    }  # fmt: skip


def main() -> None:
    options = arguments(__doc__.splitlines()[0], "estimators_cpu.csv")
    torch.manual_seed(0)
    long_rows = over_n(options.seconds)
    write_csv(options.csv, overhead(options.seconds) + long_rows)
    draw_figure(long_rows, options.csv.with_suffix(".png"))


if __name__ == "__main__":
    main()
