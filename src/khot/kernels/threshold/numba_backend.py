"""Masks, their logarithms, signed masks and magnitudes, thresholds and derivatives, as loops over rows on a CPU.

Rows that a loop leaves, see :mod:`.numba_loops`, go to the exact path together.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..cpu.loops import over_rows
from ..exact.rows import Threshold, compute_dtype, row_range
from ..links.base import Link, link_numbers
from . import exact
from .kinds import KINDS, Kind
from .numba_loops import Loops, loops_of


def threshold(
    x: Tensor, k: Tensor, scale: Tensor, link: str, kind: str, softness: str, check: bool
) -> tuple[Tensor, Tensor]:
    _, anchor, offset = _solve(x, k, scale, link, kind, softness, check, False)
    return anchor, offset


def mask(
    x: Tensor, k: Tensor, scale: Tensor, link: str, kind: str, softness: str, check: bool
) -> tuple[Tensor, Tensor, Tensor]:
    return _solve(x, k, scale, link, kind, softness, check, True)


def _solve(
    x: Tensor, k: Tensor, scale: Tensor, link: str, kind: str, softness: str, check: bool, with_values: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """y, empty without values, and the threshold."""
    batch, found, items = x.shape[:-1], Link.find(link), _rows(x)
    rows, n = items.shape
    k, scale = _flat(k), _flat(scale)
    y = torch.empty_like(items) if with_values else items.new_empty((rows, 0))  # empty: address 0 writes no values
    at, left = Threshold(k.new_empty(rows), k.new_empty(rows)), k.new_empty(rows, dtype=torch.bool)
    arguments = items.data_ptr(), k.data_ptr(), 0.0, scale.data_ptr(), 0.0, *(v.data_ptr() for v in (y, *at, left))
    if over_rows(_loops(found, items, kind).mask, rows, rows * n, n, *arguments, *link_numbers(found)):
        if check:  # for all rows, because errors contain row numbers
            span = row_range(KINDS[kind].scores(items))
            exact.check_rows(items, k, scale, softness, KINDS[kind], span, None)
        some = items[left], k[left], scale[left], link, kind, softness, False
        if with_values:
            y[left], at.anchor[left], at.offset[left] = exact.mask(*some)
        else:
            at.anchor[left], at.offset[left] = exact.threshold(*some)
    return y.reshape(batch + y.shape[-1:]).to(x.dtype), at.anchor.reshape(batch), at.offset.reshape(batch)


def mask_derivative(
    x: Tensor, scale: Tensor, anchor: Tensor, offset: Tensor, grad: Tensor, link: str, kind: str, with_scale: bool
) -> tuple[Tensor, Tensor, Tensor]:
    batch, found, items, cotangents = x.shape[:-1], Link.find(link), _rows(x), _rows(grad.to(compute_dtype(x)))
    rows, n = items.shape
    scale, at = _flat(scale), Threshold(_flat(anchor), _flat(offset))
    grad_x, grad_k, left = torch.empty_like(items), torch.empty_like(scale), scale.new_empty(rows, dtype=torch.bool)
    grad_scale = torch.empty_like(scale) if with_scale else torch.zeros_like(scale)
    arguments = items.data_ptr(), scale.data_ptr(), 0.0, *(v.data_ptr() for v in (*at, cotangents, grad_x, grad_k))
    results = grad_scale.data_ptr() if with_scale else 0, left.data_ptr()
    if over_rows(_loops(found, items, kind).derivative, rows, rows * n, n, *arguments, *results, float(found.q)):
        some = items[left], scale[left], at.anchor[left], at.offset[left], cotangents[left]
        grad_x[left], grad_k[left], grad_scale[left] = exact.mask_derivative(*some, link, kind, with_scale)
    return grad_x.reshape(x.shape).to(x.dtype), grad_k.reshape(batch), grad_scale.reshape(batch)


def threshold_derivative(
    x: Tensor, scale: Tensor, anchor: Tensor, offset: Tensor, grad: Tensor, link: str, kind: str
) -> tuple[Tensor, Tensor, Tensor]:
    batch, found, items = x.shape[:-1], Link.find(link), _rows(x)
    rows, n = items.shape
    given = tuple(_flat(v) for v in (scale, anchor, offset, grad))
    grad_x, grad_k, grad_scale = (torch.empty_like(v) for v in (items, given[0], given[0]))
    left = given[0].new_empty(rows, dtype=torch.bool)
    addresses = tuple(v.data_ptr() for v in (items, *given, grad_x, grad_k, grad_scale, left))
    if over_rows(_loops(found, items, kind).threshold, rows, rows * n, n, *addresses, float(found.q)):
        s, a, c, g = (v[left] for v in given)
        grad_x[left], grad_k[left], grad_scale[left] = exact.threshold_derivative(items[left], s, a, c, g, link, kind)
    return grad_x.reshape(x.shape).to(x.dtype), grad_k.reshape(batch), grad_scale.reshape(batch)


def _loops(link: Link, x: Tensor, kind: str) -> Loops:
    return loops_of(link, kind, np.float64 if x.dtype == torch.float64 else np.float32)


def _rows(x: Tensor) -> Tensor:
    """x as contiguous rows of the computing dtype."""
    return x.detach().to(compute_dtype(x)).reshape(-1, x.shape[-1]).contiguous()


def _flat(value: Tensor) -> Tensor:
    return value.detach().reshape(-1).contiguous()


class Plain(NamedTuple):
    """The map for contiguous scores in a computing dtype, with numbers k and scale, at the least fixed cost.

    Attributes:
        mask: ``(x, k, scale, link, kind)``: y, anchors and offsets; None unless all rows are ordinary.
        gradient: ``(x, scale, anchor, offset, grad, link, kind)``: dL/dx, or None likewise.
    """

    mask: Callable[[Tensor, float, float, Link, Kind], tuple[Tensor, Tensor, Tensor] | None]
    gradient: Callable[[Tensor, float, Tensor, Tensor, Tensor, Link, Kind], Tensor | None]


def _plain_mask(x: Tensor, k: float, scale: float, link: Link, kind: Kind) -> tuple[Tensor, Tensor, Tensor] | None:
    items, n = x.numel(), x.shape[-1]
    rows = items // n
    y, (anchor, offset) = torch.empty_like(x), x.new_empty((2, rows), dtype=torch.float64)
    left = x.new_empty(rows, dtype=torch.bool)
    results = y.data_ptr(), anchor.data_ptr(), offset.data_ptr(), left.data_ptr()
    loop = _loops(link, x, kind.name).mask
    if over_rows(loop, rows, items, n, x.data_ptr(), 0, k, 0, scale, *results, *link_numbers(link)):
        return None
    return y, anchor, offset


def _plain_gradient(
    x: Tensor, scale: float, anchor: Tensor, offset: Tensor, grad: Tensor, link: Link, kind: Kind
) -> Tensor | None:
    items, n = x.numel(), x.shape[-1]
    rows = items // n
    grad_x, left = torch.empty_like(x), x.new_empty(rows, dtype=torch.bool)
    inputs = anchor.data_ptr(), offset.data_ptr(), grad.data_ptr()
    results = grad_x.data_ptr(), 0, 0, left.data_ptr()
    loop = _loops(link, x, kind.name).derivative
    return None if over_rows(loop, rows, items, n, x.data_ptr(), 0, scale, *inputs, *results, float(link.q)) else grad_x


PLAIN = Plain(_plain_mask, _plain_gradient)
