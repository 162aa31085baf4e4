"""Soft ranks, sorting and permutations against torch.sort and other packages; PAV against Dykstra over n.

Run `python benchmarks/order.py`. Values are checked first. The target is 3 times torch.sort on the same tensor for
soft_rank and soft_sort, forward, where rows or batches are long enough that Python's overhead per call does not count.
The second table repeats figure 4 of Sander et al. (2023): the isotonic problem of a sparse top-k mask.
"""

from collections.abc import Callable

import torch
from timing import arguments, interleaved, optional, write_csv
from torch import Tensor

from khot import isotonic_l2, permutahedron_rank, permutahedron_sort, soft_permutation, soft_rank, soft_sort

Map = Callable[[Tensor], Tensor]
SHAPES = [(1, 1000), (128, 1000), (16, 10**5), (1, 10**6)]
LARGEST_MATRIX = 10**7  # entries of an n x n result that are still timed
ISOTONIC_SIZES = [10, 100, 1000, 10**4, 10**5]
DYKSTRA_SWEEPS = 500  # what the paper runs, exact or not


def peers() -> dict[str, Map]:
    """Other packages' functions, where they are installed."""
    calls: dict[str, Map] = {}
    if torchsort := optional("torchsort"):
        calls |= {"torchsort.soft_rank": torchsort.soft_rank, "torchsort.soft_sort": torchsort.soft_sort}
    if fast_soft_sort := optional("fast_soft_sort.pytorch_ops"):
        calls["fast_soft_sort.soft_rank"] = fast_soft_sort.soft_rank
    return calls


def matrix_peers() -> dict[str, Map]:
    """Those whose result is a relaxed permutation."""
    difftopk = optional("difftopk")
    return {"difftopk.NeuralSort": difftopk.NeuralSort(), "difftopk.SoftSort": difftopk.SoftSort()} if difftopk else {}


def check(x: torch.Tensor) -> None:
    """Asserts ranks and sorted values against F, computed item by item on a part of each row."""
    part = x[:, :500].double()
    z = part.unsqueeze(-1) - part.unsqueeze(-2)
    count = torch.where(z < 0, z.clamp(max=0).exp() / 2, 1 - (-z.clamp(min=0)).exp() / 2).sum(-1)
    torch.testing.assert_close(soft_rank(part), count + 0.5)
    torch.testing.assert_close(soft_rank(part.float()).double(), count + 0.5, rtol=1e-6, atol=1e-5)
    z = soft_sort(part).unsqueeze(-1) - part.unsqueeze(-2)
    count = torch.where(z < 0, z.clamp(max=0).exp() / 2, 1 - (-z.clamp(min=0)).exp() / 2).sum(-1)
    torch.testing.assert_close(count, (torch.arange(part.shape[-1]) + 0.5).double().expand_as(count))


def order_table(seconds: float) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    others, matrices = peers(), {"soft_permutation": soft_permutation, **matrix_peers()}
    for batch, n in SHAPES:
        x = torch.randn(batch, n)
        check(x)
        leaf = x.clone().requires_grad_()
        functions = {
            "torch.sort": lambda v: v.sort(-1).values,
            "soft_rank": soft_rank,
            "soft_sort": soft_sort,
            "permutahedron_rank": lambda v: permutahedron_rank(v, 0.1),
            "permutahedron_sort": lambda v: permutahedron_sort(v, 0.1),
            **others,
            **(matrices if batch * n * n <= LARGEST_MATRIX else {}),
        }

        def both(function, leaf=leaf):
            leaf.grad = None
            y = function(leaf)
            y.backward(torch.ones_like(y))

        passes = {
            "forward": {name: lambda f=f, x=x: f(x) for name, f in functions.items()},
            "forward+backward": {name: lambda f=f: both(f) for name, f in functions.items()},
        }
        for name, calls in passes.items():
            timings = interleaved(calls, seconds)
            for call, timing in timings.items():
                ratio = timing.median / timings["torch.sort"].median
                print(f"{batch:>6} {n:>8}  {name:<17}{call:<26}{timing.median * 1e3:>11.3f} ms{ratio:>9.2f}x sort")
                rows.append(row(batch, n, name, call, timing))
    return rows


def isotonic_table(seconds: float) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    for n in ISOTONIC_SIZES:
        s = torch.randn(1, n, dtype=torch.float64).sort(-1, descending=True).values
        w = (torch.arange(n) < max(1, n // 10)).double()
        exact = isotonic_l2(s, w)
        calls = {
            "pav": lambda s=s, w=w: isotonic_l2(s, w),
            "dykstra": lambda s=s, w=w: isotonic_l2(s, w, "dykstra", max_iter=DYKSTRA_SWEEPS),
        }
        for call, timing in interleaved(calls, seconds, rounds=5).items():
            error = (calls[call]() - exact).abs().max().item()
            print(f"{1:>6} {n:>8}  {'isotonic mask':<17}{call:<26}{timing.median * 1e3:>11.3f} ms   error {error:.1e}")
            rows.append(row(1, n, "isotonic mask", call, timing))
    return rows


def row(batch: int, n: int, name: str, call: str, timing) -> dict[str, object]:
    numbers = {"median_ms": timing.median, "p20_ms": timing.low, "p80_ms": timing.high}
    return {"batch": batch, "n": n, "pass": name, "function": call} | {k: f"{v * 1e3:.4f}" for k, v in numbers.items()}


def main() -> None:
    options = arguments(__doc__.splitlines()[0], "order_cpu.csv")
    torch.manual_seed(0)
    write_csv(options.csv, order_table(options.seconds) + isotonic_table(options.seconds))


if __name__ == "__main__":
    main()
