"""Chains on a planted regression: swaps that gradients propose (KHotSwap) against uniform ones, for the same time.

Run `python benchmarks/khot_swap.py --seconds 60`, in total four times as long: either kernel, from the truth and from a
random vector. The model: y ~ N(X x, sigma² I) with N = 2000 rows, n = 10,000 covariates in groups of ten with
correlation 0.8 within a group, each of variance 1, k = 50 of coefficient 1 in different groups, and noise sigma = 9, so
that the signal has 38 % of the variance, and exchanging a covariate for one of its group costs (1 - 0.8) N / sigma² = 5
nats on average: some inclusions are certain, others are not. The prior is uniform on all k-hot vectors.

Columns: steps per second; seconds to within 1 % of the truth's log joint density; of the second half of the steps, the
effective sample size per second of the log joint density, and the median of those of the uncertain inclusions: units
that the chain of KHotSwap from the same start has with a probability in (0.05, 0.95). A chain is worth no more draws
than it made moves, which estimates of a chain that hardly moves do not know; an inclusion that never changes counts as
0. A cell is empty where a chain was not near the truth by half of its time.
"""

import time

import pyro
import torch
from pyro.distributions import Normal
from pyro.ops.stats import effective_sample_size
from timing import arguments, write_csv
from torch import Tensor

from khot import ConditionalPoisson, KHotSwap

N, UNITS, K, GROUP, CORRELATION, NOISE = 2000, 10_000, 50, 10, 0.8, 9.0


def planted(generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Covariates, response, and the true vector."""
    shared = torch.randn(N, UNITS // GROUP, generator=generator).repeat_interleave(GROUP, 1)
    own = torch.randn(N, UNITS, generator=generator)
    covariates = CORRELATION**0.5 * shared + (1 - CORRELATION) ** 0.5 * own
    truth = torch.zeros(UNITS)
    groups = torch.randperm(UNITS // GROUP, generator=generator)[:K]
    truth[GROUP * groups + torch.randint(GROUP, (K,), generator=generator)] = 1
    return covariates, covariates @ truth + NOISE * torch.randn(N, generator=generator), truth


def model(covariates: Tensor, y: Tensor) -> None:
    x = pyro.sample("x", ConditionalPoisson(logits=torch.zeros(UNITS), k=K))
    pyro.sample("y", Normal(covariates @ x, NOISE).to_event(1), obs=y)


def chain(share: float, start: Tensor, data: tuple[Tensor, Tensor], seconds: float) -> tuple[Tensor, Tensor]:
    """The positions of the ones after each step, and the seconds that had passed."""
    kernel = KHotSwap(model, uniform_share=share)
    kernel.initial_params = {"x": start}
    kernel.setup(0, *data)
    params, positions, times = kernel.initial_params, [], []
    begin = time.perf_counter()
    while not times or times[-1] < seconds:
        params = kernel.sample(params)
        times.append(time.perf_counter() - begin)
        positions.append(params["x"].nonzero()[:, 0])
    return torch.stack(positions), torch.tensor(times, dtype=torch.float64)


def log_joint(positions: Tensor, covariates: Tensor, y: Tensor) -> Tensor:
    """Of each step, up to the prior, which is constant; computed anew only where the step changed anything."""
    moved = torch.cat([torch.tensor([True]), (positions[1:] != positions[:-1]).any(-1)])
    columns = covariates.T.contiguous()
    values = [Normal(columns[chosen].double().sum(0), NOISE).log_prob(y.double()).sum() for chosen in positions[moved]]
    return torch.stack(values)[moved.cumsum(0) - 1]


def inclusion(positions: Tensor, units: Tensor) -> Tensor:
    """Whether each unit is in, of the second half of the steps, ``(steps, units)``."""
    return (positions[len(positions) // 2 :, :, None] == units).any(1).double()


def uncertain_units(positions: Tensor) -> Tensor:
    visited = positions[len(positions) // 2 :].unique()
    return visited[(inclusion(positions, visited).mean(0) - 0.5).abs() < 0.45]


def median_size(draws: Tensor) -> float:
    """The median over columns of the effective sample sizes of draws (steps, columns), at most the number of moves."""
    moves = (draws[1:] != draws[:-1]).sum(0)
    return float(effective_sample_size(draws[None], chain_dim=0, sample_dim=1).nan_to_num(0).minimum(moves).median())


def measure(positions: Tensor, times: Tensor, values: Tensor, goal: float, units: Tensor) -> dict[str, object]:
    half = len(times) // 2
    seconds = float(times[-1] - times[half])
    near = bool((values[:half] >= goal).any())
    reached = times[values >= goal]
    return {
        "steps_per_second": len(times) / float(times[-1]),
        "moves_per_second": int((positions[1:] != positions[:-1]).any(-1).sum()) / float(times[-1]),
        "seconds_to_truth": float(reached[0]) if len(reached) else None,
        "last_log_joint": float(values[-1]),
        "ess_per_second_log_joint": median_size(values[half:, None]) / seconds if near else None,
        "ess_per_second_inclusions": median_size(inclusion(positions, units)) / seconds if near else None,
        "uncertain_inclusions": len(units),
    }


def main() -> None:
    options = arguments(__doc__, "khot_swap.csv")
    pyro.set_rng_seed(0)
    *data, truth = planted(torch.Generator().manual_seed(0))
    starts = {"truth": truth, "random": ConditionalPoisson(logits=torch.zeros(UNITS), k=K).sample()}
    best = log_joint(truth.nonzero().T, *data)
    goal = float(best - 0.01 * best.abs())
    print(f"log joint density of the truth {float(best):.0f}, goal {goal:.0f}")
    chains = {
        (kernel, start): chain(share, value, tuple(data), options.seconds)
        for kernel, share in (("KHotSwap", 0.1), ("uniform swaps", 1.0))
        for start, value in starts.items()
    }
    rows: list[dict[str, object]] = []
    for (kernel, start), (positions, times) in chains.items():
        units = uncertain_units(chains["KHotSwap", start][0])
        result = measure(positions, times, log_joint(positions, *data), goal, units)
        rows.append({"kernel": kernel, "start": start, **result})
        print({name: f"{x:.4g}" if isinstance(x, float) else x for name, x in rows[-1].items()}, flush=True)
    write_csv(options.csv, rows)


if __name__ == "__main__":
    main()
