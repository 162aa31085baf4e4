"""Draws with one marked unit: the definition, by all counts of all first units, without a mark and with one."""

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ..draws import balance
from ..random_numbers.philox import uniform_rows

TINY = torch.finfo(torch.float64).tiny  # the reciprocals of smaller numbers may overflow


def _laws(probs: Tensor) -> list[tuple[Tensor, Tensor]]:
    """The laws of the count of the first 0, ..., n units, and the same with the weight of all marks; ``(R, n + 1)``."""
    rows, n = probs.shape
    law = F.pad(probs.new_ones(rows, 1), (0, n))
    laws = [(law, torch.zeros_like(law))]
    for p in probs.unbind(-1):
        (law, marked), p = laws[-1], p.unsqueeze(-1)
        one_more, one_more_marked = (F.pad(x[:, :-1], (1, 0)) for x in (law, marked))
        weight = p * (1 - p)  # |1 - p| p for a one, |0 - p| (1 - p) for a zero
        grown = (1 - p) * marked + p * one_more_marked + weight * (law + one_more)
        laws.append(((1 - p) * law + p * one_more, grown))
    return laws


def marked_count(probs: Tensor, k: Tensor, with_slope: bool) -> tuple[Tensor, Tensor, Tensor]:
    """The weight of all draws with k ones and a mark, and its derivative with respect to the marks' probabilities.

    Args:
        probs: Probabilities ``(R, n)`` float64, which add up to k up to rounding.
        k: ``(R,)`` integers.
        with_slope: Whether the derivative is wanted; otherwise anything may be returned for it.

    Returns: The probabilities, balanced so that they add up to k. The logarithm of E[D; B = k], D the distance of x
        from the probabilities, ``(R,)``; in rows without a choice, where D is 0, that of P(B = k). And its derivative
        with respect to a probability in D, E[1 - 2 x_i | B = k] / E[D | B = k], ``(R, n)``.
    """
    probs = balance(probs, k)
    chance, total = (law.gather(-1, k.unsqueeze(-1)) for law in _laws(probs)[-1])
    certain = F.one_hot(torch.arange(probs.shape[-1], device=probs.device), probs.shape[-1]).bool()
    included = [_laws(probs.masked_fill(unit, 1.0))[-1][0].gather(-1, k.unsqueeze(-1)) for unit in certain.unbind(0)]
    ones = probs * torch.cat(included, -1) / chance
    slope = torch.where(total >= TINY, (1 - 2 * ones) * chance / total, 0.0)
    return probs, torch.where(total > 0, total, chance).log().squeeze(-1), slope


def marked_count_log_prob(balanced: Tensor, log_total: Tensor, value: Tensor) -> Tensor:
    """Log-probability of k-hot values ``(S, R, n)``, ``(S, R)``: the sum over the possible marks."""
    chance = torch.where(value == 1, balanced, 1 - balanced)
    distance = torch.where(value == 1, 1 - balanced, balanced).sum(-1)
    return chance.log().sum(-1) + torch.where(distance > 0, distance, 1.0).log() - log_total


def marked_count_log_prob_derivative(
    probs: Tensor, k: Tensor, balanced: Tensor, slope: Tensor, value: Tensor, g: Tensor
) -> Tensor:
    """The derivative of the log-probabilities ``(S, R)`` with respect to ``probs`` ``(R, n)``, times g, summed.

    In E[D; B = k] a probability occurs in D, with the derivative ``slope``, and as the probability of a value. With
    respect to the latter, the derivative of the logarithm is (P(x_i = 1) - p_i) / (p_i (1 - p_i)), where P is the law
    with marks: this is 0, as its inclusion probabilities are p. Impossible values, and probabilities of 0 or 1, have no
    derivative.
    """
    sign, chance = torch.where(value == 1, 1.0, -1.0), torch.where(value == 1, balanced, 1 - balanced)
    distance = torch.where(value == 1, 1 - balanced, balanced).sum(-1, keepdim=True)
    each = torch.where(distance >= TINY, 1 / distance, 0.0)
    free = (chance > 0).all(-1, keepdim=True) & (balanced > 0) & (balanced < 1)
    of_balanced = (g.unsqueeze(-1) * torch.where(free, sign * (1 / chance - each) - slope, 0.0)).sum(0)
    gradient: Tensor = torch.func.vjp(lambda x: balance(x, k), probs)[1](of_balanced)[0]
    return gradient


def marked_count_draw(
    probs: Tensor, k: Tensor, seed: Tensor, first: Sequence[int], draws: int, dtype: torch.dtype
) -> Tensor:
    """Draws the last unit, with the mark or without, then the one before it, and so on, given what is left."""
    *batch, n = probs.shape
    rows = math.prod(batch)
    probs, k = balance(probs, k).reshape(rows, n), k.reshape(rows)
    laws, u = _laws(probs), uniform_rows(seed, draws, [rows], n, first)
    left, drawn = k.expand(draws, rows), []
    is_open = (laws[-1][1].gather(-1, k.unsqueeze(-1)).squeeze(-1) > 0).expand(draws, rows)
    for i in reversed(range(n)):
        p = probs[:, i]

        def at(x: Tensor, count: Tensor) -> Tensor:
            found = x.expand(draws, rows, n + 1).gather(-1, count.clamp(min=0).unsqueeze(-1)).squeeze(-1)
            return found.where(count >= 0, 0.0)

        (law, marked), weight = laws[i], p * (1 - p) * is_open
        before = torch.where(is_open, at(marked, left), at(law, left)) * (1 - p)
        before_one = torch.where(is_open, at(marked, left - 1), at(law, left - 1)) * p
        here, here_one = weight * at(law, left), weight * at(law, left - 1)
        target = u[..., i] * (before + before_one + here + here_one)
        one = (left > 0) & ((before + here == 0) | (target < before_one + here_one))
        open_if_one = (here_one == 0) | (target < before_one)
        is_open = is_open & torch.where(one, open_if_one, (here == 0) | (target < before_one + here_one + before))
        drawn.append(one)
        left = left - one.long()
    return torch.stack(drawn[::-1], -1).view(draws, *batch, n).to(dtype)
