"""Masks, their logarithms, signed masks and magnitudes, thresholds and derivatives, as loops over rows on a CPU.

Rows that a loop leaves, see :mod:`.numba_loops`, go to the exact path together.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..cpu.loops import array_of, over_rows
from ..cpu.short_rows import LANES
from ..exact.rows import compute_dtype, row_range
from ..links.base import Link
from . import exact
from .contents import check_contents
from .kinds import KINDS, Kind, Recipe, Solved
from .numba_loops import Loops, loops_of
from .numba_short import SHORT

NOTHING = np.empty(0)


def mask(
    x: Tensor, k: Tensor, scale: Tensor, link: int, q: float, kind: str, softness: str, check: bool, with_values: bool
) -> tuple[Tensor, Tensor, Tensor]:
    batch, found, items = x.shape[:-1], Link.find(link, q), _rows(x)
    rows, n = items.shape
    k, scale = _flat(k), _flat(scale)
    y = torch.empty_like(items) if with_values else items.new_empty((rows, 0))
    anchor, offset, left = k.new_empty(rows), k.new_empty(rows), k.new_ones(rows, dtype=torch.bool)
    inputs = (array_of(items), KINDS[kind].absolute), array_of(k), array_of(scale)
    results = array_of(y), (array_of(anchor), array_of(offset)), array_of(left)
    loops = _loops(found, items, kind)
    arguments = rows, rows * n, n, *inputs, *results, found.numbers
    short = loops.short_mask if n <= SHORT and rows >= LANES else None
    if (short is None or over_rows(short, *arguments)) and over_rows(loops.mask, *arguments):
        if check:  # checks all rows, because errors contain row numbers
            check_contents(items, k, scale, softness, KINDS[kind], row_range(KINDS[kind].scores(items)))
        some = items[left], k[left], scale[left], link, q, kind, softness, False, with_values
        y[left], anchor[left], offset[left] = exact.mask(*some)
    return y.reshape(batch + y.shape[-1:]).to(x.dtype), anchor.reshape(batch), offset.reshape(batch)


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
    batch, found, items, of_offset = x.shape[:-1], Link.find(link, q), _rows(x), grad.dim() < x.dim()
    (rows, n), cotangents = items.shape, _flat(grad) if of_offset else _rows(grad.to(items.dtype))
    scale, anchor, offset = _flat(scale), _flat(anchor), _flat(offset)
    grad_x, grad_k, left = torch.empty_like(items), torch.empty_like(scale), scale.new_ones(rows, dtype=torch.bool)
    grad_scale = torch.empty_like(scale) if with_scale else torch.zeros_like(scale)
    at = array_of(anchor), array_of(offset)
    inputs = (array_of(items), KINDS[kind].absolute), array_of(scale), at, array_of(cotangents)
    results = array_of(grad_x), array_of(grad_k), array_of(grad_scale) if with_scale else NOTHING
    loops = _loops(found, items, kind)
    arguments = rows, rows * n, n, *inputs, results, array_of(left), float(found.q)
    short = loops.short_derivative if n <= SHORT and rows >= LANES and not of_offset else None
    loop = loops.threshold if of_offset else loops.derivative
    if (short is None or over_rows(short, *arguments)) and over_rows(loop, *arguments):
        some = items[left], scale[left], anchor[left], offset[left], cotangents[left]
        grad_x[left], grad_k[left], grad_scale[left] = exact.mask_derivative(*some, link, q, kind, with_scale)
    return grad_x.reshape(x.shape).to(x.dtype), grad_k.reshape(batch), grad_scale.reshape(batch)


def _loops(link: Link, x: Tensor, kind: str) -> Loops:
    return loops_of(link, kind, np.float64 if x.dtype == torch.float64 else np.float32)


def _rows(x: Tensor) -> Tensor:
    """x as contiguous rows of the computing dtype."""
    return x.detach().to(compute_dtype(x)).reshape(-1, x.shape[-1]).contiguous()


def _flat(value: Tensor) -> Tensor:
    return value.detach().reshape(-1).contiguous()


def recipe(link: Link, kind: Kind, dtype: torch.dtype) -> Recipe:
    """The map and its gradient for numbers k and scale, with everything that does not depend on the call at hand.

    Arrays of NumPy are made, and become tensors, in a third of the time that tensors and their arrays take.
    """
    computed, real = (torch.float64, np.float64) if dtype == torch.float64 else (torch.float32, np.float32)
    loops, law, q, absolute = loops_of(link, kind.name, real), link.numbers, float(link.q), kind.absolute

    def mask(x: Tensor, k: float, scale: float) -> Solved | None:
        items = _numbers(x, computed)
        y, n, numbers = np.empty(items.shape, real), items.shape[-1], np.array((k, scale), np.float64)
        rows = items.size // n
        at, left = (np.empty(rows), np.empty(rows)), np.empty(rows, np.bool_)
        left.fill(True)  # a microsecond faster than np.ones
        results = y.ravel(), at, left
        inputs = (items.ravel(), absolute), numbers[:1], numbers[1:]
        arguments = rows, items.size, n, *inputs, *results, law
        short = loops.short_mask if n <= SHORT and rows >= LANES else None
        if (short is None or over_rows(short, *arguments)) and over_rows(loops.mask, *arguments):
            return None
        found = torch.from_numpy(y)
        return (found if computed is dtype else found.to(dtype)), at

    def gradient(x: Tensor, scale: float, at: Any, grad: Tensor) -> Tensor | None:
        items = _numbers(x, computed)
        grad_x, n = np.empty(items.shape, real), items.shape[-1]
        rows = items.size // n
        left = np.empty(rows, np.bool_)
        left.fill(True)
        inputs = (items.ravel(), absolute), np.array((scale,), np.float64), at, _numbers(grad, computed).ravel()
        results = (grad_x.ravel(), NOTHING, NOTHING), left
        arguments = rows, items.size, n, *inputs, *results, q
        short = loops.short_derivative if n <= SHORT and rows >= LANES else None
        if (short is None or over_rows(short, *arguments)) and over_rows(loops.gradient, *arguments):
            return None
        found = torch.from_numpy(grad_x)
        return found if computed is dtype else found.to(dtype)

    return Recipe(mask, gradient)


def _numbers(x: Tensor, dtype: torch.dtype) -> Any:
    """The numbers of a tensor, of this dtype, as a contiguous array."""
    if x.dtype is dtype and x.is_contiguous():
        return array_of(x).reshape(x.shape)
    return x.detach().to(dtype).contiguous().numpy()
