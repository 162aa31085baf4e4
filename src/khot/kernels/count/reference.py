"""The definition of draws given the count, with one marked unit or without: all counts of all first units."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from ..draws import balance
from ..random_numbers.philox import uniform_rows
from ..threshold import solve_threshold


def bernoulli_count_draw(logits: Tensor, k: Tensor, seed: Tensor, draws: int, dtype: torch.dtype) -> Tensor:
    """k-hot draws ``(draws, *batch, n)`` of units with these logits ``(*batch, n)`` given k ones."""
    z = logits - solve_threshold(logits, k).nan_to_num(0.0, 0.0, 0.0).unsqueeze(-1)
    return _draw(torch.sigmoid(z), torch.sigmoid(-z), torch.zeros_like(z), k, seed, draws).to(dtype)


def marked_count_draw(probs: Tensor, k: Tensor, seed: Tensor, draws: int, dtype: torch.dtype) -> Tensor:
    """The same of units with these probabilities, which add up to k, and with a mark."""
    p = balance(probs, k)
    weight = p * (1 - p)  # |1 - p| p for a one, |0 - p| (1 - p) for a zero
    return _draw(p, 1 - p, weight, k, seed, draws).to(dtype)


def _laws(p: Tensor, q: Tensor, weight: Tensor) -> list[tuple[Tensor, Tensor]]:
    """The laws of the count of the first 0, ..., n units, and the same with the weight of all marks; ``(R, n + 1)``."""
    law = F.pad(p.new_ones(len(p), 1), (0, p.shape[-1]))
    laws = [(law, torch.zeros_like(law))]
    for unit in range(p.shape[-1]):
        (law, marked), (one, zero, mark) = laws[-1], (x[:, unit : unit + 1] for x in (p, q, weight))
        one_more, one_more_marked = (F.pad(x[:, :-1], (1, 0)) for x in (law, marked))
        grown = zero * marked + one * one_more_marked + mark * (law + one_more)
        laws.append((zero * law + one * one_more, grown))
    return laws


def _draw(p: Tensor, q: Tensor, weight: Tensor, k: Tensor, seed: Tensor, draws: int) -> Tensor:
    """Draws the last unit, with the mark or without, then the one before it, and so on, given what is left."""
    *batch, n = p.shape
    rows = math.prod(batch)
    p, q, weight = (x.reshape(rows, n) for x in (p, q, weight))
    laws, u = _laws(p, q, weight), uniform_rows(seed, draws, [rows], n)
    left, drawn = k.reshape(rows).expand(draws, rows), []

    def at(x: Tensor, count: Tensor) -> Tensor:
        found = x.expand(draws, rows, n + 1).gather(-1, count.clamp(min=0).unsqueeze(-1)).squeeze(-1)
        return found.where(count >= 0, 0.0)

    is_open = at(laws[-1][1], left) > 0
    for i in reversed(range(n)):
        law, marked = laws[i]
        before = torch.where(is_open, at(marked, left), at(law, left)) * q[:, i]
        before_one = torch.where(is_open, at(marked, left - 1), at(law, left - 1)) * p[:, i]
        here, here_one = (weight[:, i] * is_open * at(law, count) for count in (left, left - 1))
        target = u[..., i] * (before + before_one + here + here_one)
        one = (left > 0) & ((before + here == 0) | (target < before_one + here_one))
        open_if_one = (here_one == 0) | (target < before_one)
        is_open = is_open & torch.where(one, open_if_one, (here == 0) | (target < before_one + here_one + before))
        drawn.append(one)
        left = left - one.long()
    return torch.stack(drawn[::-1], -1).view(draws, *batch, n)
