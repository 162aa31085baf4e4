r"""Pairs of units under the conditional Poisson design, from the characteristic function of the number of ones.

For independent units of log-odds z, with probabilities :math:`p_i` and :math:`q_i = 1 - p_i`,

.. math:: \varphi_i(t) = q_i + p_i e^{it}, \qquad
    E[(x_i - c_i)(x_j - c_j);\ B = k] = \frac{1}{2\pi} \int_{-\pi}^{\pi} e^{-ikt} \prod_l \varphi_l(t)
    \prod_{l = i, j} \frac{E[(x_l - c_l)\, e^{itx_l}]}{\varphi_l(t)} \,dt .

The integrand is periodic, so N equidistant nodes are exact except for counts that differ from k by N or more. It decays
as :math:`|\prod_l \varphi_l| \le \exp(-2 s^2 \sin^2(t / 2))`, where s is the standard deviation of the count. If z is
such that the expected count is k, ``NODES`` nodes are therefore enough for rows of any length, and all pairs are one
product of matrices: O(n²). For several totals, :math:`e^{-ikt}` is replaced by a weighted sum, and there are twice as
many nodes, so that none of the counts is confused with another. The terms are of the order of the result, so the
relative error is a few eps, unless the values of the two units leave the others a count far from the expected one.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from khot._contents import can_look

from ..threshold import solve_threshold
from .range_tree import Totals

DEPTH = -math.log(1e-18)  # the nodes leave out e^-DEPTH
NODES = 31  # with t >= 0, enough for any deviation: about 15 + 20 / s, or all of them in rows with s < 5


class Complex(NamedTuple):
    """Complex numbers as two real tensors, so that all derivatives are those of real operations."""

    real: Tensor
    imag: Tensor

    def times(self, other: "Complex") -> "Complex":
        real = self.real * other.real - self.imag * other.imag
        return Complex(real, self.real * other.imag + self.imag * other.real)


class Nodes(NamedTuple):
    """The nodes of a rule for the integral over t."""

    cos: Tensor  # (*batch, 1, nodes), of t
    sin: Tensor
    weight: Complex  # (*batch, nodes), exp(-ikt) times the weight in the integral; 0 for unused nodes


def _nodes_of_count(variance: Tensor, k: Tensor, n: int, totals: Totals | None) -> Nodes:
    """Nodes on the half circle, which also represent their conjugates, for counts of n units with this variance."""
    radius = DEPTH / 3 + (DEPTH**2 / 9 + 2 * DEPTH * variance).sqrt()  # Bernstein: |B - k| exceeds it with e^-DEPTH
    radius = radius.minimum(torch.maximum(k, n - k))
    last = (radius / 2 if totals is None else radius).ceil()[..., None]
    step = 2 * math.pi / (2 * last + 1)  # an odd number of nodes: t = pi, where phi may vanish, is not among them
    nodes = min(NODES, n // 2 + 1) if totals is None else min(2 * NODES, n + 1)
    if variance.numel() and can_look(variance):
        end = 2 * (0.5 * DEPTH / variance).sqrt().clamp(max=1.0).asin()[..., None]  # where the integrand has decayed
        nodes = min(nodes, 1 + int((end / step).ceil().minimum(last).max()))
    index = torch.arange(nodes, device=k.device)
    t = index * step
    size = torch.where(index == 0, 1.0, 2.0) * (index <= last) / (2 * last + 1)
    if totals is None:
        turn = (index * k[..., None]).remainder(2 * last + 1) * step
        weight = Complex(size * turn.cos(), -size * turn.sin())
    else:
        weight = Complex(*(size * part for part in _sum_of_totals(index, k, last, step, totals, n)))
    return Nodes(t.cos()[..., None, :], t.sin()[..., None, :], weight)


def _sum_of_totals(index: Tensor, k: Tensor, last: Tensor, step: Tensor, totals: Totals, n: int) -> Complex:
    """The sum of ``w_c exp(-ict)`` over the totals c at most ``last`` away from k, ``(*batch, nodes)``."""
    widest = int(last.max()) if last.numel() and can_look(last) else n
    away = torch.arange(-widest, widest + 1, device=k.device).view(-1, *(1,) * k.dim())
    weight = totals.weights(k + away, k).masked_fill(away.abs() > last.squeeze(-1), 0.0)[..., None]
    turn = (index * (k + away)[..., None]).remainder(2 * last + 1) * step  # (2 widest + 1, *batch, nodes)
    return Complex((weight * turn.cos()).sum(0), -(weight * turn.sin()).sum(0))


def _product(x: Complex) -> Complex:
    """The product of numbers ``(*batch, n, nodes)`` along n."""
    while x.real.shape[-2] > 1:
        half = x.real.shape[-2] // 2
        first, second, rest = (Complex(*(v[..., part, :] for v in x)) for part in _thirds(half))
        x = first.times(second)
        if rest.real.shape[-2]:
            x = Complex(*(torch.cat(both, -2) for both in zip(x, rest, strict=True)))
    return Complex(x.real.squeeze(-2), x.imag.squeeze(-2))


def _thirds(half: int) -> tuple[slice, slice, slice]:
    return slice(half), slice(half, 2 * half), slice(2 * half, None)


class Factors(NamedTuple):
    """A covariance matrix: off its diagonal the product ``left @ right.mT``, on the diagonal the variance."""

    left: Tensor  # (*batch, n, 2 nodes)
    right: Tensor
    variance: Tensor  # (*batch, n)
    scale: Tensor  # (*batch, n): the error of an entry is a few eps times the scales of its two units

    def dense(self) -> Tensor:
        """The matrix ``(*batch, n, n)``."""
        unit = torch.eye(self.variance.shape[-1], dtype=torch.bool, device=self.variance.device)
        return torch.where(unit, self.variance[..., None], self.left @ self.right.mT)

    def times(self, v: Tensor) -> Tensor:
        """Its product with vectors ``(*batch, n)``."""
        own = self.variance - (self.left * self.right).sum(-1)
        return (self.left @ (self.right.mT @ v[..., None])).squeeze(-1) + own * v


def factors(
    logits: Tensor, k: Tensor, log_odds: Tensor, balanced: bool = False, totals: Totals | None = None
) -> Factors:
    """Covariance of the k-hot vector, differentiable in the logits to any order.

    Args:
        logits: Float64 log-odds ``(*batch, n)``, which may be infinite.
        k: Integers ``(*batch,)``.
        log_odds: The log-odds of the inclusion probabilities; only their values are used.
        balanced: Whether the expected count of the logits is already about k.
        totals: The counts given which the covariance is computed, ``(*batch,)``, if there are more than k.
    """
    n, certain = logits.shape[-1], (logits == torch.inf).sum(-1)
    low, high = (k, k) if totals is None else (totals.first, totals.last)
    choice = ((high > certain) & (low < n - (logits == -torch.inf).sum(-1)))[..., None]
    if totals is not None:
        totals = Totals(
            *(torch.where(choice[..., 0], x, y) for x, y in zip(totals, (n // 2, n // 2, 0.0), strict=True))
        )
    z, k = logits.masked_fill(~choice, 0.0), torch.where(choice[..., 0], k, n // 2)
    z = z if balanced else z - solve_threshold(z.detach(), k)[..., None]
    mean, rest = torch.sigmoid(log_odds.detach()), torch.sigmoid(-log_odds.detach())
    p, q = torch.sigmoid(z)[..., None], torch.sigmoid(-z)[..., None]
    pq = p * q
    nodes = _nodes_of_count(pq.detach().sum((-1, -2)), k, n, totals)
    law = _product(Complex(q + p * nodes.cos, p * nodes.sin)).times(nodes.weight)
    law = Complex(*(v / law.real.sum(-1, keepdim=True) for v in law))  # the real parts summed to P(B = k)
    # E[(x_i - pi_i) e^{it x_i}] / phi_i, with numerator and denominator multiplied by the conjugate of phi_i.
    mean, rest = mean[..., None], rest[..., None]
    size = 1 / (1 - 2 * pq * (1 - nodes.cos))
    real = (p * p * rest - q * q * mean + pq * (rest - mean) * nodes.cos) * size
    deviation = Complex(real, pq * nodes.sin * size)
    weighted = deviation.times(Complex(*(v[..., None, :] for v in law)))
    change = weighted.real.sum(-1, keepdim=True)  # the change of the mean with the logits; its value is only rounding
    left = torch.cat((weighted.real, -weighted.imag, -change), -1).masked_fill(~choice[..., None], 0.0)
    right = torch.cat((*deviation, change), -1)
    variance = (mean * rest + change * (rest - mean - change)).squeeze(-1)
    return Factors(left, right, variance.masked_fill(~choice, 0.0), (p * rest + q * mean).squeeze(-1).detach())
