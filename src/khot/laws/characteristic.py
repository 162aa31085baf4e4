r"""Pairs of units under the conditional Poisson design, from the characteristic function of the number of ones.

For independent units of log-odds z, with probabilities :math:`p_i` and :math:`q_i = 1 - p_i`,

.. math:: \varphi_i(t) = q_i + p_i e^{it}, \qquad
    E[(x_i - c_i)(x_j - c_j);\ B = k] = \frac{1}{2\pi} \int_{-\pi}^{\pi} e^{-ikt} \prod_l \varphi_l(t)
    \prod_{l = i, j} \frac{E[(x_l - c_l)\, e^{itx_l}]}{\varphi_l(t)} \,dt .

The integrand is periodic, so that N equidistant nodes are exact but for counts that differ from k by N or more; and it
decays as :math:`|\prod_l \varphi_l| \le \exp(-2 s^2 \sin^2(t / 2))`, with s the standard deviation of the count. With z
such that the expected count is k, ``NODES`` nodes are therefore enough for rows of any length, and all pairs are one
product of matrices: O(n²). Its terms are of the order of the result, so that the relative error is some eps, unless
what the two units do leaves to the others a count far from what is expected.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from khot.kernels.capped_simplex import solve_threshold

DEPTH = -math.log(1e-18)  # what nodes leave out is e^-DEPTH
NODES = 31  # with t >= 0 that are enough whatever the deviation: about 15 + 20 / s, or all of them in rows with s < 5


class _Nodes(NamedTuple):
    cos: Tensor  # (*batch, nodes), of t
    sin: Tensor
    weight: Tensor  # (*batch, nodes, 2), real and imaginary part: exp(-ikt) times the quadrature weight; 0 if unused


def _nodes(variance: Tensor, k: Tensor, n: int) -> _Nodes:
    """Nodes on the half circle, which stand for their conjugates too, for counts of n units with this variance."""
    radius = DEPTH / 3 + (DEPTH**2 / 9 + 2 * DEPTH * variance).sqrt()  # Bernstein: |B - k| beyond has e^-DEPTH
    half = (radius.minimum(torch.maximum(k, n - k)) / 2).ceil()
    number = 2 * half + 1  # odd: t = pi, where phi may vanish, is no node
    index = torch.arange(min(NODES, n // 2 + 1), device=k.device)
    t = index * (2 * math.pi / number)[..., None]
    turn = (index * k[..., None]).remainder(number[..., None]) * (2 * math.pi / number)[..., None]
    size = torch.where(index == 0, 1.0, 2.0) * (index <= half[..., None]) / number[..., None]
    return _Nodes(t.cos(), t.sin(), torch.stack((size * turn.cos(), -size * turn.sin()), -1))


def _times(x: Tensor, y: Tensor) -> Tensor:
    """The product of complex numbers ``(..., 2)``."""
    (a, b), (c, d) = x.unbind(-1), y.unbind(-1)
    return torch.stack((a * c - b * d, a * d + b * c), -1)


def _product(x: Tensor) -> Tensor:
    """Of complex numbers ``(..., n, nodes, 2)`` along n."""
    while x.shape[-3] > 1:
        half = x.shape[-3] // 2
        rest = x[..., 2 * half :, :, :]
        x = torch.cat((_times(x[..., :half, :, :], x[..., half : 2 * half, :, :]), rest), -3)
    return x.squeeze(-3)


def covariance(logits: Tensor, k: Tensor, log_odds: Tensor) -> tuple[Tensor, Tensor]:
    """Covariance of the k-hot vector, ``(*batch, n, n)``, differentiable in the logits to any order; and scales.

    The error of an entry is some eps times the scales ``(*batch, n)`` of its two units.

    Args:
        logits: Float64 log-odds ``(*batch, n)``, which may be infinite.
        k: Integers ``(*batch,)``.
        log_odds: Those of the inclusion probabilities; only their values are used.
    """
    n, certain = logits.shape[-1], (logits == torch.inf).sum(-1)
    choice = ((k > certain) & (k < n - (logits == -torch.inf).sum(-1)))[..., None]
    logits, k = logits.masked_fill(~choice, 0.0), torch.where(choice[..., 0], k, n // 2)
    mean, rest = torch.sigmoid(log_odds.detach()), torch.sigmoid(-log_odds.detach())
    z = logits - solve_threshold(logits.detach(), k)[..., None]
    p, q = torch.sigmoid(z)[..., None], torch.sigmoid(-z)[..., None]
    nodes = _nodes((p * q).detach().sum((-1, -2)), k, n)
    cos, sin = nodes.cos[..., None, :], nodes.sin[..., None, :]
    phi = torch.stack((q + p * cos, p * sin), -1)  # (*batch, n, nodes, 2)
    law = _times(_product(phi), nodes.weight)  # whose real parts sum to P(B = k)
    law = law / law[..., 0].sum(-1)[..., None, None]
    # E[(x_i - pi_i) e^{it x_i}] / phi_i, times the conjugate of phi_i above and below.
    real = p * rest[..., None] * (p + q * cos) - q * mean[..., None] * (q + p * cos)
    deviation = torch.stack((real, p * q * sin), -1) / (1 - 2 * p * q * (1 - cos))[..., None]
    weighted = _times(deviation, law[..., None, :, :])
    conjugate = deviation * deviation.new_tensor((1.0, -1.0))
    product = weighted.flatten(-2) @ conjugate.flatten(-2).transpose(-1, -2)
    change = weighted[..., 0].sum(-1)  # of the mean with the logits; its value is rounding
    variance = mean * rest + change * (rest - mean - change)
    unit = torch.eye(n, dtype=torch.bool, device=logits.device)
    product = product - change[..., :, None] * change[..., None, :]
    product = torch.where(unit, variance[..., None], product).masked_fill(~choice[..., None], 0.0)
    return product, (p.squeeze(-1) * rest + q.squeeze(-1) * mean).detach()
