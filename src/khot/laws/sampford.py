r"""Sampford's design: :math:`P(x) \propto \prod_{i: x_i = 1} \pi_i / (1 - \pi_i) \cdot \sum_{i: x_i = 1} (1 - \pi_i)`.

As :math:`\sum_i \pi_i = k`, the last sum equals :math:`\sum_{i: x_i = 0} \pi_i`. Adding both, for independent units of
probabilities :math:`\pi_i` with B ones,

.. math:: P(x) = \frac{P_\pi(x) \, D(x)}{E_\pi[D; B = k]}, \qquad D(x) = \sum_i |x_i - \pi_i|, \qquad
    E_\pi[D; B = k] = \sum_i \pi_i (1 - \pi_i) \, (P(B = k | x_i = 1) + P(B = k | x_i = 0)),

in which no term is negative.

Given B = k, the units have the law of :mod:`.conditional_poisson` with the log-odds of :math:`\pi`, so that

.. math:: P(x) = P(x | B = k) \, D(x) / E[D | B = k], \qquad
    E[D | B = k] = \sum_i (1 - \pi_i) P(x_i = 1 | B = k) + \pi_i P(x_i = 0 | B = k)

This is a mixture from which one can draw without rejection: mark a unit and its value by the weight of one of these
terms, then draw the other units given that value and B = k.

All functions take probabilities ``(*batch, n)`` whose rows sum to k, an int or an integer tensor that broadcasts with
the batch shape. They remove the rounding error of the sum and calculate in float64. Exact 0 and 1 are legal and have
zero gradient. Arguments are not checked here. Functions that are called with the same probabilities, k and ``kept``
share what they have computed.

References:
    [1] Sampford (1967), "On sampling without replacement with unequal probabilities of selection", Biometrika 54(3/4).
"""

import math

import torch
from torch import Tensor

from khot._contents import can_look
from khot._shapes import broadcast_shapes
from khot._torch_internals import for_transforms
from khot.kernels.draws import balance
from khot.kernels.exact.rows import number_on
from khot.kernels.exact.small_numbers import TINY, log_odds, log_of_small, quotient
from khot.kernels.operators.autograd import by_formula
from khot.kernels.random_numbers import uniform

from . import conditional_poisson
from .conditional_poisson import pull_back
from .once import Once, or_new

COVARIANCE_CHUNK = 64  # rows of the covariance calculated at a time
MAX_DRAW_ELEMENTS = 2**22  # units drawn at a time, which bounds the memory: every draw has its own law


def _size(probs: Tensor, k: int | Tensor) -> Tensor:
    """k for each row."""
    size = number_on(probs.device, k).long()
    return size.expand(broadcast_shapes(probs.shape[:-1], size.shape))


def log_prob(probs: Tensor, k: int | Tensor, value: Tensor, kept: Once | None = None) -> Tensor:
    """Log-probability of k-hot values ``(*sample, *batch, n)``; ``-inf`` if one contradicts a probability 0 or 1."""
    kept = or_new(kept)

    def scored(balanced: Tensor, value: Tensor) -> tuple[Tensor, ...]:
        return _scored(balanced, k, value, kept)

    balanced = kept.made_if_constant("balanced", balance, probs, _size(probs, k))
    return by_formula(lambda *x: scored(*x)[0], scored, _slope, balanced, value)


def _scored(balanced: Tensor, k: int | Tensor, value: Tensor, kept: Once) -> tuple[Tensor, ...]:
    """The log-probability of values, float64, and what its derivative needs."""
    score, zero, one = conditional_poisson.log_prob_and_chances(log_odds(balanced), k, value, kept)
    rest = 1 - balanced
    mean = (rest * one).sum(-1) + (balanced * zero).sum(-1)
    distance = torch.lerp(balanced, rest, value.double()).sum(-1)
    fixed = mean == 0  # rows without a choice, in which D is 0 for the only value
    impossible = score == -torch.inf
    distance, mean = distance.masked_fill(fixed | impossible, 1.0), mean.masked_fill(fixed, 1.0)
    return score + (log_of_small(distance) - log_of_small(mean)), one, distance, mean, impossible


