"""Every relaxed map: time, memory and distance from the hard top-k, against torch, against peers, and over n and k.

Run `python benchmarks/relaxations.py [torch] [maps] [growth] [half]` (default: all parts).

torch   sigmoid_topk against torch.softmax, torch.sort and torch.topk on the same tensor, after a comparison with
        bisection in float64. Target of a plain-torch engine: at most 12 times softmax forward + backward, 20 times for
        many short rows, and faster than a sort from n = 1000.
maps    all maps at the same softness against sigmoid_topk: time, peak memory of forward + backward, and how much of the
        top-k sum <x, y> they lose. Peers from PyPI (difftopk, torchsort, entmax) join where they are installed.
growth  time against n = 10 ... 10^7 and against k, as a table and a plot: linear in n, flat in k.
half    time and peak memory of forward + backward in float32 against n = 10 ... 10^7 at k = n / 2, and the deviation of
        the sum, |sum y - k|, of all maps and peers (those of LapSum's figures, Struski et al. 2025). Processor time,
        which leaves out what other processes take; peers with n x n matrices end at n = 10^4, and a function that
        took more than ten seconds at one n is left out from there on.
"""

import time
from collections.abc import Callable
from functools import partial

import torch
from timing import RESULTS, interleaved, optional, peak_bytes, run_parts
from torch import Tensor

import khot

SHAPES = [(1280, 10, 5), (128, 1000, 500), (8192, 64, 8), (100, 10**4, 10**3), (16, 10**5, 10**3), (1, 10**6, 10**5)]
Map = Callable[[Tensor, int], Tensor]
Row = dict[str, object]

MASKS: dict[str, Map] = {
    "sigmoid_topk": khot.sigmoid_topk,
    "lapsum_topk": khot.lapsum_topk,
    "normal_topk": khot.normal_topk,
    "capped_softmax": khot.capped_softmax,
    "sparse_topk p=2": khot.sparse_topk,
    "sparse_topk p=4/3": partial(khot.sparse_topk, p=4 / 3),
    "sparse_topk p=1.2": partial(khot.sparse_topk, p=1.2),
    "transport_topk": partial(khot.transport_topk, epsilon=2.0),
}
OTHERS: dict[str, Map] = {
    "sparse_topk_magnitude p=2": khot.sparse_topk_magnitude,
    "sparse_topk_magnitude p=4/3": partial(khot.sparse_topk_magnitude, p=4 / 3),
    "sparse_topk_signed p=2": khot.sparse_topk_signed,
    "soft_rank": lambda x, k: khot.soft_rank(x),
    "soft_sort": lambda x, k: khot.soft_sort(x),
}
FOR_SMALL_K: dict[str, Map] = {
    "successive_softmax_topk": khot.successive_softmax_topk,
    "sorted_transport_topk": lambda x, k: khot.sorted_transport_topk(x, k, 1.0).sum(-1),
}


def peers() -> dict[str, Map]:
    """What other packages have for the same job, where they are installed."""
    found: dict[str, Map] = {}
    if difftopk := optional("difftopk"):  # n x n relaxed permutations, of which the first k rows add up to a mask
        neural_sort, soft_sort = difftopk.NeuralSort(), difftopk.SoftSort()
        found["difftopk NeuralSort"] = lambda x, k: neural_sort(x)[:, :k].sum(1)
        found["difftopk SoftSort"] = lambda x, k: soft_sort(x)[:, :k].sum(1)
    if torchsort := optional("torchsort"):
        found["torchsort soft_rank"] = lambda x, k: torchsort.soft_rank(x)
    if entmax := optional("entmax"):
        found["entmax sparsemax (k = 1)"] = lambda x, k: entmax.sparsemax(x, -1)
    return found


def forward_backward(function: Map, leaf: Tensor, k: int, grad: Tensor) -> None:
    leaf.grad = None
    function(leaf, k).backward(grad)


