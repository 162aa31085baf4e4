"""The definition: all counts of all first units, and derivatives by torch."""

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ..random_numbers.philox import uniform_rows
from ..threshold import solve_threshold


def tilt_of(logits: Tensor, k: Tensor) -> Tensor:
    """The anchor and the offset with which k ones are expected, ``(R, 2)``."""
    threshold = solve_threshold(logits, k).nan_to_num(0.0, 0.0, 0.0)
    return torch.stack((threshold, torch.zeros_like(threshold)), -1)


def _tilted(logits: Tensor, tilt: Tensor) -> Tensor:
    return (logits - tilt[:, :1]) + tilt[:, 1:]


def _laws(z: Tensor) -> list[Tensor]:
    """The laws of the number of ones among the first 0, ..., n units, each ``(R, n + 1)``."""
    rows, n = z.shape
    law = F.pad(z.new_ones(rows, 1), (0, n))
    laws = [law]
    for unit in z.unbind(-1):
        unit = unit.unsqueeze(-1)
        law = torch.sigmoid(-unit) * law + torch.sigmoid(unit) * F.pad(law[:, :-1], (1, 0))
        laws.append(law)
    return laws


def _chance(z: Tensor, k: Tensor) -> Tensor:
    """P(B = k), ``(R,)``."""
    return _laws(z)[-1].gather(-1, k.unsqueeze(-1)).squeeze(-1)


def _masses(z: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """P(B = k and x_i = 0) and P(B = k and x_i = 1), ``(R, n)``."""

    def of_unit(i: int, x: float) -> Tensor:
        fixed = z.clone()
        fixed[:, i] = x
        return _chance(fixed, k)

    units = range(z.shape[-1])
    out = torch.stack([of_unit(i, -torch.inf) for i in units], -1) * torch.sigmoid(-z)
    return out, torch.stack([of_unit(i, torch.inf) for i in units], -1) * torch.sigmoid(z)


def bernoulli_count(logits: Tensor, k: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The tilt, the law of the count and the inclusion probabilities.

    Args:
        logits: ``(R, n)`` float64.
        k: ``(R,)`` integers, 0 <= k <= n.

    Returns:
        Tilts ``(R, 2)``, anchor and offset, for which B = k is at least about as likely as one over the standard
        deviation of B; ``(R, 2)`` of log P(B = k) and the sum of ``log(1 + e^-|z|)``; the probabilities ``(R, n)`` that
        units are zeros, and that they are ones.
    """
    tilt = tilt_of(logits, k)
    z = _tilted(logits, tilt)
    out, included = _masses(z, k)
    log_count = torch.stack((_chance(z, k).log(), -F.logsigmoid(z.abs()).sum(-1)), -1)
    return tilt, log_count, out / (out + included), included / (out + included)


def bernoulli_count_derivative(logits: Tensor, k: Tensor, tilt: Tensor, g: Tensor) -> Tensor:
    """The derivative of ``<g, inclusion>`` with respect to the logits."""

    def product(logits: Tensor) -> Tensor:
        out, included = _masses(_tilted(logits, tilt), k)
        return (g * included / (out + included)).sum()

    gradient: Tensor = torch.func.grad(product)(logits)
    return gradient


def bernoulli_count_log_prob(logits: Tensor, tilt: Tensor, log_count: Tensor, value: Tensor) -> Tensor:
    """``log P(x = value | B = k)`` of values ``(S, R, n)`` with k ones, linear in the value, ``(S, R)``."""
    z, value = _tilted(logits, tilt), value.double()
    miss = torch.where(z > 0, 1 - value, value)
    penalty = torch.where(miss == 0, 0.0, miss * z.abs())
    return -penalty.sum(-1) - log_count.sum(-1)


def bernoulli_count_log_prob_derivative(value: Tensor, g: Tensor, complement: Tensor, inclusion: Tensor) -> Tensor:
    """The derivative of the log-probabilities ``(S, R)`` with respect to the logits ``(R, n)``, times g, summed."""
    value = value.double()
    return (g.unsqueeze(-1) * (value * complement - (1 - value) * inclusion)).sum(0)


def bernoulli_count_draw(
    logits: Tensor, k: Tensor, seed: Tensor, first: Sequence[int], draws: int, dtype: torch.dtype
) -> Tensor:
    """Draws the last unit, then the one before it, and so on, each given how many ones are left for the others."""
    *batch, n = logits.shape
    rows = math.prod(batch)
    logits, k = logits.reshape(rows, n), k.reshape(rows)
    z = _tilted(logits, tilt_of(logits, k))
    laws, u = _laws(z), uniform_rows(seed, draws, [rows], n, first)
    left, drawn = k.expand(draws, rows), []
    for i in reversed(range(n)):
        law = laws[i].expand(draws, rows, n + 1)
        stays = law.gather(-1, left.unsqueeze(-1)).squeeze(-1) * torch.sigmoid(-z[:, i])
        grows = law.gather(-1, (left - 1).clamp(min=0).unsqueeze(-1)).squeeze(-1) * torch.sigmoid(z[:, i]) * (left > 0)
        one = (stays == 0) | (u[..., i] * (stays + grows) < grows)
        drawn.append(one)
        left = left - one.long()
    return torch.stack(drawn[::-1], -1).view(draws, *batch, n).to(dtype)
