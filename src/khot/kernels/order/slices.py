r"""The soft permutation of sorted items: how much of each item's Laplace law lies between neighbouring cuts.

.. math:: P_{ij} = \mathrm{Lap}(t_j - z_i) - \mathrm{Lap}(t_{j-1} - z_i), \qquad t_0 = -\infty,\ t_n = \infty

The slice around an item, one per row, is :math:`1 - \tfrac12 e^{z_i - t_j} - \tfrac12 e^{t_{j-1} - z_i}`. For the other
slices, of width :math:`h_j = t_j - t_{j-1}`, the difference of two tails is a product,

.. math:: P_{ij} = \tfrac12 (1 - e^{-h_j})\, e^{-\max(t_{j-1} - z_i,\; z_i - t_j)},

without cancellation: with everything of length n in float64, entries in float32 keep all their digits, and so do the
sums of rows and columns.

Layout: items (..., n) in float64, z = values / scale ascending, scale (..., 1); cuts (..., n - 1) as the values of
items near them and their offsets from there in units of the scale, so that t - z keeps its digits however far away an
item is. ``order`` (..., n) is the position of each item in the result.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

# Half the distance beyond which an exponential counts as 0, although the square of its root is a normal number.
_FARTHEST_HALF = {torch.float32: 60.0, torch.float64: 600.0}


def distances(values: Tensor, scale: Tensor, cuts: Tensor, offset: Tensor) -> Tensor:
    """t_j - z_i (..., items, cuts)."""
    return (cuts.unsqueeze(-2) - values.unsqueeze(-1)) / scale.unsqueeze(-1) + offset.unsqueeze(-2)


def slice_weights(
    values: Tensor, scale: Tensor, order: Tensor, cuts: Tensor, offset: Tensor, below: Tensor, dtype: torch.dtype
) -> Tensor:
    """How much of each item's law lies between neighbouring cuts: (..., n, n), the items in their original order.

    Args:
        values: Sorted items (..., n) in float64.
        scale: Scales of the rows (..., 1), negative if the items descend.
        order: The position (..., n) of each item in the result.
        cuts: An item near each cut (..., n - 1).
        offset: Offset of the cut from there, in scales.
        below: How many items lie at or below each cut.
        dtype: Dtype of the result.
    """
    if values.numel() == 0:
        return values.new_empty((*values.shape, values.shape[-1]), dtype=dtype)
    arithmetic = torch.promote_types(dtype, torch.float32)
    width = torch.full_like(values, torch.inf)
    width[..., 1:-1] = (cuts[..., 1:] - cuts[..., :-1]) / scale + (offset[..., 1:] - offset[..., :-1])
    distance = distances(_place(values, order), scale, cuts, offset).to(arithmetic)
    from_lower, to_upper = pad(distance, (1, 0), value=-torch.inf), pad(distance, (0, 1), value=torch.inf)
    outside = torch.maximum(from_lower, -to_upper)
    entries = _decay(outside) * (-0.5 * torch.expm1(-width)).to(arithmetic).unsqueeze(-2)
    around, own = _own_slices(values, scale, cuts, offset, below)
    own = _place(own, order).to(arithmetic)
    return entries.scatter(-1, _place(around, order).unsqueeze(-1), own.unsqueeze(-1)).to(dtype)


def _place(sorted_values: Tensor, order: Tensor) -> Tensor:
    """The values in the original order of the items."""
    return torch.empty_like(sorted_values, memory_format=torch.contiguous_format).scatter_(-1, order, sorted_values)


def _decay(distance: Tensor) -> Tensor:
    """exp(-distance) as a square: where exp underflows, it takes a CPU ten times as long, but a square does not."""
    return torch.exp(-(0.5 * distance).clamp(max=_FARTHEST_HALF[distance.dtype])).square()


def _own_slices(values: Tensor, scale: Tensor, cuts: Tensor, offset: Tensor, below: Tensor) -> tuple[Tensor, Tensor]:
    """The slice in which each item lies, and its entry there, (..., n), both in sorted order."""
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
    """dL/dz and dL/dt in float64 from dL/dP; the rows of ``grad`` are ordered as those of P."""
    if values.numel() == 0:
        return torch.zeros_like(values), torch.zeros_like(offset)
    grad = grad.to(torch.promote_types(grad.dtype, torch.float32))
    density = 0.5 * _decay(distances(_place(values, order), scale, cuts, offset).to(grad.dtype).abs())
    flow = (grad[..., :-1] - grad[..., 1:]) * density  # (..., n, n - 1)
    return -flow.sum(-1).double().gather(-1, order), flow.sum(-2).double()
