"""What this process finds of its parts of rows between two reductions, each in one loop on a CPU."""

import torch
from torch import Tensor

from .. import threshold
from ..links.base import TailSums
from ..links.clipped_power import ClippedPower
from ..numba_pieces import PIECE, addresses, flat, new_sums, over_pieces, real_of, rows_of
from ..rows import Ends, Threshold, compute_dtype
from .local_loops import LocalLoops, Look
from .numba_loops import variant_of
from .numba_shard_loops import ShardLoops, shard_loops
from .search import far_dtype
from .torch_backend import ORDINARY

OF_MASKS = threshold.shard_loops.named("numba")


def _all_ordinary(*numbers: Tensor) -> bool:
    return all(bool(((v > 1 / ORDINARY) & (v < ORDINARY)).all()) for v in numbers)


# ---- Magnitudes


def _loops(x: Tensor, link: ClippedPower) -> ShardLoops:
    return shard_loops(variant_of(link.q), real_of(x))


def _look(a: Tensor, link: ClippedPower) -> Look | None:
    found = new_sums(a, 5)
    over_pieces(_loops(a, link).look, a, float(link.q), found.data_ptr())
    nonzero, smallest, largest, mean, variance = found.unbind(-1)
    if not bool(variance.isfinite().all()):  # an infinity or a NaN, or squares that overflow
        return None
    pieces = mean.shape[-1]
    items = torch.full_like(mean, PIECE)
    items[:, -1] = a.shape[-1] - (pieces - 1) * PIECE
    lowest = torch.where(nonzero < items, 0.0, smallest)
    totals = (v.sum(-1) for v in (items, torch.zeros_like(items), items * mean, items * (variance + mean.square())))
    ends = Ends(lowest.amin(-1), largest.amax(-1), torch.zeros_like(mean[:, 0]), *totals)
    return Look(ends, nonzero.sum(-1), smallest.amin(-1))


def _sums(a: Tensor, t: Tensor, strength: Tensor, link: ClippedPower) -> TailSums:
    found, numbers = new_sums(a, 3), flat(t, strength)
    over_pieces(_loops(a, link).sums, a, *addresses(*numbers), float(link.q), found.data_ptr())
    above, total, slope = found.sum(1).unbind(-1)
    return TailSums(above, total, total, slope)


def _values(x: Tensor, strength: Tensor, at: Threshold, link: ClippedPower) -> Tensor:
    entries, numbers = rows_of(x), flat(*at, strength)
    y = torch.empty_like(entries)
    over_pieces(_loops(x, link).values, entries, *addresses(*numbers), float(link.q), y.data_ptr())
    return y.reshape(x.shape).to(x.dtype)


def _slopes(x: Tensor, strength: Tensor, at: Threshold, grad: Tensor, link: ClippedPower) -> list[Tensor]:
    entries, cotangents, numbers = rows_of(x), rows_of(grad.to(compute_dtype(x))), flat(*at, strength)
    found = new_sums(entries, 2)
    loop = _loops(x, link).slopes
    over_pieces(loop, entries, *addresses(*numbers), float(link.q), cotangents.data_ptr(), found.data_ptr())
    return [v.reshape(strength.shape) for v in found.sum(1).unbind(-1)]


def _gradient(
    x: Tensor, strength: Tensor, at: Threshold, grad: Tensor, mean: Tensor, sums: list[Tensor], link: ClippedPower
) -> tuple[Tensor, Tensor]:
    entries, cotangents, numbers = rows_of(x), rows_of(grad.to(compute_dtype(x))), flat(*at, strength)
    (mean,), grad_x, found = flat(mean), torch.empty_like(entries), new_sums(entries, 1)
    results = addresses(cotangents, mean, grad_x, found)
    over_pieces(_loops(x, link).gradient, entries, *addresses(*numbers), float(link.q), *results)
    return grad_x.reshape(x.shape).to(x.dtype), found.sum((1, 2)).reshape(strength.shape)


MAGNITUDES = LocalLoops(_all_ordinary, _look, _sums, _values, _slopes, _gradient)


# ---- The signed mask: what masks of abs(x) have; an idle threshold, at 0, does not follow


def _takes_strength(strength: Tensor, numbers: Tensor) -> bool:
    return OF_MASKS.take(strength) and far_dtype(numbers.float(), strength) == torch.float32


def _signed_look(a: Tensor, link: ClippedPower) -> Look | None:
    ends = OF_MASKS.ends(a)
    return None if ends is None else Look(ends, ends.finite, ends.lowest)


def _magnitudes_and_signs(x: Tensor) -> tuple[Tensor, Tensor]:
    wide = x.detach().to(compute_dtype(x))
    return wide.abs(), wide.sign()


def _signed_values(x: Tensor, strength: Tensor, at: Threshold, link: ClippedPower) -> Tensor:
    a, sign = _magnitudes_and_signs(x)
    return OF_MASKS.values(a, strength, at, link, False).mul_(sign).to(x.dtype)


def _signed_slopes(x: Tensor, strength: Tensor, at: Threshold, grad: Tensor, link: ClippedPower) -> list[Tensor]:
    a, sign = _magnitudes_and_signs(x)
    weight, *others = OF_MASKS.slopes(a, strength, at, grad.to(a.dtype) * sign, link, False)
    return [weight * ((at.anchor != 0) | (at.offset != 0)), *others]


def _signed_gradient(
    x: Tensor, strength: Tensor, at: Threshold, grad: Tensor, mean: Tensor, sums: list[Tensor], link: ClippedPower
) -> tuple[Tensor, Tensor]:
    a, sign = _magnitudes_and_signs(x)
    grad_x = OF_MASKS.gradient(a, strength, at, grad.to(a.dtype) * sign, mean, link, False)
    _, _, first, lever = sums
    return grad_x.mul_(sign).to(x.dtype), -(lever - mean * first) / strength


SIGNED = LocalLoops(_takes_strength, _signed_look, OF_MASKS.sums, _signed_values, _signed_slopes, _signed_gradient)
