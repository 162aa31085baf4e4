r"""Conditional Poisson laws whose size has its own law: a mixture over the sizes of a range.

.. math:: P(x) = p_{|x|} \, P_{|x|}(x), \qquad P_m(x) \propto \exp\langle\theta, x\rangle \text{ on } |x| = m

Here the :math:`p_m` are given; under a :class:`~khot.laws.size_range.SizeRange` alone they follow from the logits.
Infinite logits make some sizes impossible: these have probability 0, and the others keep their proportions.

All results are sums over the sizes; each size has a law of :mod:`khot.laws.conditional_poisson`, and all of them form
one batch ``(sizes, *batch)``. Functions have the same arguments as there, take logits ``(*batch, n)``, return float64
and are differentiable, to any order, in the logits and in the prior.
"""

from typing import NamedTuple, cast

import torch
from torch import Tensor

from khot._shapes import broadcast_shapes
from khot.kernels.random_numbers import uniform

from . import conditional_poisson as law
from .once import Once

ROUNDING = 1e-12  # rounding of a sum of probabilities of sizes


class SizePrior(NamedTuple):
    """The sizes from ``low`` to ``high``, and the logarithms of their weights, ``(*batch, high - low + 1)``."""

    low: int
    high: int
    log_weights: Tensor

    def sizes(self, like: Tensor) -> Tensor:
        return torch.arange(self.low, self.high + 1, device=like.device)


class _BySize(NamedTuple):
    """Rows of logits, repeated for each size."""

    logits: Tensor  # (sizes, *batch, n), float64
    size: Tensor  # (sizes, *batch), the nearest possible size if the size itself is impossible
    log_law: Tensor  # (sizes, *batch), the logarithms of their probabilities

    @property
    def law(self) -> Tensor:
        return self.log_law.exp()


def _by_size(logits: Tensor, prior: SizePrior) -> _BySize:
    log_law = log_size_law(logits, prior).movedim(-1, 0)
    column = prior.sizes(logits).view(-1, *(1,) * (log_law.dim() - 1))
    included, possible = (logits == torch.inf).sum(-1), (logits > -torch.inf).sum(-1)
    size = column.expand(log_law.shape).maximum(included).minimum(possible)
    return _BySize(logits.double().expand(*log_law.shape, logits.shape[-1]), size, log_law)


def log_size_law(logits: Tensor, prior: SizePrior) -> Tensor:
    """Logarithms of the probabilities of the sizes, ``(*batch, sizes)``."""
    sizes = prior.sizes(logits)
    included, possible = (end.sum(-1, keepdim=True) for end in (logits == torch.inf, logits > -torch.inf))
    impossible = (sizes < included) | (sizes > possible)
    return prior.log_weights.double().masked_fill(impossible, -torch.inf).log_softmax(-1)


def size_probabilities(logits: Tensor, prior: SizePrior) -> Tensor:
    """P(|x| = s) for all s from 0 to n, ``(*batch, n + 1)``."""
    return torch.nn.functional.pad(log_size_law(logits, prior).exp(), (prior.low, logits.shape[-1] - prior.high))


def log_prob(logits: Tensor, prior: SizePrior, value: Tensor, kept: Once | None = None) -> Tensor:
    """Log-probability of k-hot values ``(*sample, *batch, n)``; ``-inf`` for a size that the prior excludes.

    Between k-hot vectors it is extended by the law of the nearest size, in which it is linear.
    """
    number = value.detach().double().sum(-1).round().long().clamp(prior.low, prior.high) - prior.low
    rows = _by_size(logits, prior)
    log_count, shift = law.log_counts_and_shifts(rows.logits, rows.size, kept)
    shape = broadcast_shapes(number.shape, log_count.shape[1:])

    def at(of_sizes: Tensor) -> Tensor:
        """The entry that belongs to the size of each value."""
        last = of_sizes.movedim(0, -1)
        return last.expand(*shape, last.shape[-1]).gather(-1, number.expand(shape).unsqueeze(-1)).squeeze(-1)

    given_size = law.shifted_log_prob(logits, at(shift), value) - at(log_count)
    return at(rows.log_law) + given_size


def inclusion_probabilities(logits: Tensor, prior: SizePrior, kept: Once | None = None) -> Tensor:
    """P(i in S) of every unit, ``(*batch, n)``."""
    rows = _by_size(logits, prior)
    return (rows.law.unsqueeze(-1) * law.inclusion_probabilities(rows.logits, rows.size)).sum(0)


