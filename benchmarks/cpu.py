"""What k-hot costs on a CPU: masks compared with softmax, designs with a one-hot distribution.

Run `python benchmarks/cpu.py [masks] [softness] [short] [matrices] [designs] [growth]` (default: all), on an idle
machine.

masks    every mask, forward and backward, in the numba and the torch backend, in multiples of torch.softmax on the same
         tensor; torch.sort and torch.topk in the same run, soft_rank and soft_sort in multiples of a sort and a
         sigmoid_topk together; and the peak memory of forward and backward.
softness masks on one thread over softness and k, in multiples of torch.softmax; with softness 1 also of scores with
         a third at -1e9 or -inf, and of heavy tails.
short    masks of short rows on one thread over softness and k, and steps of designs over k, in multiples of
         torch.softmax and of a step with OneHotCategoricalStraightThrough: the median, and the worst and where it is.
matrices the maps whose result is a matrix for each row, likewise.
designs  construct, draw with StraightThrough, backward, a fresh object each time, in multiples of the same and log_prob
         with OneHotCategoricalStraightThrough; and with log_prob on both sides, where a design has one.
growth   sigmoid_topk in both backends, softmax, sort and topk over n = 10 ... 10^7, as a table and a plot.
"""

import itertools
import statistics
import time
from collections.abc import Callable
from functools import partial

import pyro.distributions as dist
import torch
from timing import RESULTS, Timing, interleaved, peak_bytes, run_parts
from torch import Tensor

import khot
from khot.kernels import backend
from khot.kernels.operators.platforms import HAS_NUMBA

Row = dict[str, object]
Call = Callable[[], object]

BACKENDS = ("numba", "torch") if HAS_NUMBA else ("torch",)
SHAPES = [
    (1, 10, 5), (128, 10, 5), (1280, 10, 5), (128, 1000, 500), (8192, 64, 8), (100, 10**4, 10**3), (16, 10**5, 10**3),
    (1, 10**6, 10**5),
]  # fmt: skip
MASKS: dict[str, Callable[[Tensor, int], Tensor]] = {
    "sigmoid_topk": khot.sigmoid_topk,
    "lapsum_topk": khot.lapsum_topk,
    "capped_softmax": khot.capped_softmax,
    "sparse_topk p=2": khot.sparse_topk,
    "normal_topk": khot.normal_topk,
    "sparse_topk p=4/3": partial(khot.sparse_topk, p=4 / 3),
    "sparse_topk p=1.7": partial(khot.sparse_topk, p=1.7),
    "log_sigmoid_topk": khot.log_sigmoid_topk,
    "log_lapsum_topk": khot.log_lapsum_topk,
    "sparse_topk_magnitude p=2": khot.sparse_topk_magnitude,
    "sparse_topk_magnitude p=4/3": partial(khot.sparse_topk_magnitude, p=4 / 3),
    "sparse_topk_magnitude p=1.7": partial(khot.sparse_topk_magnitude, p=1.7),
    "sparse_topk_signed p=2": khot.sparse_topk_signed,
    "soft_rank": lambda x, k: khot.soft_rank(x),
    "soft_sort": lambda x, k: khot.soft_sort(x),
}
SOFTNESS_SHAPES = [(128, 1000, (1, 100, 500)), (4096, 64, (1, 6, 20))]
SOFTNESSES = (1e-3, 1e-2, 0.1, 1.0, 10.0, 1e3)
SOFT_MASKS = (
    "sigmoid_topk", "lapsum_topk", "normal_topk", "capped_softmax", "sparse_topk p=2", "sparse_topk p=4/3",
    "log_sigmoid_topk", "log_lapsum_topk", "sparse_topk_magnitude p=2", "sparse_topk_magnitude p=4/3",
    "sparse_topk_signed p=2", "topk_threshold",
)  # fmt: skip
SHORT_ROWS = (2, 4, 8, 10, 16, 32, 64)
SHORT_BATCHES = (1, 16, 128, 1280, 8192)
SHORT_SOFTNESSES = (0.01, 0.1, 1.0, 10.0)
SHORT_MASKS = ("sigmoid_topk", "lapsum_topk", "capped_softmax", "sparse_topk p=2", "log_sigmoid_topk")
SHORT_DESIGNS = {10: (16, 1280), 64: (128,)}  # batches of each number of units
MATRIX_SHAPES = [(1, 10), (128, 10), (16, 1000)]
MATRICES: dict[str, Callable[[Tensor], Tensor]] = {
    "sorted_transport_topk k=3": lambda x: khot.sorted_transport_topk(x, 3),
    "sorted_transport_topk k=8": lambda x: khot.sorted_transport_topk(x, 8),
    "soft_permutation": khot.soft_permutation,
}
DESIGN_SHAPES = [(1, 10, 5), (128, 10, 5), (1280, 10, 5), (128, 1000, 50)]
DESIGNS = {
    "ConditionalPoisson": khot.ConditionalPoisson,
    "Pivotal": khot.Pivotal,
    "Sampford": khot.Sampford,
    "Brewer": khot.Brewer,
    "ParetoSampling": khot.ParetoSampling,
    "GumbelTopK": khot.GumbelTopK,
    "RelaxedKHot": partial(khot.RelaxedKHot, 1.0),
}
LARGEST_SCORED = {"Pivotal": 0, "Brewer": 10}  # the largest k with a log_prob


