"""Root finders for sigmoid top-k: bisection, Newton and Halley from several starting guesses, and the library's own.

Repeats table 5 and figure 8 of "Differentiable top-k: from one-hot to k-hot": evaluations of the sum until the
threshold is within the tolerance of the root (in temperatures), median and worst over random rows, and the share of
rows that never get there. Newton and Halley run without a bracket, so that what the guess is worth shows.
"""

import torch
from timing import arguments, write_csv
from torch import Tensor

from khot.kernels.links.logistic import Logistic
from khot.kernels.threshold import solve_threshold

PROBLEMS = [(10, 5), (1000, 500), (1000, 10), (10_000, 1000)]
TEMPERATURES = [10.0, 1.0, 0.1, 0.01]
ROWS = 100
MAX_EVALUATIONS = 100
TOLERANCE = 1e-6


def guesses(x: Tensor, k: int, temperature: float) -> dict[str, Tensor]:
    """Where to start: the mean, the root for equal scores, the hard threshold, the root for logistic scores."""
    n, mean = x.shape[-1], x.mean(-1)
    logit = torch.logit(torch.tensor(k / n, dtype=x.dtype))
    ordered = x.sort(-1, descending=True).values
    spread = (temperature**2 + 3 * x.var(-1) / torch.pi**2).sqrt()
    return {
        "mean": mean,
        "logit": mean - temperature * logit,
        "quantile": (ordered[:, k - 1] + ordered[:, k]) / 2,
        "moments": mean - spread * logit,
    }


def evaluations(step, start: Tensor, root: Tensor, temperature: float) -> Tensor:
    """Evaluations that each row takes from its start to within the tolerance of its root; inf if it never does."""
    t, count = start.clone(), torch.full_like(start, torch.inf)
    for i in range(MAX_EVALUATIONS):
        near = (t - root).abs() <= TOLERANCE * temperature
        count = torch.where(near & count.isinf(), float(i), count)
        t = step(t)
    return count


def newton(x: Tensor, k: int, temperature: float):
    def step(t: Tensor) -> Tensor:
        y = torch.sigmoid((x - t[:, None]) / temperature)
        return t + temperature * (y.sum(-1) - k) / (y * (1 - y)).sum(-1)

    return step


def halley(x: Tensor, k: int, temperature: float):
    def step(t: Tensor) -> Tensor:
        y = torch.sigmoid((x - t[:, None]) / temperature)
        f, slope, curvature = y.sum(-1) - k, (y * (1 - y)).sum(-1), (y * (1 - y) * (1 - 2 * y)).sum(-1)
        return t + temperature * 2 * f * slope / (2 * slope**2 - f * curvature)

    return step


class _Bisection:
    def __init__(self, x: Tensor, k: int, temperature: float) -> None:
        shift = temperature * torch.logit(torch.tensor(k / x.shape[-1], dtype=x.dtype))
        self.x, self.k, self.temperature = x, k, temperature
        self.low, self.high = x.amin(-1) - shift, x.amax(-1) - shift

    def __call__(self, t: Tensor) -> Tensor:
        above = torch.sigmoid((self.x - t[:, None]) / self.temperature).sum(-1) > self.k
        self.low, self.high = torch.where(above, t, self.low), torch.where(above, self.high, t)
        return (self.low + self.high) / 2


class _Counting(Logistic):
    """Counts evaluations."""

    def __init__(self, n: int) -> None:
        self.n, self.count = n, 0.0

    def value_and_slope(self, z: Tensor) -> tuple[Tensor, Tensor]:
        self.count += z.shape[-1] / self.n
        return super().value_and_slope(z)

    def log_hazard(self, z: Tensor) -> Tensor:
        self.count += z.shape[-1] / self.n
        return super().log_hazard(z)


def main() -> None:
    options = arguments(__doc__.splitlines()[0], "root_finding.csv")
    rows: list[dict[str, object]] = []
    print(f"{'n':>6} {'k':>5} {'temperature':>11}  {'method':<10} {'guess':<9} median worst  failed")
    for n, k in PROBLEMS:
        x = torch.randn(ROWS, n, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        for temperature in TEMPERATURES:
            root = solve_threshold(x, k, temperature)
            starts = guesses(x, k, temperature)
            bisection = _Bisection(x, k, temperature)
            counts = {
                ("bisection", "bracket"): evaluations(
                    bisection, (bisection.low + bisection.high) / 2, root, temperature
                )
            }
            for name, method in (("Newton", newton), ("Halley", halley)):
                for guess, start in starts.items():
                    counts[name, guess] = evaluations(method(x, k, temperature), start, root, temperature)
            own = []
            for scores in x:
                link = _Counting(n)
                solve_threshold(scores, k, temperature, link)
                own.append(link.count)
            counts["khot", "moments"] = torch.tensor(own)  # it stops by itself, at full precision
            for (method, guess), count in counts.items():
                failed = count.isinf().double().mean().item()
                worst = count[count.isfinite()].max().item() if failed < 1 else float("nan")
                problem = f"{n:>6} {k:>5} {temperature:>11g}  {method:<10} {guess:<9}"
                print(f"{problem} {count.median():>6.1f} {worst:>5.1f} {failed:>6.0%}")
                row = {"n": n, "k": k, "temperature": temperature, "method": method, "guess": guess}
                rows.append(
                    {**row, "median": f"{count.median():.1f}", "worst": f"{worst:.1f}", "failed": f"{failed:.2f}"}
                )
    write_csv(options.csv, rows)


if __name__ == "__main__":
    main()
