"""What a step of KHotSwap costs, how that grows with the chains in a batch, and effective samples against NumPy's.

Run `python benchmarks/khot_chains.py --threads 1`; `--seconds` is the time of each chain. The model: y ~ N(X x,
sigma² I) with 100 rows, n = 300 independent covariates, k = 10 of coefficient 1, and noise sigma = 3 (the posterior is
peaked: half of the informed swaps are accepted) or 8 (nine of ten are). The prior is uniform on all k-hot vectors.

Rows of the table: KHotSwap with several numbers of chains in a batch; the same with one swap per proposal, and with
uniform swaps only; and a Gibbs sampler of eight lines of NumPy for this model: it removes one unit and draws its
replacement from the full conditional distribution, which takes one product with the covariates. If NumPyro is
installed, also its DiscreteHMCGibbs for the same posterior: k categorical sites that must all differ, and a normal site
that it needs for HMC. A step there draws every site once from its conditional distribution.

Columns, by CPU time: steps per second, of all chains together; how many times one evaluation of the log joint
density with its gradient, by Pyro, a step takes; the median of the effective sample sizes per second of the inclusions
that are uncertain, with a probability in (0.05, 0.95), of all chains together.
"""

import importlib.util
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pyro
import torch
from pyro import poutine
from pyro.distributions import Normal
from pyro.ops.stats import effective_sample_size
from timing import arguments, write_csv
from torch import Tensor

from khot import ConditionalPoisson, KHotSwap

UNITS, K, ROWS = 300, 10, 100
SINGLE = "KHotSwap, one swap per proposal"
WARM_UP = 1000  # steps, in which the number of swaps per proposal is adapted
KEPT, PART = 200_000, 2000  # draws that are used of all chains together, and of one part of a chain


class Data(NamedTuple):
    """A regression."""

    covariates: Tensor
    y: Tensor
    noise: float


def planted(noise: float) -> Data:
    generator = torch.Generator().manual_seed(0)
    covariates = torch.randn(ROWS, UNITS, generator=generator)
    return Data(covariates, covariates[:, :K].sum(-1) + noise * torch.randn(ROWS, generator=generator), noise)


def model(data: Data) -> None:
    x = pyro.sample("x", ConditionalPoisson(logits=torch.zeros(UNITS), k=K))
    pyro.sample("y", Normal(x @ data.covariates.T, data.noise).to_event(1), obs=data.y)


def evaluation(data: Data) -> float:
    """Seconds of the log joint density with its gradient, the least of some."""
    x = ConditionalPoisson(logits=torch.zeros(UNITS), k=K).sample().requires_grad_()
    given, best = poutine.condition(model, {"x": x}), float("inf")
    with pyro.validation_enabled(False):
        for _ in range(200):
            start = time.process_time()
            torch.autograd.grad(poutine.trace(given).get_trace(data).log_prob_sum(), x)
            best = min(best, time.process_time() - start)
    return best


def states_of(step: Callable[[], Tensor], seconds: float) -> tuple[Tensor, float, float]:
    """States ``(steps, chains, n)`` after some time to settle, the seconds for these, and the least of a step."""
    settle = time.process_time()
    while time.process_time() - settle < seconds / 4:
        step()
    states, begin, best, now = [], time.process_time(), float("inf"), 0.0
    while now < seconds:
        states.append(step())
        passed = time.process_time() - begin
        best, now = min(best, passed - now), passed
    return torch.stack(states), now, best