def check(x: Tensor, k: int, grad: Tensor) -> float:
    """Asserts value, sum and gradient of sigmoid_topk; returns the relative error of the sum."""
    leaf = x.clone().requires_grad_()
    y = khot.sigmoid_topk(leaf, k)
    y.backward(grad)
    low, high = (end.double().unsqueeze(-1) for end in (x.amin(-1) - 50, x.amax(-1) + 50))
    for _ in range(100):
        middle = (low + high) / 2
        more = (x - middle).sigmoid().sum(-1, keepdim=True) > k
        low, high = torch.where(more, middle, low), torch.where(more, high, middle)
    reference = (x - low).sigmoid()
    torch.testing.assert_close(y.detach().double(), reference, rtol=5e-6, atol=1e-7)
    slope = reference * (1 - reference)
    mean = (slope * grad).sum(-1, keepdim=True) / slope.sum(-1, keepdim=True)
    torch.testing.assert_close(leaf.grad.double(), slope * (grad - mean), rtol=1e-4, atol=1e-6)
    error = ((y.detach().double().sum(-1) - k).abs().max() / k).item()
    assert error <= 1e-6, error
    return error


def against_torch(seconds: float) -> list[Row]:
    rows: list[Row] = []
    columns = ("sigmoid_topk", "softmax", "sort", "topk")
    heading = "".join(f"{c:>14}" for c in columns)
    print(f"\n{'batch':>6} {'n':>8} {'k':>7}  {'pass':<16}{heading}   /softmax    /sort")
    for batch, n, k in SHAPES:
        x, grad = torch.randn(batch, n), torch.randn(batch, n)
        check(x, k, grad)
        functions: dict[str, Map] = {
            "sigmoid_topk": khot.sigmoid_topk,
            "softmax": lambda x, k: torch.softmax(x, -1),
            "sort": lambda x, k: x.sort(-1).values,
            "topk": lambda x, k: x.topk(k, -1).values,
        }
        leaf = x.clone().requires_grad_()
        passes = {
            "forward": {c: partial(f, x, k) for c, f in functions.items()},
            "forward+backward": {
                c: partial(forward_backward, f, leaf, k, grad[..., :k] if c == "topk" else grad)
                for c, f in functions.items()
            },
        }
        for name, calls in passes.items():
            timings = interleaved(calls, seconds)
            times = {c: timings[c].median * 1e3 for c in columns}
            softmax, sort = (times["sigmoid_topk"] / times[c] for c in ("softmax", "sort"))
            cells = "".join(f"{times[c]:>11.3f} ms" for c in columns)
            print(f"{batch:>6} {n:>8} {k:>7}  {name:<16}{cells}{softmax:>10.1f}x{sort:>8.2f}x")
            for c, timing in timings.items():
                quantiles = {f"{q}_ms": f"{v * 1e3:.4f}" for q, v in zip(("median", "p20", "p80"), timing, strict=True)}
                rows.append({"batch": batch, "n": n, "k": k, "pass": name, "function": c, **quantiles})
    return rows


def all_maps(seconds: float) -> list[Row]:
    rows: list[Row] = []
    others = peers()
    for batch, n, k in [(128, 1000, 500), (128, 1000, 10), (8192, 64, 8), (16, 10**5, 10**3)]:
        x, grad = torch.randn(batch, n), torch.randn(batch, n)
        leaf = x.clone().requires_grad_()
        maps = MASKS | OTHERS | (FOR_SMALL_K if k <= 10 else {}) | (others if n <= 1000 else {})
        heading = "    forward  forward+backward  /sigmoid_topk     peak  lost of top-k sum"
        print(f"\n{f'(batch, n, k) = ({batch}, {n}, {k})':<32}{heading}")
        forward = interleaved({name: partial(f, x, k) for name, f in maps.items()}, seconds, rounds=9)
        both = interleaved(
            {name: partial(forward_backward, f, leaf, k, grad) for name, f in maps.items()}, seconds, rounds=9
        )
        hard = (x * khot.topk_mask(x, k)).sum(-1)
        for name, function in maps.items():
            ratio = both[name].median / both["sigmoid_topk"].median
            megabytes = peak_bytes(partial(forward_backward, function, leaf, k, grad)) / 2**20
            is_mask = name in MASKS | FOR_SMALL_K
            lost = ((hard - (x * function(x, k)).sum(-1)) / hard).mean().item() if is_mask else None
            times = (forward[name].median * 1e3, both[name].median * 1e3)
            loss = "" if lost is None else f"{lost:.3f}"
            print(f"{name:<32}{times[0]:>11.2f} ms {times[1]:>14.2f} ms {ratio:>12.2f}x {megabytes:>7.1f} MB {loss:>8}")
            rows.append({
                "batch": batch, "n": n, "k": k, "function": name, "forward_ms": f"{times[0]:.4f}",
                "both_ms": f"{times[1]:.4f}", "to_sigmoid": f"{ratio:.2f}", "peak_mb": f"{megabytes:.1f}", "lost": loss,
            })  # fmt: skip
    return rows


