"""Which k of n covariates drive y, and how sure can we be? Compares ways to compute the posterior.

    python experiments/variable_selection_methods.py

A linear regression on standardised covariates, of which exactly k have a coefficient:

    x ~ uniform over the k-hot vectors    1 / s² ~ Gamma(1/2, 1/2)    b_i ~ Normal(0, slab s)
    y ~ Normal(sum_i x_i b_i z_i, s)

With coefficients and noise integrated out, p(y | x) is a multivariate t density. Two data sets:

    diabetes   scikit-learn's ten variables, their 45 products and nine squares, n = 64 (sex has no square of its own);
               k = 4; a seed is a random half of the 442 patients. All 635,376 subsets are enumerated: exact answers.
    genomics   n = 2000 covariates, neighbours with correlation 0.9, k = 10 with a coefficient of 1 or -1, as much
               noise variance as there is signal; 200 rows. A long chain of the Gibbs sampler gives the reference.

The rows:

    KHotSwap             MCMC over x, the coefficients and the noise integrated out; chains in a batch
    KHotSwap + NUTS      the noise is a site, which NUTS samples; one chain
    SVI, ReinMax         AutoKHot, a ConditionalPoisson guide, TraceMeanField_ELBO
    SVI, score function  the same guide with score_function and its leave-one-out baseline
    spike and slab       mean field: independent Bernoulli(k / n) inclusions with a normal coefficient each, coordinate
                         ascent, and the noise that maximises the bound (Carbonetto and Stephens 2012)
    horseshoe, NUTS      Pyro's NUTS on b_i ~ Normal(0, s t l_i) with half-Cauchy t and l; a draw includes the k
                         largest coefficients
    lasso path           scikit-learn's: the first k variables of the path are in, all others out
    Gibbs, by hand       NumPy: takes a variable out and draws the one that enters from its conditional law, which for
                         this model costs O(n k)

"largest error" is that of an inclusion probability. "held-out" is the mean log predictive density of a held-out row
(patients of the other half, or 200 new rows), in nats. "effective samples" is the median, over the variables with a
reference probability in (0.05, 0.95), of the effective sample size of the inclusion per CPU second of the whole run,
warm-up included. An inclusion that never changes counts as 0. Seconds are those of one thread.
"""

import math
import time
import warnings
from argparse import Namespace
from collections.abc import Callable
from functools import cached_property
from itertools import combinations
from typing import NamedTuple

import numpy as np
import pyro
import torch
from matplotlib.figure import Figure
from pyro.distributions import Gamma, HalfCauchy, Normal
from pyro.infer import MCMC, NUTS, SVI, TraceMeanField_ELBO
from pyro.ops.stats import effective_sample_size
from scipy.special import expit, logsumexp
from scipy.stats import norm
from scipy.stats import t as student
from sklearn.datasets import load_diabetes
from sklearn.linear_model import lars_path
from torch import Tensor
from torch.distributions import kl_divergence

from common import Table, experiment_parser, parse, save_figure
from khot import ConditionalPoisson, KHotSwap, score_function
from khot.infer import AutoKHot
from runs import Result, Run, add_run_arguments, run_grid

SLAB, SHAPE = 0.3, 0.5  # of a coefficient, in units of the noise; of the prior of the noise, which has the same rate
SWAP, SWAP_NUTS, REINMAX, SCORE = "KHotSwap", "KHotSwap + NUTS", "SVI, ReinMax", "SVI, score function"
MEAN_FIELD, HORSESHOE, LASSO, GIBBS = "spike and slab, mean field", "horseshoe, NUTS", "lasso path", "Gibbs, by hand"
REFERENCE = {"diabetes": "exact", "genomics": "long chain"}
ERROR, HELD_OUT, EFFECTIVE, SECONDS = "largest error", "held-out, nats", "effective samples per second", "CPU seconds"
DRAWS = 4  # of the guide, per step of SVI
PREDICTED = 1000  # draws for predictions, of those methods that draw
ENUMERATED_AT_ONCE = 2**15