def with_backend(name: str, call: Call) -> Call:
    if name == BACKENDS[0]:  # which is the default: without the cost of asking for it
        return call

    def run() -> None:
        with backend(name):
            call()

    return run


def forward_backward(function: Callable[[Tensor], Tensor], x: Tensor, grad: Tensor) -> Call:
    def run() -> None:
        x.grad = None
        function(x).backward(grad)

    return run


def masks(seconds: float) -> list[Row]:
    rows: list[Row] = []
    for batch, n, k in SHAPES:
        x, grad = torch.randn(batch, n, requires_grad=True), torch.randn(batch, n)
        plain: dict[str, Call] = {
            "softmax": forward_backward(lambda x: torch.softmax(x, -1), x, grad),
            "sort": partial(torch.sort, x.detach(), -1),
            "topk": partial(torch.topk, x.detach(), k, -1),
        }
        calls = {(name, ""): call for name, call in plain.items()}
        for name, function in MASKS.items():
            run = forward_backward(partial(function, k=k), x, grad)
            calls.update({(name, side): with_backend(side, run) for side in BACKENDS})
        timings = interleaved(calls, seconds)
        softmax = timings["softmax", ""].median
        for (name, side), timing in timings.items():
            rows.append(
                {
                    "batch": batch, "n": n, "k": k, "operation": name, "backend": side,
                    "ms": f"{1e3 * timing.median:.4f}", "of softmax": f"{timing.median / softmax:.2f}",
                    **relative(name, side, timing, timings), "peak bytes of x": memory(calls[name, side], x),
                }
            )  # fmt: skip
            print_row(rows[-1])
    return rows


