r"""The soft permutation of sorted items: how much of each item's Laplace law lies between each two neighbouring cuts.

.. math:: P_{ij} = \mathrm{Lap}(t_j - z_i) - \mathrm{Lap}(t_{j-1} - z_i), \qquad t_0 = -\infty,\ t_n = \infty

The slice around an item, one per row, is :math:`1 - \tfrac12 e^{z_i - t_j} - \tfrac12 e^{t_{j-1} - z_i}`. For the other
slices, of width :math:`h_j = t_j - t_{j-1}`, the difference of two tails is a product,

.. math:: P_{ij} = \tfrac12 (1 - e^{-h_j})\, e^{-\max(t_{j-1} - z_i,\; z_i - t_j)},

from which nothing cancels: with everything of length n in float64, entries in float32 keep all their digits, and rows
and columns their sums. While the items spread over few scales, the exponential too is a product of one of the row and
one of the column.

Layout: items (..., n) in float64, z = values / scale ascending, scale (..., 1); cuts (..., n - 1) as the values of
items near to them and their offsets from there in units of the scale: so t - z keeps its digits, however far away any
item is. ``order`` (..., n) is the place of each item in the result.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

# Up to which distance from 0 the exponentials of items and cuts, and their products that count, are normal numbers.
_SAFE_EXPONENTS = {torch.float32: 60.0, torch.float64: 600.0}


def distances(values: Tensor, scale: Tensor, cuts: Tensor, offset: Tensor) -> Tensor:
    """t_j - z_i (..., items, cuts)."""
    return (cuts.unsqueeze(-2) - values.unsqueeze(-1)) / scale.unsqueeze(-1) + offset.unsqueeze(-2)


def slice_weights(
    values: Tensor, scale: Tensor, order: Tensor, cuts: Tensor, offset: Tensor, below: Tensor, dtype: torch.dtype
) -> Tensor:
    n, arithmetic = values.shape[-1], _arithmetic(dtype)
    if values.numel() == 0:
        return values.new_empty((*values.shape, n), dtype=dtype)
    width = torch.full_like(values, torch.inf)
    width[..., 1:-1] = (cuts[..., 1:] - cuts[..., :-1]) / scale + (offset[..., 1:] - offset[..., :-1])
    weight = width.neg_().expm1_().mul_(-0.5)
    near_zero = _near_zero(values, scale, cuts, offset, arithmetic)
    if near_zero is not None:
        z, t = near_zero
        lower, upper = pad(t, (1, 0), value=-torch.inf), pad(t, (0, 1), value=torch.inf)
        z = _place(z, order).unsqueeze(-1)
        above, under = lower.neg().exp_().mul_(weight), upper.exp().mul_(weight)
        entries = z.exp().to(arithmetic) * above.to(arithmetic).unsqueeze(-2)
        torch.minimum(entries, z.neg().exp_().to(arithmetic) * under.to(arithmetic).unsqueeze(-2), out=entries)
    else:
        # In float64, or far from 0 the differences had no digits.
        distance = _distances(_place(values, order), scale, cuts, offset).to(arithmetic)
        entries = pad(distance, (0, 1), value=torch.inf)
        torch.minimum(entries[..., 1:], distance.neg_(), out=entries[..., 1:])
        entries = _exp_(entries).mul_(weight.to(arithmetic).unsqueeze(-2))
    around, own = _own_slices(values, scale, cuts, offset, below)
    entries.scatter_(-1, _place(around, order).unsqueeze(-1), _place(own, order).to(arithmetic).unsqueeze(-1))
    return entries.to(dtype)


def _place(sorted_values: Tensor, order: Tensor) -> Tensor:
    """In the order that the items came in."""
    return torch.empty_like(sorted_values, memory_format=torch.contiguous_format).scatter_(-1, order, sorted_values)


def _distances(values: Tensor, scale: Tensor, cuts: Tensor, offset: Tensor) -> Tensor:
    """:func:`distances` in one buffer."""
    return (cuts.unsqueeze(-2) - values.unsqueeze(-1)).div_(scale.unsqueeze(-1)).add_(offset.unsqueeze(-2))


def _own_slices(values: Tensor, scale: Tensor, cuts: Tensor, offset: Tensor, below: Tensor) -> tuple[Tensor, Tensor]:
    """In which slice each item lies, and its entry there, (..., n) both in sorted order."""
    n = values.shape[-1]
    places = torch.arange(n, device=values.device).expand(values.shape).contiguous()
    around = torch.searchsorted(below.contiguous(), places, right=True)
    own = torch.zeros_like(values)
    for cut, sign in ((around, 1), (around - 1, -1)):
        there = (cut >= 0) & (cut < n - 1)
        if n > 1:
            cut = cut.clamp(0, n - 2)
            distance = ((cuts.gather(-1, cut) - values) / scale + offset.gather(-1, cut)) * sign
        else:
            distance = own
        own = own - torch.where(there, (-distance).expm1(), -1.0) * 0.5
    return around, own


def slice_weights_derivative(
    values: Tensor, scale: Tensor, order: Tensor, cuts: Tensor, offset: Tensor, grad: Tensor
) -> tuple[Tensor, Tensor]:
    if values.numel() == 0:
        return torch.zeros_like(values), torch.zeros_like(offset)
    arithmetic = _arithmetic(grad.dtype)
    near_zero = _near_zero(values, scale, cuts, offset, arithmetic)
    if near_zero is not None:
        z, t = _place(near_zero[0], order), near_zero[1]
        rise, fall, up, down = (v.exp().to(arithmetic) for v in (z, -z, t, -t))
        density = rise.unsqueeze(-1) * down.unsqueeze(-2)
        torch.minimum(density, fall.unsqueeze(-1) * up.unsqueeze(-2), out=density)
    else:
        density = _exp_(_distances(_place(values, order), scale, cuts, offset).to(arithmetic).abs_().neg_())
    grad = grad.to(arithmetic)
    flow = (grad[..., :-1] - grad[..., 1:]).mul_(density)  # (..., n, n - 1), twice the flow
    return flow.sum(-1).double().mul_(-0.5).gather(-1, order), flow.sum(-2).double().mul_(0.5)


def _arithmetic(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _exp_(v: Tensor) -> Tensor:
    """In place; exp takes a CPU ten times as long where it underflows, a square does not."""
    return v.mul_(0.5).clamp_(min=-_SAFE_EXPONENTS[v.dtype]).exp_().square_()


def _near_zero(
    values: Tensor, scale: Tensor, cuts: Tensor, offset: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor] | None:
    """z and t around 0, if their exponentials fit ``dtype``; not looked for where that would stall."""
    if values.is_cuda or offset.numel() == 0:
        return None
    centre = 0.5 * values[..., :1] + 0.5 * values[..., -1:]
    z, t = (values - centre) / scale, ((cuts - centre) / scale).add_(offset)
    ends = torch.cat([z[..., [0, -1]], t[..., [0, -1]]], -1)
    return (z, t) if bool(ends.abs().max() <= _SAFE_EXPONENTS[dtype]) else None