def growth(seconds: float) -> list[Row]:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    maps = MASKS | {name: OTHERS[name] for name in ("sparse_topk_magnitude p=2", "soft_rank", "soft_sort")}
    sizes = [(10**e, max(1, 10**e // 10)) for e in range(1, 8)]
    subsets = [(10**5, k) for k in (1, 10, 100, 10**3, 10**4, 5 * 10**4, 99_999)]
    rows: list[Row] = []
    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 5), layout="constrained", sharey=True)
    for axis, problems in ((left, sizes), (right, subsets)):
        times: dict[str, list[float]] = {name: [] for name in maps}
        for n, k in problems:
            grad, leaf = torch.randn(1, n), torch.randn(1, n).requires_grad_()
            calls = {name: partial(forward_backward, f, leaf, k, grad) for name, f in maps.items()}
            for name, timing in interleaved(calls, seconds / 5, rounds=3).items():
                times[name].append(timing.median * 1e3)
                rows.append({"n": n, "k": k, "function": name, "both_ms": f"{times[name][-1]:.4f}"})
        for name, values in times.items():
            axis.loglog([p[0] if axis is left else p[1] for p in problems], values, marker=".", label=name)
            if axis is left:
                exponent = torch.tensor(values[-1] / values[-3]).log10().item() / 2
                print(f"{name:<28} time ~ n^{exponent:.2f} from 10^5 to 10^7; at 10^7 {values[-1]:.0f} ms")
            else:
                print(f"{name:<28} over k at n = 10^5: {min(values):.2f} to {max(values):.2f} ms")
    left.set(xlabel="n (k = n / 10)", ylabel="forward + backward, ms")
    right.set(xlabel="k (n = 100,000)")
    left.legend(fontsize="small")
    figure.savefig(RESULTS / "relaxations_growth.png", dpi=100)
    return rows


TOO_LONG, LARGEST_MATRIX = 10.0, 10**4


def at_half(seconds: float) -> list[Row]:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    others = peers()
    maps = MASKS | OTHERS | others
    are_masks = {*MASKS, *(name for name in others if "difftopk" in name)}
    rows: list[Row] = []
    measured: dict[str, list[tuple[int, float, float, float]]] = {name: [] for name in maps}
    for n in (10**e for e in range(1, 8)):
        k, grad, leaf = n // 2, torch.randn(1, n), torch.randn(1, n).requires_grad_()
        calls = {name: partial(forward_backward, function, leaf, k, grad) for name, function in maps.items()}
        timings = interleaved(calls, seconds / 5, rounds=3, clock=time.process_time)
        for name, timing in timings.items():
            megabytes = peak_bytes(calls[name]) / 2**20
            off = abs(maps[name](leaf.detach(), k).double().sum().item() - k) if name in are_masks else float("nan")
            measured[name].append((n, timing.median * 1e3, megabytes, off))
            print(f"{n:>9} {name:<32}{timing.median * 1e3:>12.3f} ms {megabytes:>10.3f} MB {off:>10.2g}", flush=True)
            rows.append({
                "n": n, "k": k, "function": name, "both_ms": f"{timing.median * 1e3:.4f}",
                "peak_mb": f"{megabytes:.4f}", "deviation": "" if off != off else f"{off:.3g}",
            })  # fmt: skip
        matrices = {name for name in others if "difftopk" in name} if n >= LARGEST_MATRIX else set()
        maps = {name: f for name, f in maps.items() if timings[name].median < TOO_LONG and name not in matrices}
    figure, panels = plt.subplots(1, 3, figsize=(16, 5), layout="constrained")
    for axis, place, label in zip(panels, (1, 2, 3), ("ms", "peak memory, MB", "|sum y - k|"), strict=True):
        for name, points in measured.items():
            shown = [(point[0], max(point[place], 1e-9)) for point in points if point[place] == point[place]]
            if shown:
                axis.loglog(*zip(*shown, strict=True), marker=".", label=name)
        axis.set(xlabel="n (k = n / 2)", ylabel=label)
    panels[0].legend(fontsize="x-small")
    figure.savefig(RESULTS / "relaxations_half.png", dpi=100)
    return rows


def main() -> None:
    parts = {"torch": against_torch, "maps": all_maps, "growth": growth, "half": at_half}
    run_parts(__doc__, "relaxations", parts)


if __name__ == "__main__":
    main()
