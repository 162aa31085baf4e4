"""Rows of scores: the dtype of their computation, their range, and their distances from a threshold in scales.

A threshold t = anchor + offset * scale is stored as two float64 numbers; the anchor is a number of the computing dtype.
So x - anchor is exact for items near t, and z = (x - anchor) / scale - offset has full relative accuracy.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from .reductions import WHOLE, Whole

FARTHEST = {torch.float32: 1e37, torch.float64: 1e306}  # in scales, as good as infinite


def compute_dtype(x: Tensor) -> torch.dtype:
    """float64 for float64 and float32 for every other floating dtype."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


class Threshold(NamedTuple):
    """t = anchor + offset * scale, both float64 of the batch shape, the anchor a number of the computing dtype."""

    anchor: Tensor
    offset: Tensor


def distances(x: Tensor, at: Threshold, scale: Tensor) -> Tensor:
    """z = (x - t) / scale in x's dtype, (..., n); differentiable to any order in x, the scale and the offset."""
    half = 0.5 * x - (0.5 * at.anchor).to(x.dtype).unsqueeze(-1)  # x - t may overflow, but differences of halves do not
    # As a quotient: no derivative then squares the scale, which would underflow or overflow where the result does not.
    return half / (0.5 * scale).to(x.dtype).unsqueeze(-1) - at.offset.to(x.dtype).unsqueeze(-1)


def in_rows_of(x: Tensor, value: Tensor | float, on_host: bool = False) -> Tensor:
    """A number for each row of x (..., n), float64; one ``on_host`` for all rows stays there, which saves a launch."""
    batch = x.shape[:-1]
    if isinstance(value, Tensor):
        return value.to(x.device, torch.float64).expand(batch)
    if on_host:
        return torch.full((), value, dtype=torch.float64, device="cpu").expand(batch)
    return x.new_full(batch, value, dtype=torch.float64)  # in graphs a DTensor, if x is one


def number_on(device: torch.device, value: Tensor | float) -> Tensor:
    """A tensor on the device; a number is written there instead of copied, so that CUDA graphs can record it."""
    return value.to(device) if isinstance(value, Tensor) else torch.full((), value, device=device)


def numbers_of_rows(x: Tensor, values: Tensor) -> Tensor:
    """The result of :func:`in_rows_of` with a number for each row on x's device, also if it is ``on_host``."""
    if values.device == x.device or not values.numel():
        return values.to(x.device)
    return x.new_full(values.shape, values.flatten()[0].item(), dtype=values.dtype)


def with_an_item(x: Tensor, masked: float) -> Tensor:
    """x (..., n), with one masked item if it has none, since an empty maximum is not allowed."""
    return x if x.shape[-1] else pad(x, (0, 1), value=masked)


class Span(NamedTuple):
    """For each row: smallest and largest finite entry, number of finite and of +inf entries, whether there is a NaN.

    Also mean and variance of the finite entries, if they come with other numbers from other processes anyway.
    """

    lowest: Tensor
    highest: Tensor
    finite: Tensor
    selected: Tensor
    nan: Tensor
    moments: tuple[Tensor, Tensor] | None = None


def row_range(x: Tensor, over: Whole = WHOLE) -> Span:
    """The :class:`Span` of each row of x (rows, n), including items that other processes hold."""
    if not over.is_whole:
        return _range_of_parts(x, over)
    lowest, highest = x.amin(-1).double(), x.amax(-1).double()
    nan = highest.isnan()
    n = torch.full_like(highest, x.shape[-1])
    if not x.is_cuda and bool((highest - lowest).isfinite().all()):
        return Span(lowest, highest, n, torch.zeros_like(n), nan)
    finite, selected = x.isfinite(), (x == torch.inf).sum(-1)
    lowest = torch.where(finite, x, torch.inf).amin(-1).double()
    highest = torch.where(finite, x, -torch.inf).amax(-1).double()
    count = finite.sum(-1)
    return Span(
        lowest.masked_fill(count == 0, 0), highest.masked_fill(count == 0, 0), count.double(), selected.double(), nan
    )


def _range_of_parts(x: Tensor, over: Whole) -> Span:
    """The span from two collectives, one of maxima and one of sums."""
    finite, nan = x.isfinite(), x.isnan().any(-1)
    lowest, highest = torch.where(finite, x, torch.inf).amin(-1), torch.where(finite, x, -torch.inf).amax(-1)
    kept = torch.where(finite, x, 0.0)
    lowest, highest, nan = over.max(-lowest, highest, nan)
    numbers = finite.sum(-1), (x == torch.inf).sum(-1), kept.sum(-1), kept.square().sum(-1)
    count, selected, total, squares = over.sum(*numbers)
    centre = total / count.clamp(min=1)
    variance = (squares / count.clamp(min=1) - centre.square()).clamp(min=0)
    none = count == 0
    ends = (-lowest).masked_fill(none, 0), highest.masked_fill(none, 0)
    return Span(*ends, count, selected, nan > 0, (centre, variance))