def _slope(
    g: Tensor, balanced: Tensor, value: Tensor, one: Tensor, distance: Tensor, mean: Tensor, impossible: Tensor
) -> Tensor:
    """The derivative, times g, in the balanced probabilities.

    In E[D; B = k] a probability occurs in D, and as the probability of a value. In the latter, the derivative of the
    logarithm is (P(x_i = 1) - p_i) / (p_i (1 - p_i)), which is 0. Units of probability 0 or 1 have no derivative.
    """
    g, mean, distance = g.masked_fill(impossible, 0.0).unsqueeze(-1), mean.unsqueeze(-1), distance.unsqueeze(-1)
    spread = (1 - balanced).mul_(balanced)
    each = (value - balanced).div_(spread).add_((one - 0.5).mul_(2 / mean)).mul_(g)
    lean = value.expand_as(each).to(torch.float64, copy=True).sub_(0.5)
    each = each.sub_(lean.mul_(2 * g / distance)).sum_to_size(spread.shape)
    return each.masked_fill_(spread == 0, 0.0)


def covariance(probs: Tensor, k: int | Tensor) -> Tensor:
    """Covariance of the k-hot vector, ``(*batch, n, n)``: the Jacobian, at t = 0, of the mean of e^<t, x> P(x)."""
    probs = balance(probs, number_on(probs.device, k))
    logits = log_odds(probs)
    certain = logits.isinf()

    def mean(tilted: Tensor) -> Tensor:
        z, pulled_back = pull_back(conditional_poisson.inclusion_log_odds, tilted, k)
        p, q = torch.sigmoid(z), torch.sigmoid(-z)
        distance = ((1 - probs) * p + probs * q).sum(-1, keepdim=True)
        shift = quotient(pulled_back((1 - 2 * probs) * p * q), distance.masked_fill(distance < TINY, 1.0))
        return (p + shift).masked_fill(certain, 0.0)

    n = probs.shape[-1]
    unit = torch.eye(n, dtype=probs.dtype, device=probs.device)
    rows = unit.view(n, *[1] * (probs.ndim - 1), n).expand(n, *probs.shape)
    with for_transforms():
        _, product = torch.func.vjp(mean, logits)[:2]
        return torch.func.vmap(lambda v: product(v)[0], out_dims=-2, chunk_size=COVARIANCE_CHUNK)(rows)


@torch.no_grad()
def sample(
    probs: Tensor,
    k: int | Tensor,
    sample_shape: tuple[int, ...] = (),
    generator: torch.Generator | None = None,
    kept: Once | None = None,
) -> Tensor:
    """Draws k-hot vectors exactly, ``(*sample_shape, *batch, n)`` bool."""
    kept, count, n = or_new(kept), math.prod(sample_shape), probs.shape[-1]
    size = _size(probs, k)
    balanced = kept.made_if_constant("balanced", balance, probs, size).expand(*size.shape, n)
    logits = log_odds(balanced)
    zero, one = conditional_poisson.chances(logits, k, kept)
    weights = torch.cat((balanced * zero, (1 - balanced) * one), -1)
    logits, upto = logits.reshape(-1, n), weights.cumsum(-1).view(-1, 2 * n)
    slab = max(1, MAX_DRAW_ELEMENTS // max(1, logits.numel()))
    parts = []
    for start in range(0, max(1, count), slab):
        u = uniform((len(upto), min(slab, count - start)), upto.dtype, upto.device, generator)
        of_each = upto if can_look(u) else upto + 0 * u.sum(-1, keepdim=True)  # a vmap needs a row for each search
        mark = torch.searchsorted(of_each, u * upto[:, -1:], right=True).clamp(max=2 * n - 1).T.unsqueeze(-1)
        # Rows without a choice have weights of 0 only; the mark on their last unit must not change it.
        marked = logits.expand(*mark.shape[:-1], n)
        fate = torch.where(mark < n, -torch.inf, torch.inf)
        fate = torch.where(upto[:, -1:] > 0, fate, marked[..., -1:])
        rows = marked.scatter(-1, mark % n, fate)
        parts.append(conditional_poisson.sample(rows, size.reshape(-1), (), generator))
    drawn = parts[0] if len(parts) == 1 else torch.cat(parts)
    return drawn.view(*sample_shape, *size.shape, n)
