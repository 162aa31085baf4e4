"""Chains on a planted regression: KHotSwap, uniform swaps and a Gibbs sampler in NumPy, for the same time.

Run `python benchmarks/khot_swap.py --threads 1 --seconds 60`, in total six times as long: each sampler starts at the
truth and at a random vector. KHotSwap proposes swaps by gradients, as many together as its first 500 steps find best.
The Gibbs sampler is made for this model: it removes one unit and draws its replacement from the full conditional
distribution, which takes one product with the covariates.

The model: y ~ N(X x, sigma² I) with N = 2000 rows, n = 10,000 covariates in groups of ten with correlation 0.8 within a
group, each of variance 1, k = 50 of coefficient 1 in different groups, and noise sigma = 9, so that the signal has 38 %
of the variance, and exchanging a covariate for one of its group costs (1 - 0.8) N / sigma² = 5 nats on average: some
inclusions are certain, others are not. The prior is uniform on all k-hot vectors.

Columns: steps per second; seconds to within 1 % of the truth's log joint density; of the second half of the steps, the
effective sample size per second of the log joint density, and the median of those of the uncertain inclusions: units
that the chain has with a probability in (0.05, 0.95). An effective sample size is at most the number of moves, which
estimates from a chain that hardly moves may exceed; an inclusion that never changes counts as 0. A cell is empty where
a chain was not near the truth by half of its time, or no inclusion was uncertain.
"""

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pyro
import torch
from pyro.distributions import Normal
from pyro.ops.stats import effective_sample_size
from timing import arguments, write_csv
from torch import Tensor

from khot import ConditionalPoisson, KHotSwap

N, UNITS, K, GROUP, CORRELATION, NOISE = 2000, 10_000, 50, 10, 0.8, 9.0
WARM_UP = 500


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


def khot_swap(start: Tensor, data: tuple[Tensor, Tensor], **options: Any) -> Callable[[], Tensor]:
    kernel = KHotSwap(model, **options)
    kernel.initial_params = {"x": start}
    kernel.setup(WARM_UP, *data)
    params = dict(kernel.initial_params)

    def step() -> Tensor:
        params.update(kernel.sample(params))
        return params["x"].nonzero()[:, 0]

    return step


def numpy_gibbs(start: Tensor, data: tuple[Tensor, Tensor]) -> Callable[[], Tensor]:
    covariates, y = (x.numpy() for x in data)
    generator, halves = np.random.default_rng(0), (covariates**2).sum(0) / 2
    units, inside = start.nonzero()[:, 0].numpy().copy(), start.numpy() == 1
    residual = y - covariates[:, units].sum(1)

    def step() -> Tensor:
        nonlocal residual
        at = generator.integers(K)
        residual, inside[units[at]] = residual + covariates[:, units[at]], False
        score = np.where(inside, -np.inf, (residual @ covariates - halves) / NOISE**2)
        weight = np.exp(score - score.max(), dtype=np.float64).cumsum()
        units[at] = weight.searchsorted(generator.random() * weight[-1], side="right")
        residual, inside[units[at]] = residual - covariates[:, units[at]], True
        return torch.from_numpy(np.sort(units))

    return step


SAMPLERS: dict[str, Callable[..., Callable[[], Tensor]]] = {
    "KHotSwap": khot_swap,
    "uniform swaps": partial(khot_swap, uniform_share=1.0),
    "NumPy Gibbs": numpy_gibbs,
}


def chain(step: Callable[[], Tensor], seconds: float) -> tuple[Tensor, Tensor]:
    """The positions of the ones after each step, and the seconds that had passed."""
    positions, times = [], []
    begin = time.perf_counter()
    while not times or times[-1] < seconds:
        positions.append(step())
        times.append(time.perf_counter() - begin)
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
    reached, shown = times[values >= goal], near and len(units) > 0
    return {
        "steps_per_second": len(times) / float(times[-1]),
        "moves_per_second": int((positions[1:] != positions[:-1]).any(-1).sum()) / float(times[-1]),
        "seconds_to_truth": float(reached[0]) if len(reached) else None,
        "last_log_joint": float(values[-1]),
        "ess_per_second_log_joint": median_size(values[half:, None]) / seconds if near else None,
        "ess_per_second_inclusions": median_size(inclusion(positions, units)) / seconds if shown else None,
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
        (name, start): chain(sampler(value, tuple(data)), options.seconds)
        for name, sampler in SAMPLERS.items()
        for start, value in starts.items()
    }
    rows: list[dict[str, object]] = []
    for (kernel, start), (positions, times) in chains.items():
        result = measure(positions, times, log_joint(positions, *data), goal, uncertain_units(positions))
        rows.append({"kernel": kernel, "start": start, **result})
        print({name: f"{x:.4g}" if isinstance(x, float) else x for name, x in rows[-1].items()}, flush=True)
    write_csv(options.csv, rows)


if __name__ == "__main__":
    main()
