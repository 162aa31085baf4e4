"""The order maps of many rows by their definitions, in float64: sums over all pairs, and bisection over offsets.

Every distance is that of two entries, or of an entry and an offset from one, so that no entry far away costs digits.
"""

from typing import NamedTuple

import torch
from torch import Tensor

FAR = 1600.0  # scales; exp of minus half of it is 0
HALVINGS = 75


class Order(NamedTuple):
    """A map of rows (rows, n), its derivatives contracted with g, and the sizes that errors are relative to."""

    value: Tensor
    value_size: Tensor
    grad_x: Tensor
    grad_scale: Tensor
    size: Tensor


def _distances(x: Tensor, scale: Tensor) -> Tensor:
    """(x_i - x_k) / scale (rows, i, k)."""
    half = 0.5 * x
    return ((half.unsqueeze(-1) - half.unsqueeze(-2)) / scale[:, None, None] * 2).clamp(-FAR, FAR)


def _lap(u: Tensor) -> Tensor:
    return torch.where(u < 0, 0.5 * u.clamp(max=0).exp(), 1 - 0.5 * (-u.clamp(min=0)).exp())


def soft_rank(x: Tensor, scale: Tensor, g: Tensor) -> Order:
    d = _distances(x, scale)
    density = 0.5 * (-d.abs()).exp()
    # 1 for each entry below, the rest from the tails: no digit is lost that the sum has
    tails = density * -d.sign()
    below = (d > 0).sum(-1) + 0.5 * (d == 0).sum(-1)
    flow = density * (g.unsqueeze(-1) - g.unsqueeze(-2))
    size = (density * (g.abs().unsqueeze(-1) + g.abs().unsqueeze(-2))).sum(-1).amax(-1) / scale
    value = 0.5 + below + tails.sum(-1)
    return Order(value, value, flow.sum(-1) / scale[:, None], -(flow * d).sum((-1, -2)) / scale / 2, size)


class Points(NamedTuple):
    """Where the count passes the targets (rows, points): numbers of entries, offsets, and shares (rows, n, points)."""

    item: Tensor
    offset: Tensor
    distance: Tensor
    share: Tensor


def points(x: Tensor, scale: Tensor, targets: Tensor) -> Points:
    n, ordered = x.shape[-1], x.sort(-1)
    d = _distances(ordered.values, scale)
    rank = (d > 0).sum(-1) + 0.5 * (d == 0).sum(-1) - (0.5 * (-d.abs()).exp() * d.sign()).sum(-1)
    below = (rank.unsqueeze(-1) < targets).sum(-2)  # the point lies between the sorted entries below - 1 and below
    lower, upper = (below - 1).clamp(min=0), below.clamp(max=n - 1)
    rows = torch.arange(len(x))[:, None]
    gap = torch.where((below > 0) & (below < n), d[rows, upper, lower], 100.0 + 2 * torch.log(torch.tensor(n + 1.0)))

    def at(anchor: Tensor, offset: Tensor) -> Tensor:
        """Whether the count at the points is above the targets."""
        u = offset.unsqueeze(-1) + d[rows, anchor]  # (rows, points, n)
        tails = -0.5 * (-u.abs()).exp() * u.sign()
        return (u > 0).sum(-1) + 0.5 * (u == 0).sum(-1) - targets + tails.sum(-1) > 0

    found = []
    for anchor, sign in ((lower, 1.0), (upper, -1.0)):
        low, high = torch.zeros_like(gap), gap.clone()
        for _ in range(HALVINGS):
            middle = 0.5 * (low + high)
            beyond = at(anchor, sign * middle) == (sign > 0)
            low, high = torch.where(beyond, low, middle), torch.where(beyond, middle, high)
        found.append(low)
    from_lower = (below > 0) & ((found[0] <= found[1]) | (below == n))
    item, offset = torch.where(from_lower, lower, upper), torch.where(from_lower, found[0], -found[1])
    # Where as many entries lie below as are counted, the tails alone fix the point, which may all underflow.
    balanced = (below == targets) & (below > 0) & (below < n)
    ahead = torch.arange(n) < below.unsqueeze(-1)
    log_left = torch.where(ahead, d[rows, lower].neg(), -torch.inf).logsumexp(-1)
    log_right = torch.where(ahead, -torch.inf, d[rows, upper]).logsumexp(-1)
    item = torch.where(balanced, lower, item)
    offset = torch.where(balanced, 0.5 * (gap + log_left - log_right), offset)
    distance = (offset.unsqueeze(-1) + d[rows, item]).mT  # t - z (rows, sorted entries, points)
    weight = (distance.abs().amin(-2, keepdim=True) - distance.abs()).exp()
    place = ordered.indices.argsort(-1).unsqueeze(-1).expand_as(distance)
    share = (weight / weight.sum(-2, keepdim=True)).gather(-2, place)
    return Points(ordered.indices.gather(-1, item), offset, distance.gather(-2, place), share)


def soft_sort(x: Tensor, scale: Tensor, g: Tensor) -> Order:
    at = points(x, scale, torch.arange(x.shape[-1]) + 0.5)
    lever = (at.share * at.distance).sum(-2)
    half, move = 0.5 * x.gather(-1, at.item), 0.5 * scale[:, None] * at.offset
    size = x.gather(-1, at.item).abs().maximum(scale[:, None])
    grad = (at.share @ g.unsqueeze(-1)).squeeze(-1)
    return Order((half + move) * 2, size, grad, (g * lever).sum(-1), g.abs().amax(-1))


def soft_permutation(x: Tensor, scale: Tensor, g: Tensor) -> Order:
    n = x.shape[-1]
    at = points(x, scale, torch.arange(1.0, n).double())
    u = at.distance
    ends = (len(x), n, 1)
    cumulative = torch.cat([torch.zeros(ends).double(), _lap(u), torch.ones(ends).double()], -1)
    rest = torch.cat([torch.ones(ends).double(), _lap(-u), torch.zeros(ends).double()], -1)
    value = torch.where(cumulative[..., :-1] > 0.5, -rest.diff(dim=-1), cumulative.diff(dim=-1))
    density = 0.5 * (-u.abs()).exp()
    flow = density * (g[..., :-1] - g[..., 1:])
    pull, lever = flow.sum(-2), (at.share * u).sum(-2)
    grad_x = ((at.share @ pull.unsqueeze(-1)).squeeze(-1) - flow.sum(-1)) / scale[:, None]
    grad_scale = (flow * (lever.unsqueeze(-2) - u)).sum((-1, -2)) / scale
    size = (density * (g[..., :-1].abs() + g[..., 1:].abs())).sum((-1, -2)) / scale
    return Order(value, torch.ones_like(value), grad_x, grad_scale, size)