def means_by_size(logits: Tensor, prior: SizePrior) -> Tensor:
    """The inclusion probabilities given each size of a prior, which may belong to another law; (sizes, *batch, n)."""
    zeros = torch.zeros((*logits.shape[:-1], prior.high - prior.low + 1), device=logits.device)
    rows = _by_size(logits, prior._replace(log_weights=zeros))
    return law.inclusion_probabilities(rows.logits, rows.size)


def pairwise_inclusion(logits: Tensor, prior: SizePrior, mean: Tensor) -> Tensor:
    """P(i and j in S), ``(*batch, n, n)``; one size after the other, as each takes n² numbers."""
    rows = _by_size(logits, prior)
    terms = (
        probability[..., None, None] * law.pairwise_inclusion(theta, size, law.inclusion_probabilities(theta, size))
        for probability, theta, size in zip(rows.law, rows.logits, rows.size, strict=True)
    )
    return cast(Tensor, sum(terms))


def covariance(logits: Tensor, prior: SizePrior) -> Tensor:
    """Covariance of the units, ``(*batch, n, n)``: within the sizes, plus between their means."""
    rows = _by_size(logits, prior)
    means = law.inclusion_probabilities(rows.logits, rows.size)
    difference = means - (rows.law.unsqueeze(-1) * means).sum(0)
    terms = (
        probability[..., None, None] * (law.covariance(theta, size) + d[..., :, None] * d[..., None, :])
        for probability, theta, size, d in zip(rows.law, rows.logits, rows.size, difference, strict=True)
    )
    return cast(Tensor, sum(terms))


def entropy(logits: Tensor, prior: SizePrior, kept: Once | None = None, inclusion: Tensor | None = None) -> Tensor:
    """Entropy in nats, ``(*batch,)``: that of the size, plus the expected entropy given the size."""
    rows = _by_size(logits, prior)
    log_law = rows.log_law.masked_fill(rows.log_law == -torch.inf, 0.0)
    return (rows.law * (law.entropy(rows.logits, rows.size) - log_law)).sum(0)


def mode(logits: Tensor, prior: SizePrior) -> Tensor:
    """The size of the most probable vector, ``(*batch,)``; the vector has the largest logits of this number."""
    logits = logits.detach()
    rows = _by_size(logits, prior)
    order = logits.argsort(dim=-1, descending=True, stable=True).argsort(-1)
    best = (order < rows.size.unsqueeze(-1)).double()
    log_count, shift = law.log_counts_and_shifts(rows.logits, rows.size)
    log_p = rows.log_law + law.shifted_log_prob(rows.logits, shift, best) - log_count
    return prior.low + log_p.argmax(0)


def expected_log_prob(logits: Tensor, prior: SizePrior, sizes: Tensor, means: Tensor) -> Tensor:
    """E log P(x) under another law on vectors of these sizes; infinite if that law has sizes that this one lacks.

    Args:
        logits: ``(*batch, n)``.
        prior: The prior of this law.
        sizes: Probabilities of the sizes under the other law, ``(*batch, n + 1)``.
        means: Its inclusion probabilities given each size of the prior, ``(sizes, *batch, n)``.
    """
    rows = _by_size(logits, prior)
    log_count, shift = law.log_counts_and_shifts(rows.logits, rows.size)
    given_size = law.shifted_log_prob(rows.logits, shift, means) - log_count
    inside = sizes[..., prior.low : prior.high + 1].movedim(-1, 0)
    total = (inside * (given_size + rows.log_law).masked_fill(inside == 0, 0.0)).sum(0)
    outside = sizes.sum(-1) - inside.sum(0)
    return torch.where(outside > ROUNDING, -torch.inf, total)


@torch.no_grad()
def sample(
    logits: Tensor,
    prior: SizePrior,
    sample_shape: tuple[int, ...] = (),
    generator: torch.Generator | None = None,
    kept: Once | None = None,
) -> Tensor:
    """Draws a size for each vector, and the vector given its size; bool ``(*sample_shape, *batch, n)``."""
    probability = log_size_law(logits, prior).exp()
    batch, n = probability.shape[:-1], logits.shape[-1]
    shape = (*sample_shape, *batch)
    weights = probability.expand(*shape, -1).reshape(-1, probability.shape[-1])
    if len(weights) == 0:
        return torch.zeros(*shape, n, dtype=torch.bool, device=logits.device)
    size = prior.low + _drawn(weights, generator).view(shape)
    return law.sample(logits.double().expand(*shape, n), size, (), generator)


def _drawn(weights: Tensor, generator: torch.Generator | None) -> Tensor:
    """An index for each row of weights (rows, sizes), never one of weight 0."""
    upto = weights.double().cumsum(-1)
    share = uniform((len(weights), 1), upto.dtype, upto.device, generator) * upto[:, -1:]
    return torch.searchsorted(upto, share, right=True).squeeze(-1)
