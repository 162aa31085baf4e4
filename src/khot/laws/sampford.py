r"""Sampford's design: :math:`P(x) \propto \prod_{i: x_i = 1} \pi_i / (1 - \pi_i) \cdot \sum_{i: x_i = 1} (1 - \pi_i)`.

As :math:`\sum_i \pi_i = k`, the last sum equals :math:`\sum_{i: x_i = 0} \pi_i`, and with both

.. math:: P(x) = \frac{Q(x) \, D(x)}{E_Q[D]}, \qquad D(x) = \sum_i |x_i - \pi_i|,

where Q is the conditional Poisson design of log-odds :math:`\theta = \operatorname{logit} \pi`. With its inclusion
probabilities p, E_Q[D] is the sum of :math:`(1 - \pi_i) p_i + \pi_i (1 - p_i)`, no term of which is negative.

Hence a mixture that is drawn from without rejection: mark a unit and its value, 1 with weight :math:`(1 - \pi_i) p_i`
or 0 with weight :math:`\pi_i (1 - p_i)`, then draw from Q given that value. Where there are fused kernels, a recursion
over the units draws both at once, see :mod:`khot.laws.unit_by_unit`.

All functions take probabilities ``(*batch, n)`` whose rows sum to k, an int or an integer tensor that broadcasts with
the batch shape; they take the rounding error out and calculate in float64. Exact 0 and 1 are legal and have zero
gradient. Arguments are not checked here. Those that are called with the same probabilities, k and ``kept`` share the
product tree of Q.

References:
    [1] Sampford (1967), "On sampling without replacement with unequal probabilities of selection", Biometrika 54(3/4).
"""

import math

import torch
from torch import Tensor

from khot._validation import can_look
from khot.kernels.autograd import has_derivative
from khot.kernels.count import marked_count_draw
from khot.kernels.random_numbers import uniform
from khot.kernels.small_numbers import TINY, log_odds, log_of_small, quotient
from khot.kernels.tournament import balance

from . import conditional_poisson, unit_by_unit
from .conditional_poisson import COVARIANCE_CHUNK, pull_back
from .kept import Kept, kept_if_constant

MAX_DRAW_ELEMENTS = 2**22  # units drawn at a time, which bounds the memory: every draw has a product tree of its own


def _balanced(probs: Tensor, k: int | Tensor) -> Tensor:
    return balance(probs, torch.as_tensor(k, device=probs.device))


def _mark_weights(probs: Tensor, logits: Tensor, k: int | Tensor, kept: Kept | None = None) -> tuple[Tensor, Tensor]:
    """E_Q[|x_i - pi_i|] in its two parts, that of x_i = 1 and that of x_i = 0."""
    z = conditional_poisson.inclusion_log_odds(logits, k, kept, balanced=True)
    return (1 - probs) * torch.sigmoid(z), probs * torch.sigmoid(-z)


def _expected_distance(probs: Tensor, logits: Tensor, k: int | Tensor, kept: Kept | None = None) -> Tensor:
    included, out = _mark_weights(probs, logits, k, kept)
    return (included + out).sum(-1)


def _log_or_zero(x: Tensor) -> Tensor:
    """The logarithm; 0 where x is 0, as D is for the only value of a row without a choice."""
    return log_of_small(x.masked_fill(x == 0, 1.0))


def log_prob(probs: Tensor, k: int | Tensor, value: Tensor, kept: Kept | None = None) -> Tensor:
    """Log-probability of k-hot values ``(*sample, *batch, n)``; ``-inf`` where one contradicts a probability 0 or 1."""
    kept = Kept() if kept is None else kept  # for the two terms

    def by_tree(probs: Tensor, value: Tensor) -> Tensor:
        probs, value = kept_if_constant(kept, _balanced, probs, k), value.double()
        logits = log_odds(probs)
        distance = (value * (1 - probs) + (1 - value) * probs).sum(-1)
        ratio = _log_or_zero(distance) - _log_or_zero(_expected_distance(probs, logits, k, kept))
        return conditional_poisson.log_prob(logits, k, value, kept, balanced=True) + ratio

    if unit_by_unit.takes(probs, k, value) and not has_derivative(value, torch.is_grad_enabled()):
        return unit_by_unit.sampford_log_prob(probs, k, value, kept, by_tree)
    return by_tree(probs, value)


def covariance(probs: Tensor, k: int | Tensor) -> Tensor:
    """Covariance of the k-hot vector, ``(*batch, n, n)``: the Jacobian, at t = 0, of the mean of e^<t, x> P(x)."""
    probs = _balanced(probs, k)
    logits = log_odds(probs)
    certain = logits.isinf()

    def mean(tilted: Tensor) -> Tensor:
        z, pulled_back = pull_back(conditional_poisson.inclusion_log_odds, tilted, k)
        p, q = torch.sigmoid(z), torch.sigmoid(-z)
        distance = ((1 - probs) * p + probs * q).sum(-1, keepdim=True)
        shift = quotient(pulled_back((1 - 2 * probs) * p * q), distance.masked_fill(distance < TINY, 1.0))
        return (p + shift).masked_fill(certain, 0.0)

    _, product = torch.func.vjp(mean, logits)[:2]
    n = probs.shape[-1]
    unit = torch.eye(n, dtype=probs.dtype, device=probs.device)
    rows = unit.view(n, *[1] * (probs.ndim - 1), n).expand(n, *probs.shape)
    return torch.func.vmap(lambda v: product(v)[0], out_dims=-2, chunk_size=COVARIANCE_CHUNK)(rows)


@torch.no_grad()
def sample(
    probs: Tensor,
    k: int | Tensor,
    sample_shape: tuple[int, ...] = (),
    generator: torch.Generator | None = None,
    kept: Kept | None = None,
) -> Tensor:
    """Draws k-hot vectors exactly, ``(*sample_shape, *batch, n)`` float64."""
    *batch, n = probs.shape
    drawn = unit_by_unit.sample(marked_count_draw, probs, k, math.prod(sample_shape), generator)
    if drawn is not None:
        return drawn.view(*sample_shape, *drawn.shape[1:])
    probs = kept_if_constant(kept, _balanced, probs, k)
    logits, count = log_odds(probs), math.prod(sample_shape)
    marks = torch.cat(_mark_weights(probs, logits, k, kept), -1).cumsum(-1).view(math.prod(batch), 2 * n)
    slab = max(1, MAX_DRAW_ELEMENTS // max(1, probs.numel()))
    parts = []
    for start in range(0, max(1, count), slab):
        size = min(slab, count - start)
        u = uniform((marks.shape[0], size), marks.dtype, marks.device, generator)
        target = u * marks[:, -1:]
        of_each = marks if can_look(u) else marks + 0 * u.sum(-1, keepdim=True)  # a vmap searches in one row for each
        mark = torch.searchsorted(of_each, target, right=True).clamp(max=2 * n - 1)
        mark = mark.T.reshape(size, *batch, 1)
        given, unit = logits.expand(size, *logits.shape), mark % n
        old = given.gather(-1, unit)
        fixed = torch.where(mark < n, torch.inf, -torch.inf)
        fixed = torch.where(old.isinf(), old, fixed)  # in rows without a choice all weights are 0
        parts.append(conditional_poisson.sample(given.scatter(-1, unit, fixed), k, generator=generator))
    return torch.cat(parts).view(*sample_shape, *batch, n)
