"""The definition of draws given the count: all counts of all first units."""

import torch
import torch.nn.functional as F
from torch import Tensor

from khot.kernels.random_numbers.philox import uniform_rows
from khot.kernels.threshold import solve_threshold


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
    upto = (_laws(p, q)[-1] * weights).cumsum(-1)
    drawn_size = (upto <= u[..., -1:] * upto[:, -1:]).sum(-1)
    return _draw(p, q, drawn_size, u)


def _laws(p: Tensor, q: Tensor) -> list[Tensor]:
    """The laws of the count of the first 0, ..., n units, ``(R, n + 1)`` each."""
    laws = [F.pad(p.new_ones(len(p), 1), (0, p.shape[-1]))]
    for one, zero in zip(p.T.unsqueeze(-1), q.T.unsqueeze(-1), strict=True):
        laws.append(zero * laws[-1] + one * F.pad(laws[-1][:, :-1], (1, 0)))
    return laws


def _draw(p: Tensor, q: Tensor, left: Tensor, u: Tensor) -> Tensor:
    """Draws the last unit, then the one before it, and so on, given what is left."""
    laws, drawn = _laws(p, q), list[Tensor]()

    def at(law: Tensor, count: Tensor) -> Tensor:
        found = law.expand(*count.shape, -1).gather(-1, count.clamp(min=0).unsqueeze(-1)).squeeze(-1)
        return found.where(count >= 0, 0.0)

    for i in reversed(range(p.shape[-1])):
        zero, one = q[:, i] * at(laws[i], left), p[:, i] * at(laws[i], left - 1)
        drawn.append((left > 0) & ((zero == 0) | (u[..., i] * (zero + one) < one)))
        left = left - drawn[-1].long()
    return torch.stack(drawn[::-1], -1)
