"""sigmoid_topk against torch.softmax, torch.sort and torch.topk on the same tensor, forward and forward + backward.

Run `python benchmarks/relaxations.py`. Each shape is checked for correctness first, against bisection in float64. The
target of a plain-torch engine is 12 times softmax forward + backward, 20 times for many short rows, and to be faster
than a sort from n = 1000.
"""

import torch
from timing import arguments, interleaved, write_csv
from torch import Tensor

from khot import sigmoid_topk

SHAPES = [(1280, 10, 5), (128, 1000, 500), (8192, 64, 8), (100, 10**4, 10**3), (16, 10**5, 10**3), (1, 10**6, 10**5)]


def bisected_mask(x: Tensor, k: int) -> Tensor:
    """The mask by 200 bisections in float64: slow, and right."""
    x = x.double()
    low, high = x.amin(-1) - 50, x.amax(-1) + 50
    for _ in range(200):
        middle = (low + high) / 2
        too_low = torch.sigmoid(x - middle[:, None]).sum(-1) > k
        low, high = torch.where(too_low, middle, low), torch.where(too_low, high, middle)
    return torch.sigmoid(x - low[:, None])


def check(x: Tensor, k: int, grad: Tensor) -> float:
    """Asserts value, sum and gradient; returns the relative error of the sum."""
    leaf = x.clone().requires_grad_()
    y = sigmoid_topk(leaf, k)
    y.backward(grad)
    reference = bisected_mask(x, k)
    torch.testing.assert_close(y.detach().double(), reference, rtol=5e-6, atol=1e-7)
    slope = reference * (1 - reference)
    mean = (slope * grad).sum(-1, keepdim=True) / slope.sum(-1, keepdim=True)
    torch.testing.assert_close(leaf.grad.double(), slope * (grad - mean), rtol=1e-4, atol=1e-6)
    error = ((y.detach().double().sum(-1) - k).abs().max() / k).item()
    assert error <= 1e-6, error
    return error


def main() -> None:
    options = arguments(__doc__.splitlines()[0], "relaxations_cpu.csv")
    torch.manual_seed(0)
    rows: list[dict[str, object]] = []
    print(
        f"{'batch':>6} {'n':>8} {'k':>7}  {'pass':<16}"
        + "".join(f"{c:>14}" for c in ("sigmoid_topk", "softmax", "sort", "topk"))
        + "   /softmax    /sort"
    )
    for batch, n, k in SHAPES:
        x, grad = torch.randn(batch, n), torch.randn(batch, n)
        sum_error = check(x, k, grad)
        leaf = x.clone().requires_grad_()
        functions = {
            "sigmoid_topk": lambda v, k=k: sigmoid_topk(v, k),
            "softmax": lambda v: torch.softmax(v, -1),
            "sort": lambda v: v.sort(-1).values,
            "topk": lambda v, k=k: v.topk(k, -1).values,
        }

        def both(function, leaf=leaf, grad=grad):
            leaf.grad = None
            y = function(leaf)
            y.backward(grad[..., : y.shape[-1]])

        passes = {
            "forward": {name: lambda f=f, x=x: f(x) for name, f in functions.items()},
            "forward+backward": {name: lambda f=f: both(f) for name, f in functions.items()},
        }
        for name, calls in passes.items():
            timings = interleaved(calls, options.seconds)
            ours = timings["sigmoid_topk"].median
            ratios = {other: ours / timings[other].median for other in ("softmax", "sort", "topk")}
            print(
                f"{batch:>6} {n:>8} {k:>7}  {name:<16}"
                + "".join(f"{timings[c].median * 1e3:>11.3f} ms" for c in calls)
                + f"{ratios['softmax']:>10.1f}x{ratios['sort']:>8.2f}x"
            )
            for call, timing in timings.items():
                rows.append(
                    {
                        "batch": batch, "n": n, "k": k, "pass": name, "function": call,
                        "median_ms": f"{timing.median * 1e3:.4f}",
                        "p20_ms": f"{timing.low * 1e3:.4f}",
                        "p80_ms": f"{timing.high * 1e3:.4f}",
                        "sum_error": f"{sum_error:.1e}" if call == "sigmoid_topk" else "",
                    }
                )  # fmt: skip
    write_csv(options.csv, rows)


if __name__ == "__main__":
    main()
