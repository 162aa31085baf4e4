"""lapsum_topk by its closed form (sort and scan) against the root finder that the library keeps, forward only.

Run `python benchmarks/lapsum_closed_form.py`. The closed form of "LapSum - One Method to Differentiate Them All": with
the scores sorted, the sums of exp(-|x_i - x_j| / s) over the two sides of every x_j are scans; where the sum of the
Laplace distribution functions passes k between two neighbours, the threshold solves a quadratic equation. Both give the
same threshold, and the derivative is the same few passes for both, so the forward pass decides.
"""

import torch
from timing import arguments, interleaved, write_csv
from torch import Tensor

from khot.kernels.links.laplace import LAPLACE
from khot.kernels.threshold import solve_threshold

SHAPES = [(1280, 10, 5), (128, 1000, 500), (8192, 64, 8), (100, 10**4, 10**3), (16, 10**5, 10**3), (1, 10**6, 10**5)]


def closed_form_threshold(x: Tensor, k: float, scale: float) -> Tensor:
    """The threshold of each row in float64, for 0 < k < n."""
    n = x.shape[-1]
    z = (x.double() / scale).sort(-1).values
    # log sum over j <= i of exp(z_j - z_i), and over j >= i of exp(z_i - z_j): scans that cannot overflow.
    left = (z.logcumsumexp(-1) - z).exp()
    right = ((-z).flip(-1).logcumsumexp(-1).flip(-1) + z).exp()
    rank = torch.arange(n, device=x.device, dtype=torch.float64)
    sums = 0.5 * (left - 1) + (n - rank) - 0.5 * right  # of F((z_i - t)) at t = z_j; falls with j
    i = torch.searchsorted(-sums, torch.full((len(x), 1), -float(k), dtype=torch.float64))  # t <= z_i first here

    # For t between z_{i-1} and z_i: sum F = L e^{z_{i-1} - t} / 2 + (n - i) - R e^{t - z_i} / 2.
    below, above = (i - 1).clamp(min=0), i.clamp(max=n - 1)
    low, high = z.gather(-1, below), z.gather(-1, above)
    lower = torch.where(i > 0, left.gather(-1, below), 0.0)
    upper = torch.where(i < n, right.gather(-1, above), 0.0)
    # With a = e^{t - z_i} and g = e^{z_{i-1} - z_i}: upper a^2 + 2 (k - n + i) a - lower g = 0.
    half, product = k - n + i.double(), upper * lower * (low - high).exp()
    root = (half * half + product).sqrt()
    positive = torch.where(half >= 0, lower * (low - high).exp() / (half + root), (root - half) / upper)
    return scale * torch.where(i < n, high + positive.log(), low + (lower / (2 * half)).log())[:, 0]


def main() -> None:
    options = arguments(__doc__.splitlines()[0], "lapsum_closed_form_cpu.csv")
    torch.manual_seed(0)
    rows: list[dict[str, object]] = []
    print(f"{'batch':>6} {'n':>8} {'k':>7}{'closed form':>16}{'of it, sort':>16}{'root finder':>16}   ratio")
    for batch, n, k in SHAPES:
        x = torch.randn(batch, n)
        torch.testing.assert_close(
            closed_form_threshold(x, k, 1.0), solve_threshold(x, k, 1.0, LAPLACE), rtol=1e-5, atol=1e-5
        )
        timings = interleaved(
            {
                "closed_form": lambda x=x, k=k: closed_form_threshold(x, k, 1.0),
                "sort": lambda x=x: x.sort(-1).values,
                "root_finder": lambda x=x, k=k: solve_threshold(x, k, 1.0, LAPLACE),
            },
            options.seconds,
        )
        milliseconds = {name: timing.median * 1e3 for name, timing in timings.items()}
        ratio = milliseconds["closed_form"] / milliseconds["root_finder"]
        print(
            f"{batch:>6} {n:>8} {k:>7}" + "".join(f"{v:>13.3f} ms" for v in milliseconds.values()) + f"{ratio:>7.1f}x"
        )
        rows.append({"batch": batch, "n": n, "k": k} | {f"{name}_ms": f"{v:.4f}" for name, v in milliseconds.items()})
    write_csv(options.csv, rows)


if __name__ == "__main__":
    main()
