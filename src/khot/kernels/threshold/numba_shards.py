"""What this process finds of its parts of rows between two reductions, each in one loop on a CPU."""

import torch
from torch import Tensor

from ..links.base import Link, TailSums
from ..numba_pieces import addresses, flat, new_sums, over_pieces, real_of, rows_of
from ..rows import Ends, Threshold, compute_dtype
from .local_loops import LocalLoops
from .numba_loops import NARROWEST, WIDEST
from .numba_shard_loops import shard_loops, spans


def _is_ordinary(scale: Tensor) -> bool:
    return bool(((scale > NARROWEST) & (scale < WIDEST)).all())


def _ends(x: Tensor) -> Ends | None:
    found = new_sums(x, 6)
    over_pieces(spans(real_of(x)), x, found.data_ptr())
    selected, finite, low, high, mean, variance = found.unbind(-1)
    if not bool(variance.isfinite().all()):  # a NaN, or squares that overflow
        return None
    squares = finite * (variance + mean.square())
    totals = (v.sum(-1) for v in (finite, selected, finite * mean, squares))
    return Ends(low.amin(-1), high.amax(-1), torch.zeros_like(low[:, 0]), *totals)


def _sums(x: Tensor, t: Tensor, scale: Tensor, link: Link) -> TailSums:
    found = new_sums(x, 4)
    numbers = flat(t, scale)
    over_pieces(shard_loops(link, real_of(x), False).sums, x, *addresses(*numbers), float(link.q), found.data_ptr())
    return TailSums(*found.sum(1).unbind(-1))


def _values(x: Tensor, scale: Tensor, at: Threshold, link: Link, log: bool) -> Tensor:
    items, numbers = rows_of(x), flat(*at, scale)
    y = torch.empty_like(items)
    over_pieces(shard_loops(link, real_of(x), log).values, items, *addresses(*numbers), float(link.q), y.data_ptr())
    return y.reshape(x.shape).to(x.dtype)


def _slopes(x: Tensor, scale: Tensor, at: Threshold, grad: Tensor, link: Link, log: bool) -> list[Tensor]:
    items, cotangents, numbers = rows_of(x), rows_of(grad.to(compute_dtype(x))), flat(*at, scale)
    found = new_sums(items, 4)
    loop = shard_loops(link, real_of(x), log).slopes
    over_pieces(loop, items, *addresses(*numbers), float(link.q), cotangents.data_ptr(), found.data_ptr())
    return [v.reshape(scale.shape) for v in found.sum(1).unbind(-1)]


def _gradient(x: Tensor, scale: Tensor, at: Threshold, grad: Tensor, mean: Tensor, link: Link, log: bool) -> Tensor:
    items, cotangents, numbers = rows_of(x), rows_of(grad.to(compute_dtype(x))), flat(*at, scale)
    (mean,), grad_x = flat(mean), torch.empty_like(items)
    loop = shard_loops(link, real_of(x), log).gradient
    over_pieces(loop, items, *addresses(*numbers), float(link.q), *addresses(cotangents, mean, grad_x))
    return grad_x.reshape(x.shape).to(x.dtype)


LOOPS = LocalLoops(_is_ordinary, _ends, _sums, _values, _slopes, _gradient)
