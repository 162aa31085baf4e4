"""Masks, their logarithms, signed masks and magnitudes, thresholds and derivatives, as loops over rows on a CPU.

Rows that a loop leaves, see :mod:`.numba_loops`, go to the exact path together.
"""

import numpy as np
import torch
from torch import Tensor

from ..cpu.loops import over_rows
from ..exact.rows import Threshold, compute_dtype, row_range
from ..links.base import Link, link_numbers
from . import exact
from .contents import check_contents
from .kinds import KINDS, Kind, Plain, Solved
from .numba_loops import Loops, loops_of


def threshold(
    x: Tensor, k: Tensor, scale: Tensor, link: int, q: float, kind: str, softness: str, check: bool
) -> tuple[Tensor, Tensor]:
    _, anchor, offset = _solve(x, k, scale, link, q, kind, softness, check, False)
    return anchor, offset


def mask(
    x: Tensor, k: Tensor, scale: Tensor, link: int, q: float, kind: str, softness: str, check: bool
) -> tuple[Tensor, Tensor, Tensor]:
    return _solve(x, k, scale, link, q, kind, softness, check, True)


def _solve(
    x: Tensor, k: Tensor, scale: Tensor, link: int, q: float, kind: str, softness: str, check: bool, with_values: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """y, empty without values, and the threshold."""
    batch, found, items = x.shape[:-1], Link.find(link, q), _rows(x)
    rows, n = items.shape
    k, scale = _flat(k), _flat(scale)
    y = torch.empty_like(items) if with_values else items.new_empty((rows, 0))  # empty: address 0 writes no values
    at, left = Threshold(k.new_empty(rows), k.new_empty(rows)), k.new_empty(rows, dtype=torch.bool)
    inputs = _scores(items, KINDS[kind]), (k.data_ptr(), 0.0), (scale.data_ptr(), 0.0)
    results = y.data_ptr(), (at.anchor.data_ptr(), at.offset.data_ptr()), left.data_ptr()
    if over_rows(_loops(found, items, kind).mask, rows, rows * n, n, *inputs, *results, link_numbers(found)):
        if check:  # for all rows, because errors contain row numbers
            check_contents(items, k, scale, softness, KINDS[kind], row_range(KINDS[kind].scores(items)))
        some = items[left], k[left], scale[left], link, q, kind, softness, False
        if with_values:
            y[left], at.anchor[left], at.offset[left] = exact.mask(*some)
        else:
            at.anchor[left], at.offset[left] = exact.threshold(*some)
    return y.reshape(batch + y.shape[-1:]).to(x.dtype), at.anchor.reshape(batch), at.offset.reshape(batch)


def mask_derivative(
    x: Tensor,
    scale: Tensor,
    anchor: Tensor,
    offset: Tensor,
    grad: Tensor,
    link: int,
    q: float,
    kind: str,
    with_scale: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    batch, found, items, cotangents = x.shape[:-1], Link.find(link, q), _rows(x), _rows(grad.to(compute_dtype(x)))
    rows, n = items.shape
    scale, at = _flat(scale), Threshold(_flat(anchor), _flat(offset))
    grad_x, grad_k, left = torch.empty_like(items), torch.empty_like(scale), scale.new_empty(rows, dtype=torch.bool)
    grad_scale = torch.empty_like(scale) if with_scale else torch.zeros_like(scale)
    place = (scale.data_ptr(), 0.0), (at.anchor.data_ptr(), at.offset.data_ptr())
    results = grad_x.data_ptr(), grad_k.data_ptr(), grad_scale.data_ptr() if with_scale else 0
    arguments = _scores(items, KINDS[kind]), *place, cotangents.data_ptr(), results, left.data_ptr(), float(found.q)
    if over_rows(_loops(found, items, kind).derivative, rows, rows * n, n, *arguments):
        some = items[left], scale[left], at.anchor[left], at.offset[left], cotangents[left]
        grad_x[left], grad_k[left], grad_scale[left] = exact.mask_derivative(*some, link, q, kind, with_scale)
    return grad_x.reshape(x.shape).to(x.dtype), grad_k.reshape(batch), grad_scale.reshape(batch)


def threshold_derivative(
    x: Tensor, scale: Tensor, anchor: Tensor, offset: Tensor, grad: Tensor, link: int, q: float, kind: str
) -> tuple[Tensor, Tensor, Tensor]:
    batch, found, items = x.shape[:-1], Link.find(link, q), _rows(x)
    rows, n = items.shape
    given = tuple(_flat(v) for v in (scale, anchor, offset, grad))
    grad_x, grad_k, grad_scale = (torch.empty_like(v) for v in (items, given[0], given[0]))
    left = given[0].new_empty(rows, dtype=torch.bool)
    at_scale, at_anchor, at_offset, at_grad = (v.data_ptr() for v in given)
    results = grad_x.data_ptr(), grad_k.data_ptr(), grad_scale.data_ptr()
    arguments = items.data_ptr(), at_scale, (at_anchor, at_offset), at_grad, results, left.data_ptr(), float(found.q)
    if over_rows(_loops(found, items, kind).threshold, rows, rows * n, n, *arguments):
        s, a, c, g = (v[left] for v in given)
        grad_x[left], grad_k[left], grad_scale[left] = exact.threshold_derivative(
            items[left], s, a, c, g, link, q, kind
        )
    return grad_x.reshape(x.shape).to(x.dtype), grad_k.reshape(batch), grad_scale.reshape(batch)


def _loops(link: Link, x: Tensor, kind: str) -> Loops:
    return loops_of(link, kind, np.float64 if x.dtype == torch.float64 else np.float32)


def _scores(x: Tensor, kind: Kind) -> tuple[int, bool]:
    return x.data_ptr(), kind.absolute


def _rows(x: Tensor) -> Tensor:
    """x as contiguous rows of the computing dtype."""
    return x.detach().to(compute_dtype(x)).reshape(-1, x.shape[-1]).contiguous()


def _flat(value: Tensor) -> Tensor:
    return value.detach().reshape(-1).contiguous()


def _plain_mask(x: Tensor, k: float, scale: float, link: Link, kind: Kind) -> Solved | None:
    items, n = _items(x), x.shape[-1]
    count = items.numel()
    rows = count // n
    y, (anchor, offset) = torch.empty_like(items), x.new_empty((2, rows), dtype=torch.float64)
    left = x.new_empty(rows, dtype=torch.bool)
    results = y.data_ptr(), (anchor.data_ptr(), offset.data_ptr()), left.data_ptr()
    loop = _loops(link, items, kind.name).mask
    if over_rows(loop, rows, count, n, _scores(items, kind), (0, k), (0, scale), *results, link_numbers(link)):
        return None
    return y, anchor, offset


def _plain_gradient(
    x: Tensor, scale: float, anchor: Tensor, offset: Tensor, grad: Tensor, link: Link, kind: Kind
) -> Tensor | None:
    items, n = _items(x), x.shape[-1]
    count, g = items.numel(), grad.to(items.dtype).contiguous()
    rows = count // n
    grad_x, left = torch.empty_like(items), x.new_empty(rows, dtype=torch.bool)
    inputs = _scores(items, kind), (0, scale), (anchor.data_ptr(), offset.data_ptr()), g.data_ptr()
    results = (grad_x.data_ptr(), 0, 0), left.data_ptr()
    loop = _loops(link, items, kind.name).derivative
    return None if over_rows(loop, rows, count, n, *inputs, *results, float(link.q)) else grad_x


def _items(x: Tensor) -> Tensor:
    """The scores as contiguous numbers of the computing dtype."""
    dtype = compute_dtype(x)
    return x if x.dtype == dtype and x.is_contiguous() else x.detach().to(dtype).contiguous()


PLAIN = Plain(_plain_mask, _plain_gradient)