def softness(seconds: float) -> list[Row]:
    """Processor time, in which other work of the machine does not show; each column is of the median call."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    rows: list[Row] = []
    for batch, n, counts in SOFTNESS_SHAPES:
        z, grad, masked = torch.randn(batch, n), torch.randn(batch, n), torch.rand(batch, n) < 1 / 3
        scores = {"finite masks": z.masked_fill(masked, -1e9), "heavy tails": 10 * z**3}
        columns = {f"{s:g}": (z, s) for s in SOFTNESSES} | {name: (x, 1.0) for name, x in scores.items()}
        columns["-inf masks"] = z.masked_fill(masked, -torch.inf), 1.0
        for name in SOFT_MASKS:
            calls: dict[str, Call] = {"softmax": forward_backward(lambda x: torch.softmax(x, -1), leaf(z), grad)}
            for k in counts:
                for column, (x, s) in columns.items():
                    if x.isfinite().all() or not name.startswith("sparse_topk_"):  # which refuse infinities
                        calls[f"{k} {column}"] = forward_backward(soft_mask(name, k, s), leaf(x), grad)
            timings = interleaved(calls, seconds / 10, rounds=5, clock=time.process_time)
            for k in counts:
                found = {c: timings[f"{k} {c}"].median for c in columns if f"{k} {c}" in timings}
                row: Row = {"batch": batch, "n": n, "k": k, "operation": name}
                row |= {c: f"{found[c] / timings['softmax'].median:.2f}" if c in found else "" for c in columns}
                rows.append(row | {"worst of softness 1": f"{max(found.values()) / found['1']:.2f}"})
                print_row(rows[-1])
    torch.set_num_threads(threads)
    return rows


def leaf(x: Tensor) -> Tensor:
    return x.clone().requires_grad_()


def soft_mask(name: str, k: int, s: float) -> Callable[[Tensor], Tensor]:
    if name == "topk_threshold":  # as wide as a mask, for the same cotangent
        return lambda x: khot.topk_threshold(x, k, s).unsqueeze(-1).to(x.dtype).expand_as(x)
    return lambda x: MASKS[name](x, k, s)  # type: ignore[call-arg]


def short(seconds: float) -> list[Row]:
    """Processor time on one thread, as in :func:`softness`."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    rows: list[Row] = []
    for n, batch in itertools.product(SHORT_ROWS, SHORT_BATCHES):
        x, grad = leaf(torch.randn(batch, n)), torch.randn(batch, n)
        calls: dict[tuple[str, int, float], Call] = {
            ("softmax", 0, 0): forward_backward(lambda x: torch.softmax(x, -1), x, grad),
            ("one-hot", 0, 0): one_hot(x, grad),
        }
        for k in sorted({max(n // 4, 1), n // 2, n - 1, 1}):
            for name, s in itertools.product(SHORT_MASKS, SHORT_SOFTNESSES):
                calls[name, k, s] = forward_backward(soft_mask(name, k, s), x, grad)
            if batch in SHORT_DESIGNS.get(n, ()):
                for name in ("ConditionalPoisson", "ParetoSampling"):
                    calls[name, k, 0] = step(DESIGNS[name], x, k, grad, True)
        timings = interleaved(calls, seconds / 50, rounds=5, clock=time.process_time)
        softmax, straight_through = timings["softmax", 0, 0].median, timings["one-hot", 0, 0].median
        for name in dict.fromkeys(name for name, _, s in calls if (name, 0, s) not in calls):
            found = {(k, s): timing.median for (other, k, s), timing in timings.items() if other == name}
            typical, (k, s) = statistics.median(found.values()), max(found, key=lambda at: found[at])
            row: Row = {
                "batch": batch,
                "n": n,
                "operation": name,
                "worst at": f"k={k}" + (f" softness={s:g}" if s else ""),
            }
            for side, unit in (("softmax", softmax), ("one-hot", straight_through)):
                row |= {f"median of {side}": f"{typical / unit:.2f}", f"worst of {side}": f"{found[k, s] / unit:.2f}"}
            rows.append(row)
            print_row(rows[-1])
    torch.set_num_threads(threads)
    return rows


def matrices(seconds: float) -> list[Row]:
    rows: list[Row] = []
    for batch, n in MATRIX_SHAPES:
        x = torch.randn(batch, n, requires_grad=True)
        calls = {("softmax", ""): forward_backward(lambda x: torch.softmax(x, -1), x, torch.randn(batch, n))}
        calls["sort", ""] = partial(torch.sort, x.detach(), -1)
        for name, function in MATRICES.items():
            run = forward_backward(function, x, torch.randn_like(function(x)))
            calls.update({(name, side): with_backend(side, run) for side in BACKENDS})
        timings = interleaved(calls, seconds)
        softmax = timings["softmax", ""].median
        for (name, side), timing in timings.items():
            rows.append(
                {
                    "batch": batch, "n": n, "operation": name, "backend": side,
                    "ms": f"{1e3 * timing.median:.4f}", "of softmax": f"{timing.median / softmax:.2f}",
                }
            )  # fmt: skip
            print_row(rows[-1])
    return rows


def relative(name: str, side: str, timing: Timing, timings: dict[tuple[str, str], Timing]) -> Row:
    """In multiples of sigmoid_topk, for ranks and sorts of it and a sort together."""
    if not side:
        return {"of sigmoid_topk": ""}
    unit = timings["sigmoid_topk", side].median
    if name.startswith("soft_"):
        unit += timings["sort", ""].median
    return {"of sigmoid_topk": f"{timing.median / unit:.2f}"}


def memory(call: Call, x: Tensor) -> str:
    return f"{peak_bytes(call) / (x.numel() * x.element_size()):.1f}" if x.numel() > 10**5 else ""


def print_row(row: Row) -> None:
    print("  ".join(str(value) for value in row.values()), flush=True)


def one_hot(logits: Tensor, grad: Tensor) -> Call:
    def run() -> None:
        logits.grad = None
        design = dist.OneHotCategoricalStraightThrough(logits=logits)
        value = design.rsample()
        loss = (value * grad).sum() + design.log_prob(value.detach()).sum()
        loss.backward()

    return run


def step(make: Callable[..., object], logits: Tensor, k: int, grad: Tensor, with_log_prob: bool) -> Call:
    """One training step; RelaxedKHot is drawn from as it is."""

    def run() -> None:
        logits.grad = None
        design = make(logits=logits, k=k)
        if isinstance(design, khot.RelaxedKHot):
            value = design.rsample()
        elif isinstance(design, khot.GumbelTopK) and with_log_prob:
            value = design.sample()
        else:
            value = khot.StraightThrough(design).rsample()
        loss = (value * grad).sum() if value.requires_grad else torch.zeros(())
        if with_log_prob:
            loss = loss + design.log_prob(value.detach()).sum()
        loss.backward()

    return run


def designs(seconds: float) -> list[Row]:
    rows: list[Row] = []
    for batch, n, k in DESIGN_SHAPES:
        logits, grad = torch.randn(batch, n, requires_grad=True), torch.randn(batch, n)
        calls: dict[tuple[str, str, str], Call] = {("one-hot", "log_prob", ""): one_hot(logits, grad)}
        for name, make in DESIGNS.items():
            for kind in ("", "log_prob"):
                if (kind and k > LARGEST_SCORED.get(name, k)) or (not kind and name == "GumbelTopK"):
                    continue
                run = step(make, logits, k, grad, bool(kind))
                calls.update({(name, kind, side): with_backend(side, run) for side in BACKENDS})
        timings = interleaved(calls, seconds)
        unit = timings["one-hot", "log_prob", ""].median
        for (name, kind, side), timing in timings.items():
            rows.append(
                {
                    "batch": batch, "n": n, "k": k, "design": name, "with": kind, "backend": side,
                    "ms": f"{1e3 * timing.median:.3f}", "of one-hot": f"{timing.median / unit:.2f}",
                }
            )  # fmt: skip
            print_row(rows[-1])
    return rows


def growth(seconds: float) -> list[Row]:
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    rows: list[Row] = []
    curves: dict[str, list[tuple[int, float]]] = {}
    for exponent in range(1, 8):
        n = 10**exponent
        x, grad = torch.randn(1, n, requires_grad=True), torch.randn(1, n)
        calls: dict[str, Call] = {
            "torch.softmax": forward_backward(lambda x: torch.softmax(x, -1), x, grad),
            "torch.sort (forward)": partial(torch.sort, x.detach(), -1),
            "torch.topk (forward)": partial(torch.topk, x.detach(), n // 10, -1),
        }
        for side in BACKENDS:
            run = forward_backward(partial(khot.sigmoid_topk, k=n // 10), x, grad)
            calls[f"sigmoid_topk, {side}"] = with_backend(side, run)
        for name, timing in interleaved(calls, seconds, rounds=7).items():
            rows.append({"n": n, "k": n // 10, "operation": name, "ms": f"{1e3 * timing.median:.4f}"})
            curves.setdefault(name, []).append((n, 1e3 * timing.median))
            print_row(rows[-1])
    figure, axes = plt.subplots(figsize=(6, 4))
    for name, points in curves.items():
        axes.loglog(*zip(*points, strict=True), marker="o", markersize=3, label=name)
    axes.set(xlabel="n (one row, k = n / 10)", ylabel="ms, forward + backward", title="A relaxed mask on a CPU")
    axes.legend(frameon=False, fontsize=8)
    figure.tight_layout()
    figure.savefig(RESULTS / "cpu_growth.png", dpi=150)
    return rows


def main() -> None:
    run_parts(
        __doc__,
        "cpu",
        {
            "masks": masks,
            "softness": softness,
            "short": short,
            "matrices": matrices,
            "designs": designs,
            "growth": growth,
        },
    )


if __name__ == "__main__":
    main()
