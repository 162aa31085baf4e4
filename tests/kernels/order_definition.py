"""Sums, points and slices of sorted items by definition, from all pairs of items, in float64."""

import torch
from torch import Tensor

from khot.kernels.order.sums import FAR, number_of_points

HALVINGS = 100  # of a bracket, until its ends are neighbouring doubles
REACH = 50.0  # scales beyond the items, where no count changes any more


def laplace(u: Tensor) -> Tensor:
    """The distribution function of Laplace's law."""
    tail = 0.5 * (-u.abs()).exp()
    return torch.where(u < 0, tail, 1 - tail)


def sorted_positions(values: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """z = values / scale, centred around 0, and the gaps between neighbours; the gap of the first item is ``FAR``."""
    z = (values - 0.5 * (values[..., :1] + values[..., -1:])) / scale
    return z, torch.cat([torch.full_like(z[..., :1], FAR), z.diff(dim=-1)], -1)


def decayed_sums(z: Tensor, gap: Tensor, left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """The sums over the items on the left of each and over those on its right, see :mod:`khot.kernels.order`."""
    decay = (-(z.unsqueeze(-1) - z.unsqueeze(-2)).abs()).exp()  # (..., n, n)
    return (decay.tril(-1) * left.unsqueeze(-2)).sum(-1), (decay.triu(1) * right.unsqueeze(-2)).sum(-1)


def soft_count_inverse(z: Tensor, gap: Tensor, between: bool) -> tuple[Tensor, Tensor, Tensor]:
    """The :class:`Points` where F passes 1/2, 3/2, ..., n - 1/2, or with ``between`` 1, 2, ..., n - 1; ascending."""
    count = number_of_points(z.shape[-1], between)
    goals = torch.arange(count, dtype=z.dtype, device=z.device) + (1.0 if between else 0.5)
    low = (z[..., :1] - REACH).expand(*z.shape[:-1], count)
    high = (z[..., -1:] + REACH).expand(*z.shape[:-1], count)
    for _ in range(HALVINGS):
        middle = 0.5 * low + 0.5 * high
        rises = laplace(middle.unsqueeze(-1) - z.unsqueeze(-2)).sum(-1) < goals
        low, high = torch.where(rises, middle, low), torch.where(rises, high, middle)
    below = (z.unsqueeze(-2) <= low.unsqueeze(-1)).sum(-1)
    anchor = (below - 1).clamp(min=0)
    return low - z.gather(-1, anchor), anchor, below


def distances(values: Tensor, scale: Tensor, cuts: Tensor, offset: Tensor) -> Tensor:
    """t_j - z_i (..., items, cuts)."""
    return (cuts.unsqueeze(-2) - values.unsqueeze(-1)) / scale.unsqueeze(-1) + offset.unsqueeze(-2)


def slice_weights(
    values: Tensor, scale: Tensor, order: Tensor, cuts: Tensor, offset: Tensor, below: Tensor, dtype: torch.dtype
) -> Tensor:
    """How much of each item's law lies between neighbouring cuts: (..., n, n), the items in their original order."""
    share = laplace(distances(values, scale, cuts, offset))
    first, last = torch.zeros_like(share[..., :1]), torch.ones_like(share[..., :1])
    if share.shape[-1] == 0:  # one item
        first, last = (v.new_full((*share.shape[:-1], 1), i) for i, v in enumerate((share, share)))
    slices = torch.cat([first, share, last], -1).diff(dim=-1)
    return torch.zeros_like(slices).scatter(-2, order.unsqueeze(-1).expand_as(slices), slices).to(dtype)


def slice_weights_derivative(
    values: Tensor, scale: Tensor, order: Tensor, cuts: Tensor, offset: Tensor, grad: Tensor
) -> tuple[Tensor, Tensor]:
    """dL/dz and dL/dt in float64 from dL/dP; the rows of ``grad`` are ordered as those of P."""
    density = 0.5 * (-distances(values, scale, cuts, offset).abs()).exp()
    rows = grad.double().gather(-2, order.unsqueeze(-1).expand_as(grad))
    flow = (rows[..., :-1] - rows[..., 1:]) * density
    return -flow.sum(-1), flow.sum(-2)