class Problem:
    """A regression, to infer from and to be tested with; covariates and response are centred and scaled."""

    def __init__(self, z: np.ndarray, y: np.ndarray, test_z: np.ndarray, test_y: np.ndarray, k: int) -> None:
        mean, scale, of_y = z.mean(0), z.std(0), y.std()
        self.z, self.test_z = (z - mean) / scale, (test_z - mean) / scale
        self.y, self.test_y = (y - y.mean()) / of_y, (test_y - y.mean()) / of_y
        self.k, (self.rows, self.n) = k, z.shape

    @cached_property
    def gram(self) -> np.ndarray:
        return self.z.T @ self.z

    @cached_property
    def moments(self) -> np.ndarray:
        return self.z.T @ self.y

    @cached_property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Covariates, response, Gram matrix and moments, in float64 where n is small, for its badly scaled products."""
        dtype = torch.float64 if self.n <= self.rows else torch.float32
        return tuple(torch.tensor(part, dtype=dtype) for part in (self.z, self.y, self.gram, self.moments))

    def prior(self) -> ConditionalPoisson:
        return ConditionalPoisson(logits=torch.zeros_like(self.tensors[3]), k=self.k)

    def terms(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """log det C and yᵀ C⁻¹ y, ``(...,)``, with C = I + slab² Z diag(x) Zᵀ, in which x is linear."""
        z, y, gram, moments = self.tensors
        if self.n <= self.rows:
            scaled = x.unsqueeze(-1) * SLAB**2
            system = torch.eye(self.n, dtype=x.dtype) + scaled * gram
            fit = torch.linalg.solve(system, scaled * moments.unsqueeze(-1)).squeeze(-1) @ moments
            return torch.linalg.slogdet(system).logabsdet, y @ y - fit
        covariance = SLAB**2 * (z * x.unsqueeze(-2)) @ z.T + torch.eye(self.rows, dtype=x.dtype)
        factor = torch.linalg.cholesky(covariance)
        white = torch.linalg.solve_triangular(factor, y.unsqueeze(-1), upper=False).squeeze(-1)
        return 2 * factor.diagonal(dim1=-2, dim2=-1).log().sum(-1), white.square().sum(-1)

    def log_evidence(self, x: Tensor) -> Tensor:
        """log p(y | x) up to a constant."""
        determinant, quadratic = self.terms(x)
        return -determinant / 2 - (SHAPE + self.rows / 2) * (SHAPE + quadratic / 2).log()

    def model(self) -> None:
        x = pyro.sample("x", self.prior())
        pyro.factor("evidence", self.log_evidence(x))

    def model_with_noise(self) -> None:
        x = pyro.sample("x", self.prior())
        shape = self.tensors[1].new_tensor(SHAPE)
        precision = pyro.sample("precision", Gamma(shape, shape))
        determinant, quadratic = self.terms(x)
        pyro.factor("evidence", (self.rows * precision.log() - determinant - precision * quadratic) / 2)

    def log_predictive(self, chosen: np.ndarray) -> np.ndarray:
        """log p(y* | y, x) of each held-out row, ``(rows,)``, with the variables ``chosen``."""
        precision = self.gram[np.ix_(chosen, chosen)] + np.eye(len(chosen)) / SLAB**2
        mean = np.linalg.solve(precision, self.moments[chosen])
        z = self.test_z[:, chosen]
        spread = 1 + (z * np.linalg.solve(precision, z.T).T).sum(1)
        shape = SHAPE + self.rows / 2
        rate = SHAPE + (self.y @ self.y - self.moments[chosen] @ mean) / 2
        return student.logpdf(self.test_y, 2 * shape, z @ mean, np.sqrt(rate / shape * spread))

    def held_out(self, subsets: np.ndarray, weights: np.ndarray | None = None) -> float:
        """The mean over held-out rows of the predictive density of weighted subsets ``(draws, k)``."""
        unique, place = np.unique(np.sort(subsets, -1), axis=0, return_inverse=True)
        if weights is None:
            weights = np.full(len(subsets), 1 / len(subsets))
        shares = np.bincount(place.ravel(), weights)
        values = np.stack([self.log_predictive(chosen) for chosen in unique])
        return float(logsumexp(values, axis=0, b=shares[:, None] / shares.sum()).mean())


def diabetes(seed: int) -> Problem:
    data = load_diabetes()
    z = (data.data - data.data.mean(0)) / data.data.std(0)
    pairs = [z[:, i] * z[:, j] for i, j in combinations(range(z.shape[1]), 2)]
    squares = [z[:, i] ** 2 for i in range(z.shape[1]) if data.feature_names[i] != "sex"]  # of which it has two values
    z = np.column_stack([z, *pairs, *squares])
    order = np.random.default_rng(seed).permutation(len(z))
    train, test = order[: len(z) // 2], order[len(z) // 2 :]
    return Problem(z[train], data.target[train], z[test], data.target[test], 4)


def genomics(seed: int, rows: int = 200, n: int = 2000, k: int = 10, correlation: float = 0.9) -> Problem:
    generator = np.random.default_rng(seed)
    z = generator.standard_normal((2 * rows, n))
    for i in range(1, n):
        z[:, i] = correlation * z[:, i - 1] + math.sqrt(1 - correlation**2) * z[:, i]
    places = np.arange(k) * (n // k) + generator.integers(n // k, size=k)
    signal = z[:, places] @ generator.choice([-1.0, 1.0], k)
    y = signal + signal.std() * generator.standard_normal(2 * rows)
    return Problem(z[:rows], y[:rows], z[rows:], y[rows:], k)


DATA: dict[str, Callable[[int], Problem]] = {"diabetes": diabetes, "genomics": genomics}


class Answer(NamedTuple):
    """Inclusion probabilities, held-out density, and the draws (steps, chains, n) of a chain."""

    inclusion: np.ndarray
    held_out: float
    draws: np.ndarray | None = None


class Sizes(NamedTuple):
    """How long the methods run: samples and warm-up of chains, steps of SVI."""

    swap: tuple[int, int, int]  # chains, warm-up, samples
    swap_nuts: tuple[int, int]
    steps: int
    horseshoe: tuple[int, int, int]  # warm-up, samples, depth of trees
    gibbs: int
    reference: int


SIZES = {
    "diabetes": Sizes((16, 200, 500), (60, 300), 400, (150, 200, 6), 20_000, 0),
    "genomics": Sizes((4, 300, 600), (50, 150), 300, (150, 150, 6), 20_000, 200_000),
}
SMOKE_SIZES = Sizes((2, 5, 20), (5, 10), 5, (5, 10, 2), 300, 500)


def subsets_of(draws: np.ndarray, k: int) -> np.ndarray:
    """At most PREDICTED of the k-hot draws ``(..., n)``, as positions ``(draws, k)``."""
    flat = draws.reshape(-1, draws.shape[-1])
    flat = flat[np.linspace(0, len(flat) - 1, min(PREDICTED, len(flat))).astype(int)]
    return flat.nonzero()[1].reshape(-1, k)


def of_chain(problem: Problem, draws: np.ndarray) -> Answer:
    return Answer(draws.mean((0, 1)), problem.held_out(subsets_of(draws, problem.k)), draws)


def run_swap(problem: Problem, sizes: Sizes, _: np.random.Generator) -> Answer:
    chains, warmup, samples = sizes.swap
    mcmc = MCMC(KHotSwap(problem.model, chains=chains), samples, warmup, disable_progbar=True)
    mcmc.run()
    return of_chain(problem, mcmc.get_samples(group_by_chain=True)["x"].bool().transpose(0, 1).numpy())


def run_swap_nuts(problem: Problem, sizes: Sizes, _: np.random.Generator) -> Answer:
    warmup, samples = sizes.swap_nuts
    kernel = KHotSwap(
        problem.model_with_noise, continuous=lambda given: NUTS(given, max_tree_depth=2), swaps_per_step=5
    )
    mcmc = MCMC(kernel, samples, warmup, disable_progbar=True)
    mcmc.run()
    return of_chain(problem, mcmc.get_samples()["x"].bool().unsqueeze(1).numpy())


def of_guide(problem: Problem, design: ConditionalPoisson) -> Answer:
    draws = design.sample((PREDICTED,)).bool().numpy()
    return Answer(design.mean.double().numpy(), problem.held_out(subsets_of(draws, problem.k)))


def run_reinmax(problem: Problem, sizes: Sizes, _: np.random.Generator) -> Answer:
    guide = AutoKHot(problem.model)
    elbo = TraceMeanField_ELBO(num_particles=DRAWS, vectorize_particles=True, max_plate_nesting=0)
    svi = SVI(problem.model, guide, pyro.optim.Adam({"lr": 0.1}), elbo)
    for _ in range(sizes.steps):
        svi.step()
    with torch.no_grad():
        return of_guide(problem, guide.designs()["x"])


def run_score(problem: Problem, sizes: Sizes, _: np.random.Generator) -> Answer:
    logits = torch.zeros_like(problem.tensors[3]).requires_grad_()
    optimizer = torch.optim.Adam([logits], lr=0.1)
    for _ in range(sizes.steps):
        design = ConditionalPoisson(logits=logits, k=problem.k)
        estimate = score_function(
            design, lambda x: -problem.log_evidence(x), num_samples=DRAWS, baseline="leave_one_out"
        )
        optimizer.zero_grad()
        (estimate + kl_divergence(design, problem.prior())).backward()
        optimizer.step()
    return of_guide(problem, ConditionalPoisson(logits=logits.detach(), k=problem.k))


def run_mean_field(problem: Problem, sizes: Sizes, generator: np.random.Generator, sweeps: int = 200) -> Answer:
    """Coordinate ascent: q(b_i, x_i) is a Bernoulli share[i] and, if in, Normal(mean[i], variance[i])."""
    n, own = problem.n, problem.gram.diagonal()
    prior = math.log(problem.k / (n - problem.k))
    share, mean, noise = np.full(n, problem.k / n), np.zeros(n), 1.0
    fitted = np.zeros(problem.rows)
    variance = noise / (own + SLAB**-2)
    for _ in range(sweeps):
        before = share.copy()
        variance = noise / (own + SLAB**-2)
        for i in range(n):
            fitted -= problem.z[:, i] * (share[i] * mean[i])
            mean[i] = variance[i] / noise * (problem.z[:, i] @ (problem.y - fitted))
            odds = prior + (math.log(variance[i] / (noise * SLAB**2)) + mean[i] ** 2 / variance[i]) / 2
            share[i] = expit(odds)
            fitted += problem.z[:, i] * (share[i] * mean[i])
        second = share * (mean**2 + variance)  # E[x b²]
        errors = ((problem.y - fitted) ** 2).sum() + (own * (second - (share * mean) ** 2)).sum()
        rate, shape = 2 * SHAPE + errors + second.sum() / SLAB**2, 2 * SHAPE + problem.rows + share.sum() + 2
        noise = rate / shape  # the mode of the noise variance, given the expectations
        if abs(share - before).max() < 1e-5:
            break
    inside = generator.random((PREDICTED, n)) < share
    coefficients = inside * (mean + np.sqrt(variance) * generator.standard_normal((PREDICTED, n)))
    return Answer(share, normal_held_out(problem, coefficients, np.full(PREDICTED, math.sqrt(noise))))


def normal_held_out(problem: Problem, coefficients: np.ndarray, noise: np.ndarray) -> float:
    """The mean over held-out rows of the density that draws of coefficients ``(draws, n)`` and noise predict."""
    values = norm.logpdf(problem.test_y, coefficients @ problem.test_z.T, noise[:, None])
    return float((logsumexp(values, axis=0) - math.log(len(values))).mean())


def run_horseshoe(problem: Problem, sizes: Sizes, _: np.random.Generator) -> Answer:
    z, y, *_ = problem.tensors
    guess = problem.k / (problem.n - problem.k) / math.sqrt(problem.rows)  # Piironen and Vehtari (2017)
    one = y.new_ones(())

    def model() -> None:
        precision = pyro.sample("precision", Gamma(SHAPE * one, SHAPE * one))
        overall = pyro.sample("overall", HalfCauchy(guess * one))
        with pyro.plate("variables", problem.n):
            local = pyro.sample("local", HalfCauchy(one))
            raw = pyro.sample("raw", Normal(0 * one, one))
        noise = precision.rsqrt()
        coefficients = pyro.deterministic("b", raw * local * overall * noise)
        with pyro.plate("rows", problem.rows):
            pyro.sample("y", Normal(z @ coefficients, noise), obs=y)

    warmup, samples, depth = sizes.horseshoe
    mcmc = MCMC(NUTS(model, max_tree_depth=depth), samples, warmup, disable_progbar=True)
    mcmc.run()
    drawn = {name: value.double() for name, value in mcmc.get_samples().items()}
    noise = drawn["precision"].rsqrt()
    b = drawn["raw"] * drawn["local"] * drawn["overall"].unsqueeze(-1) * noise.unsqueeze(-1)
    inside = torch.zeros_like(b).scatter(-1, b.abs().topk(problem.k).indices, 1.0).bool().unsqueeze(1).numpy()
    return Answer(inside.mean((0, 1)), normal_held_out(problem, b.numpy(), noise.numpy()), inside)


def run_lasso(problem: Problem, sizes: Sizes, _: np.random.Generator) -> Answer:
    _, _, path = lars_path(problem.z, problem.y, method="lasso", max_iter=4 * problem.k)
    entries = np.where(path.any(1), (path != 0).argmax(1), path.shape[1])
    chosen = np.argsort(entries, kind="stable")[: problem.k]
    return Answer(np.isin(np.arange(problem.n), chosen).astype(float), problem.held_out(chosen[None]))


def gibbs(problem: Problem, steps: int, generator: np.random.Generator) -> np.ndarray:
    """Positions ``(steps, k)`` of a chain on p(x | y), from a random start; a tenth as many steps more come first."""
    n, k, own = problem.n, problem.k, problem.gram.diagonal() + SLAB**-2
    chosen = generator.choice(n, k, replace=False)
    kept = np.empty((steps, k), dtype=np.int64)
    total = 2 * SHAPE + problem.y @ problem.y
    for step in range(-steps // 10, steps):
        at = generator.integers(k)
        others = np.delete(chosen, at)
        beside = problem.gram[others]  # (k - 1, n)
        system = beside[:, others] + np.eye(k - 1) / SLAB**2
        solved = np.linalg.solve(system, np.column_stack([beside, problem.moments[others]]))
        gain = own - (beside * solved[:, :-1]).sum(0)
        left = problem.moments - problem.moments[others] @ solved[:, :-1]
        rate = total - problem.moments[others] @ solved[:, -1] - left**2 / gain  # twice that of the noise
        rate[others] = np.inf
        with np.errstate(invalid="ignore", divide="ignore"):
            score = -np.log(gain) / 2 - (SHAPE + problem.rows / 2) * np.log(rate)
        score[others] = -np.inf
        weight = np.exp(score - score.max()).cumsum()
        chosen[at] = weight.searchsorted(generator.random() * weight[-1], side="right")
        if step >= 0:
            kept[step] = chosen
    return kept


def k_hot(positions: np.ndarray, n: int) -> np.ndarray:
    x = np.zeros((len(positions), n), dtype=bool)
    np.put_along_axis(x, positions, True, axis=1)
    return x


def run_gibbs(problem: Problem, sizes: Sizes, generator: np.random.Generator) -> Answer:
    """Every tenth state is kept."""
    kept = k_hot(gibbs(problem, sizes.gibbs, generator)[::10], problem.n)
    return of_chain(problem, kept[:, None])


def enumerate_all(problem: Problem, *_: object) -> Answer:
    """The exact posterior; predictions are of the subsets that have all but 1e-4 of it."""
    subsets = np.array(list(combinations(range(problem.n), problem.k)))
    scores = np.empty(len(subsets))
    for start in range(0, len(subsets), ENUMERATED_AT_ONCE):
        chosen = subsets[start : start + ENUMERATED_AT_ONCE]
        system = np.eye(problem.k) + SLAB**2 * problem.gram[chosen[:, :, None], chosen[:, None]]
        moments = problem.moments[chosen]
        fit = SLAB**2 * (moments * np.linalg.solve(system, moments[..., None])[..., 0]).sum(1)
        rate = SHAPE + (problem.y @ problem.y - fit) / 2
        scores[start : start + len(chosen)] = -np.linalg.slogdet(system)[1] / 2 - (SHAPE + problem.rows / 2) * np.log(
            rate
        )
    weights = np.exp(scores - logsumexp(scores))
    inclusion = np.bincount(subsets.ravel(), np.repeat(weights, problem.k), problem.n)
    order = np.argsort(-weights)
    most = order[: int(weights[order].cumsum().searchsorted(1 - 1e-4)) + 1]
    return Answer(inclusion, problem.held_out(subsets[most], weights[most]))


def run_reference(problem: Problem, sizes: Sizes, generator: np.random.Generator) -> Answer:
    """Of four chains of the Gibbs sampler from random starts."""
    chains = [gibbs(problem, sizes.reference // 4, generator) for _ in range(4)]
    inclusion = np.stack([np.bincount(chain.ravel(), minlength=problem.n) / len(chain) for chain in chains])
    print(f"reference: largest difference of two chains {np.ptp(inclusion, axis=0).max():.3f}", flush=True)
    positions = np.concatenate(chains)
    thinned = positions[:: max(1, len(positions) // (4 * PREDICTED))]
    return Answer(inclusion.mean(0), problem.held_out(thinned))


def effective(draws: np.ndarray, uncertain: np.ndarray) -> float:
    """The median of the effective sample sizes of the uncertain inclusions; all chains together."""
    if not uncertain.any() or len(draws) < 4:
        return 0.0
    values = torch.from_numpy(draws[..., uncertain].astype(np.float64))
    return float(effective_sample_size(values, sample_dim=0, chain_dim=1).nan_to_num(0).clamp(min=0).median())


METHODS: dict[str, Callable[[Problem, Sizes, np.random.Generator], Answer]] = {
    SWAP: run_swap,
    SWAP_NUTS: run_swap_nuts,
    REINMAX: run_reinmax,
    SCORE: run_score,
    MEAN_FIELD: run_mean_field,
    HORSESHOE: run_horseshoe,
    LASSO: run_lasso,
    GIBBS: run_gibbs,
}


def timed(
    method: Callable[..., Answer], problem: Problem, sizes: Sizes, generator: np.random.Generator
) -> tuple[Answer, float]:
    """The answer and its seconds."""
    start = time.process_time()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        answer = method(problem, sizes, generator)
    return answer, time.process_time() - start


def run_seed(run: Run, args: Namespace) -> Result:
    """Scores and inclusion probabilities of every method on the data set that the run is named after."""
    sizes, problem = SIZES[run.row], DATA[run.row](run.seed)
    if args.smoke:
        sizes, problem = SMOKE_SIZES, problem if run.row == "diabetes" else genomics(run.seed, 40, 100, 3)
    enumerates = run.row == "diabetes" and not args.smoke
    find_reference = enumerate_all if enumerates else run_reference
    reference, seconds = timed(find_reference, problem, sizes, np.random.default_rng(run.seed + 1000))
    if not args.smoke:
        for method in METHODS.values():  # loads the compiled loops, so that no row pays for it
            timed(method, problem, SMOKE_SIZES, np.random.default_rng(0))
            pyro.clear_param_store()
    scores, inclusion = {}, {}
    for row, method in METHODS.items():
        pyro.set_rng_seed(run.seed)
        pyro.clear_param_store()
        answer, taken = timed(method, problem, sizes, np.random.default_rng(run.seed))
        scores[row], inclusion[row] = scores_of(answer, reference, taken), answer.inclusion.tolist()
        run.say(f"{row}, {taken:.1f} s")
    exact = REFERENCE[run.row]
    scores[exact], inclusion[exact] = scores_of(reference, reference, seconds), reference.inclusion.tolist()
    title = f"{run.row}: {problem.k} of {problem.n} covariates, {problem.rows} rows"
    return {"title": title, "scores": scores, "inclusion": inclusion}


def scores_of(answer: Answer, reference: Answer, seconds: float) -> dict[str, float]:
    uncertain = abs(reference.inclusion - 0.5) < 0.45
    samples = math.nan if answer.draws is None else effective(answer.draws, uncertain) / seconds
    error = float(abs(answer.inclusion - reference.inclusion).max())
    return {ERROR: error, HELD_OUT: answer.held_out, EFFECTIVE: samples, SECONDS: seconds}


def table_of(of_seeds: list[Result]) -> Table:
    columns = {ERROR: ".3f", HELD_OUT: ".3f", EFFECTIVE: ".1f", SECONDS: ".1f"}
    table = Table(of_seeds[0]["title"], columns, SWAP, compared=[HELD_OUT])
    for result in of_seeds:
        for row, scores in result["scores"].items():
            table.add(row, scores)
    state_findings(table)
    return table


def state_findings(table: Table) -> None:
    for other in (REINMAX, SCORE, MEAN_FIELD, HORSESHOE, LASSO):
        table.find(f"{SWAP} is nearer to the posterior than {other}", SWAP, other, ERROR, lower=True)
    table.find(f"{SWAP_NUTS} is nearer to the posterior than {REINMAX}", SWAP_NUTS, REINMAX, ERROR, lower=True)
    table.find(f"{REINMAX} is nearer than {SCORE}", REINMAX, SCORE, ERROR, lower=True)
    table.find(f"{REINMAX} is nearer than {MEAN_FIELD}", REINMAX, MEAN_FIELD, ERROR, lower=True)
    table.find(f"{GIBBS}, has more effective samples per second than {SWAP}", GIBBS, SWAP, EFFECTIVE)
    table.find(f"{SWAP} has more effective samples per second than {SWAP_NUTS}", SWAP, SWAP_NUTS, EFFECTIVE)
    for other in (MEAN_FIELD, HORSESHOE, LASSO):
        table.find(f"{SWAP} predicts better than {other}", SWAP, other, HELD_OUT)


def draw_figure(inclusion: dict[str, dict[str, np.ndarray]]) -> Figure:
    """Inclusion probabilities of every method against those of the reference; of the first seed."""
    rows = [row for row in next(iter(inclusion.values())) if row not in REFERENCE.values()]
    figure = Figure(figsize=(2.1 * len(rows), 2.5 * len(inclusion)), layout="constrained")
    panels = figure.subplots(len(inclusion), len(rows), squeeze=False, sharex=True, sharey=True)
    for line, (name, of_rows) in zip(panels, inclusion.items(), strict=True):
        for axes, row in zip(line, rows, strict=True):
            axes.plot([0, 1], [0, 1], color="0.8")
            axes.plot(of_rows[REFERENCE[name]], of_rows[row], "o", markersize=3)
            axes.set_title(row, fontsize=8)
        line[0].set_ylabel(f"{name}: probability")
    for axes in panels[-1]:
        axes.set_xlabel("reference", fontsize=8)
    return figure


def main(arguments: list[str] | None = None) -> dict[str, Table]:
    parser = experiment_parser(__doc__)
    parser.add_argument("--data", nargs="+", choices=DATA, default=list(DATA), help="data sets (default: both)")
    add_run_arguments(parser)
    args = parse(parser, arguments, smoke={"seeds": 2})
    results = run_grid(args, "variable_selection_methods", args.data, run_seed)
    tables = {name: table_of(of_seeds) for name, of_seeds in results.items()}
    for name, table in tables.items():
        table.save(args, f"variable_selection_methods_{name}")
    first = {name: {row: np.array(values) for row, values in results[name][0]["inclusion"].items()} for name in results}
    save_figure(draw_figure(first), args, "variable_selection_methods")
    return tables


if __name__ == "__main__":
    main()
