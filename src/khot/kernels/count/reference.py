"""The definition of draws given the count, with one marked unit or without: all counts of all first units."""

import torch
import torch.nn.functional as F
from torch import Tensor

from ..draws import balance
from ..random_numbers.philox import uniform_rows
from ..threshold import solve_threshold


def bernoulli_count_draw(
    logits: Tensor, low: Tensor, high: Tensor, seed: Tensor, draws: int, dtype: torch.dtype
) -> Tensor:
    """Draws ``(draws, *batch, n)`` of units with logits ``(*batch, n)``, given that low to high of them are ones."""
    *batch, n = logits.shape
    rows = logits.reshape(-1, n), low.reshape(-1), high.reshape(-1)
    every = torch.ones_like(rows[1], dtype=torch.bool)
    return draw(*rows, seed, draws, every).view(draws, *batch, n).to(dtype)


def draw(logits: Tensor, low: Tensor, high: Tensor, seed: Tensor, draws: int, wanted: Tensor) -> Tensor:
    """The draws ``(draws, rows, n)`` of the wanted rows; False in rows that have no law."""
    u = uniform_rows(seed, draws, [len(low)], logits.shape[-1] + 1)[:, wanted]
    logits, low, high = logits[wanted], low[wanted], high[wanted]
    certain, possible = (logits == torch.inf).sum(-1), (logits > -torch.inf).sum(-1)
    has_law = (low.maximum(certain) <= high.minimum(possible)) & ~logits.isnan().any(-1)
    logits = logits.masked_fill(~has_law.unsqueeze(-1), -torch.inf)
    low, high = low * has_law, high * has_law
    certain, possible = certain * has_law, possible * has_law
    mean = torch.sigmoid(logits).sum(-1)
    k = mean.maximum(low.maximum(certain)).minimum(high.minimum(possible))  # the expected size, after a tilt
    tilt = solve_threshold(logits, k).masked_fill((low < high) & (k == mean), 0.0).nan_to_num(0.0, 0.0, 0.0)
    z = logits - tilt.unsqueeze(-1)
    p, q = torch.sigmoid(z), torch.sigmoid(-z)
    size = torch.arange(logits.shape[-1] + 1, device=logits.device)
    inside = (size >= low.unsqueeze(-1)) & (size <= high.unsqueeze(-1))
    weights = (tilt.unsqueeze(-1) * (size - k.unsqueeze(-1)).masked_fill(~inside, 0.0)).exp() * inside
    upto = (_laws(p, q, torch.zeros_like(p))[-1][0] * weights).cumsum(-1)
    drawn_size = (upto <= u[..., -1:] * upto[:, -1:]).sum(-1)
    return _draw(p, q, torch.zeros_like(p), drawn_size, u)


def marked_count_draw(probs: Tensor, k: Tensor, seed: Tensor, draws: int, dtype: torch.dtype) -> Tensor:
    """The same of units with these probabilities, which add up to k, and with a mark."""
    p = balance(probs, k)
    weight = p * (1 - p)  # |1 - p| p for a one, |0 - p| (1 - p) for a zero
    *batch, n = p.shape
    p, weight = p.reshape(-1, n), weight.reshape(-1, n)
    u = uniform_rows(seed, draws, [len(p)], n)
    return _draw(p, 1 - p, weight, k.reshape(-1).expand(u.shape[:-1]), u).view(draws, *batch, n).to(dtype)


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


def _draw(p: Tensor, q: Tensor, weight: Tensor, left: Tensor, u: Tensor) -> Tensor:
    """Draws the last unit, with the mark or without, then the one before it, and so on, given what is left."""
    n = p.shape[-1]
    laws, drawn = _laws(p, q, weight), list[Tensor]()

    def at(x: Tensor, count: Tensor) -> Tensor:
        found = x.expand(*count.shape, n + 1).gather(-1, count.clamp(min=0).unsqueeze(-1)).squeeze(-1)
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
    return torch.stack(drawn[::-1], -1)
