"""Rows of scores: the dtype they are computed in, their range, their distances from a threshold in scales.

A threshold is t = anchor + offset * scale in two float64 numbers, the anchor a number of the computing dtype: then
x - anchor is exact for the items near t, and z = (x - anchor) / scale - offset accurate relative to itself.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from khot._distributed.shards import Shards

SAMPLE_SIZE = 1024  # rows of more than four times this many items start from the root of a sample of about this size
BLOCK = 2**14  # items that are taken in float64 at a time
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
    half = 0.5 * x - (0.5 * at.anchor).to(x.dtype).unsqueeze(-1)  # x - t may overflow, and differences of halves do not
    # A quotient, of whose derivatives none squares the scale, which underflows or overflows where the result does not.
    return half / (0.5 * scale).to(x.dtype).unsqueeze(-1) - at.offset.to(x.dtype).unsqueeze(-1)


def distances_of(x: Tensor, at: Threshold, scale: Tensor) -> Tensor:
    """:func:`distances`, not differentiable, in one fresh buffer: on a CPU these cost more than the arithmetic."""
    z = torch.add((-0.5 * at.anchor).to(x.dtype).unsqueeze(-1), x, alpha=0.5)
    return z.mul_((2 / scale).to(x.dtype).unsqueeze(-1)).sub_(at.offset.to(x.dtype).unsqueeze(-1))


def double_distances(x: Tensor, at: Threshold, scale: Tensor) -> Iterator[Iterator[Tensor]]:
    """:func:`distances_of` rows of x (rows, n) in float64, for blocks of rows the parts of each.

    Blocks keep small what is made of them, which counts on a CPU.
    """
    n, size = x.shape[-1], x.numel() if x.is_cuda or torch.compiler.is_compiling() else BLOCK
    for items, *numbers in zip(*(v.split(max(1, size // n)) for v in (x, *at, scale)), strict=True):
        anchor, offset, s = numbers
        yield (distances_of(part.double(), Threshold(anchor, offset), s) for part in items.split(min(n, size), -1))


def fill_distances(out: Tensor, x: Tensor, t: Tensor, inverse: Tensor, twice: Tensor) -> Tensor:
    """(x - t) / scale in a buffer, from 1 / scale and :func:`twice_inverse`, rounded as by :func:`distances_of`."""
    high = t.to(x.dtype)
    torch.add(high.mul(-0.5).unsqueeze(-1), x, alpha=0.5, out=out).mul_(twice)
    if x.dtype != t.dtype:
        farthest = FARTHEST[x.dtype]
        out.sub_(((t - high) * inverse).clamp(-farthest, farthest).to(x.dtype).unsqueeze(-1))
    return out


def twice_inverse(scale: Tensor, dtype: torch.dtype) -> Tensor:
    """2 / scale as a column, for halves of differences."""
    return (2 / scale).to(dtype).unsqueeze(-1)


def in_rows_of(x: Tensor, value: Tensor | float) -> Tensor:
    """A float64 tensor of the batch shape; a number is filled in on the device, which need not wait for a copy."""
    if isinstance(value, Tensor):
        return value.to(x.device, torch.float64).expand(x.shape[:-1])
    return torch.full((), value, dtype=torch.float64, device=x.device).expand(x.shape[:-1])


def with_an_item(x: Tensor, masked: float) -> Tensor:
    """x (..., n), with one item, a masked one, where there are none: nothing takes the maximum of nothing."""
    return x if x.shape[-1] else pad(x, (0, 1), value=masked)


class Span(NamedTuple):
    """Of each row: smallest and largest finite entry, number of finite and of +inf entries, whether there is a NaN.

    And mean and variance of the finite entries, where they come with what else is asked of other processes.
    """

    lowest: Tensor
    highest: Tensor
    finite: Tensor
    selected: Tensor
    nan: Tensor
    moments: tuple[Tensor, Tensor] | None = None


class Ends(NamedTuple):
    """Of the items of each row that are here: what :class:`Span` of the whole rows is made of.

    Smallest and largest finite entry, infinite where there is none, and whether there is a NaN; then numbers of finite
    and of +inf entries, the sum of the finite ones and that of their squares.
    """

    lowest: Tensor
    highest: Tensor
    nan: Tensor
    finite: Tensor
    selected: Tensor
    total: Tensor
    squares: Tensor

    @classmethod
    def of(cls, x: Tensor) -> "Ends":
        lowest, highest = x.amin(-1), x.amax(-1)
        nan, finite, kept = highest.isnan(), torch.full_like(highest, x.shape[-1]), x
        selected = torch.zeros_like(finite)
        if x.is_cuda or not bool((highest - lowest).isfinite().all()):  # which is of this process alone: nobody waits
            regular = x.isfinite()
            lowest, highest = torch.where(regular, x, torch.inf).amin(-1), torch.where(regular, x, -torch.inf).amax(-1)
            finite, selected = regular.sum(-1), (x == torch.inf).sum(-1)
            kept = torch.where(regular, x, 0)
        squares = torch.linalg.vector_norm(kept, dim=-1).double().square()
        return cls(lowest, highest, nan, finite, selected, kept.sum(-1), squares)


def row_range(x: Tensor, shards: Shards | None = None, ends: Ends | None = None) -> Span:
    """The :class:`Span` of each row of x (rows, n), of which other processes may hold further parts."""
    if shards is not None:
        return _range_of_parts(Ends.of(x) if ends is None else ends, shards)
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


def _range_of_parts(here: Ends, shards: Shards) -> Span:
    """By two collectives, one of maxima and one of sums."""
    lowest, highest, nan = shards.max(-here.lowest, here.highest, here.nan)
    count, selected, total, squares = shards.sum(here.finite, here.selected, here.total, here.squares)
    centre = total / count.clamp(min=1)
    variance = (squares / count.clamp(min=1) - centre.square()).clamp(min=0)
    none = count == 0
    ends = (-lowest).masked_fill(none, 0), highest.masked_fill(none, 0)
    return Span(*ends, count, selected, nan > 0, (centre, variance))