def measured(states: Tensor, seconds: float) -> dict[str, object]:
    number = states.shape[0] * states.shape[1]
    mean = states.sum((0, 1)) / number
    uncertain = (mean > 0.05) & (mean < 0.95)
    thinned = states[:: -(-number // KEPT)][..., uncertain].double()
    # As chains of their own: the memory of Pyro's estimate is quadratic in the length.
    parts = torch.cat([part for part in thinned.split(PART) if len(part) == min(PART, len(thinned))], 1)
    size = effective_sample_size(parts, chain_dim=1, sample_dim=0).nan_to_num(0)
    return {
        "chain_steps_per_second": states.shape[0] * states.shape[1] / seconds,
        "ess_per_second_inclusions": float(size.median()) / seconds * thinned[..., 0].numel() / parts[..., 0].numel(),
        "uncertain_inclusions": int(uncertain.sum()),
    }


def khot_swap(data: Data, chains: int, share: float, **options: Any) -> Callable[[], Tensor]:
    kernel = KHotSwap(model, uniform_share=share, chains=chains if chains > 1 else None, **options)
    kernel.setup(WARM_UP, data)
    params = dict(kernel.initial_params or {})

    def step() -> Tensor:
        params.update(kernel.sample(params))
        return params["x"].bool().view(chains, UNITS)

    for _ in range(WARM_UP):
        step()
    return step


def numpy_gibbs(data: Data) -> Callable[[], Tensor]:
    covariates, y = data.covariates.double().numpy(), data.y.double().numpy()
    generator, halves = np.random.default_rng(0), (covariates**2).sum(0) / 2
    units = generator.choice(UNITS, K, replace=False)
    inside = np.isin(np.arange(UNITS), units)
    residual = y - covariates[:, units].sum(1)

    def step() -> Tensor:
        nonlocal residual
        at = generator.integers(K)
        residual, inside[units[at]] = residual + covariates[:, units[at]], False
        score = np.where(inside, -np.inf, (residual @ covariates - halves) / data.noise**2)
        weight = np.exp(score - score.max()).cumsum()
        units[at] = weight.searchsorted(generator.random() * weight[-1], side="right")
        residual, inside[units[at]] = residual - covariates[:, units[at]], True
        return torch.from_numpy(inside.copy()).unsqueeze(0)

    return step


def numpyro_states(data: Data, seconds: float) -> tuple[Tensor, float]:
    """States ``(steps, 1, n)`` after some to settle, and the seconds for these without compilation."""
    import jax
    import jax.numpy as jnp
    import numpyro
    from numpyro.distributions import Categorical
    from numpyro.distributions import Normal as NumPyroNormal
    from numpyro.infer import HMC, MCMC, DiscreteHMCGibbs

    covariates, y = jnp.asarray(data.covariates.numpy()), jnp.asarray(data.y.numpy())

    def model() -> None:
        numpyro.sample("unused", NumPyroNormal())
        prior = Categorical(logits=jnp.zeros(UNITS))
        units = jnp.stack([numpyro.sample(f"unit_{i}", prior) for i in range(K)])
        x = jnp.zeros(UNITS).at[units].add(1.0)
        numpyro.factor("distinct", -1e4 * (x > 1).sum())
        numpyro.sample("y", NumPyroNormal(covariates @ x, data.noise).to_event(1), obs=y)

    steps = 50
    while True:
        chain = MCMC(DiscreteHMCGibbs(HMC(model)), num_warmup=steps // 4, num_samples=steps, progress_bar=False)
        chain.run(jax.random.key(0))
        chain.post_warmup_state = chain.last_state
        start = time.process_time()
        chain.run(jax.random.key(1))
        passed = time.process_time() - start
        if passed > seconds / 2:
            break
        steps = min(20 * steps, int(1.2 * steps * seconds / passed) + 1)
    found = chain.get_samples()
    units = torch.stack([torch.tensor(found[f"unit_{i}"].tolist()) for i in range(K)], -1)
    return torch.zeros(len(units), UNITS, dtype=torch.bool).scatter_(1, units, True).unsqueeze(1), passed


def row(kernel: str, chains: int, noise: float) -> dict[str, object]:
    return {"kernel": kernel, "chains": chains, "noise": noise}


def report(row: dict[str, object]) -> None:
    print({key: f"{x:.4g}" if isinstance(x, float) else x for key, x in row.items()}, flush=True)


def main() -> None:
    options = arguments(__doc__ or "", "khot_chains.csv")
    pyro.set_rng_seed(0)
    rows: list[dict[str, object]] = []
    for noise in (3.0, 8.0):
        data = planted(noise)
        once = evaluation(data)
        cases = [("KHotSwap", chains, khot_swap(data, chains, 0.1)) for chains in (1, 16, 64)]
        cases += [(SINGLE, 16, khot_swap(data, 16, 0.1, swaps_per_proposal=1))]
        cases += [("uniform swaps", 16, khot_swap(data, 16, 1.0)), ("NumPy Gibbs", 1, numpy_gibbs(data))]
        for name, chains, step in cases:
            states, seconds, best = states_of(step, options.seconds)
            ratio = best / once if name == "KHotSwap" else None
            rows.append({**row(name, chains, noise), "step_in_evaluations": ratio, **measured(states, seconds)})
            report(rows[-1])
        if importlib.util.find_spec("numpyro"):
            found = measured(*numpyro_states(data, options.seconds))
            rows.append({**row("NumPyro DiscreteHMCGibbs", 1, noise), "step_in_evaluations": None, **found})
            report(rows[-1])
    write_csv(options.csv, rows)


if __name__ == "__main__":
    main()
