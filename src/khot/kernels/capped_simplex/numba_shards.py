"""What this process finds of its parts of rows between two reductions, each in one loop on a CPU."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..links.base import Link, TailSums
from ..numba_math import Real
from ..numba_tools import over_rows
from ..rows import Ends, Threshold, compute_dtype
from .local_loops import LocalLoops
from .numba_loops import NARROWEST, WIDEST, Compiled
from .numba_shard_loops import PIECE, shard_loops, spans


def _is_ordinary(scale: Tensor) -> bool:
    return bool(((scale > NARROWEST) & (scale < WIDEST)).all())


def _real(x: Tensor) -> Real:
    return np.float64 if compute_dtype(x) == torch.float64 else np.float32


def _rows(x: Tensor) -> Tensor:
    """As contiguous rows of the computing dtype."""
    return x.detach().to(compute_dtype(x)).reshape(-1, x.shape[-1]).contiguous()


def _over_pieces(loop: Compiled, x: Tensor, *arguments: Any) -> None:
    rows, n = x.shape
    over_rows(loop, rows * -(-n // PIECE), rows * n, n, x.data_ptr(), *arguments)


def _addresses(*values: Tensor) -> list[int]:
    return [value.data_ptr() for value in values]


def _flat(*values: Tensor) -> list[Tensor]:
    return [value.detach().double().reshape(-1).contiguous() for value in values]


def _new_sums(x: Tensor, numbers: int) -> Tensor:
    rows, n = x.shape
    return x.new_empty((rows, -(-n // PIECE), numbers), dtype=torch.float64)


def _ends(x: Tensor) -> Ends | None:
    found = _new_sums(x, 6)
    _over_pieces(spans(_real(x)), x, found.data_ptr())
    selected, finite, low, high, mean, variance = found.unbind(-1)
    if not bool(variance.isfinite().all()):  # a NaN, or squares that overflow
        return None
    squares = finite * (variance + mean.square())
    totals = (v.sum(-1) for v in (finite, selected, finite * mean, squares))
    return Ends(low.amin(-1), high.amax(-1), torch.zeros_like(low[:, 0]), *totals)


def _sums(x: Tensor, t: Tensor, scale: Tensor, link: Link) -> TailSums:
    found = _new_sums(x, 4)
    numbers = _flat(t, scale)
    _over_pieces(shard_loops(link, _real(x), False).sums, x, *_addresses(*numbers), float(link.q), found.data_ptr())
    return TailSums(*found.sum(1).unbind(-1))


def _values(x: Tensor, scale: Tensor, at: Threshold, link: Link, log: bool) -> Tensor:
    items, numbers = _rows(x), _flat(*at, scale)
    y = torch.empty_like(items)
    _over_pieces(shard_loops(link, _real(x), log).values, items, *_addresses(*numbers), float(link.q), y.data_ptr())
    return y.reshape(x.shape).to(x.dtype)


def _slopes(x: Tensor, scale: Tensor, at: Threshold, grad: Tensor, link: Link, log: bool) -> list[Tensor]:
    items, cotangents, numbers = _rows(x), _rows(grad.to(compute_dtype(x))), _flat(*at, scale)
    found = _new_sums(items, 4)
    loop = shard_loops(link, _real(x), log).slopes
    _over_pieces(loop, items, *_addresses(*numbers), float(link.q), cotangents.data_ptr(), found.data_ptr())
    return [v.reshape(scale.shape) for v in found.sum(1).unbind(-1)]


def _gradient(x: Tensor, scale: Tensor, at: Threshold, grad: Tensor, mean: Tensor, link: Link, log: bool) -> Tensor:
    items, cotangents, numbers = _rows(x), _rows(grad.to(compute_dtype(x))), _flat(*at, scale)
    (mean,), grad_x = _flat(mean), torch.empty_like(items)
    loop = shard_loops(link, _real(x), log).gradient
    _over_pieces(loop, items, *_addresses(*numbers), float(link.q), *_addresses(cotangents, mean, grad_x))
    return grad_x.reshape(x.shape).to(x.dtype)


LOOPS = LocalLoops(_is_ordinary, _ends, _sums, _values, _slopes, _gradient)
