"""The sparse maps by absolute value as loops over rows on a CPU, for ordinary rows.

The others go to the torch backend together; so does what is to become an error.
"""

import numpy as np
import torch
from torch import Tensor

from ..links.base import Link, link_numbers
from ..links.clipped_power import ClippedPower
from ..numba_tools import over_rows
from ..rows import compute_dtype, row_range
from . import torch_backend
from .numba_loops import Loops, loops_of


def threshold(x: Tensor, k: Tensor, strength: Tensor, link: str, magnitude: bool, check: bool) -> tuple[Tensor, Tensor]:
    _, anchor, offset = _solve(x, k, strength, link, magnitude, check, False)
    return anchor, offset


def odd_map(
    x: Tensor, k: Tensor, strength: Tensor, link: str, magnitude: bool, check: bool
) -> tuple[Tensor, Tensor, Tensor]:
    return _solve(x, k, strength, link, magnitude, check, True)


def _solve(
    x: Tensor, k: Tensor, strength: Tensor, link: str, magnitude: bool, check: bool, with_map: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """y, empty if it is not wanted, and the threshold."""
    batch, n = x.shape[:-1], x.shape[-1]
    items, k, strength = _rows(x), _flat(k), _flat(strength)
    rows, found = items.shape[0], _link(link)
    y = torch.empty_like(items) if with_map else items.new_empty((rows, 0))  # at no address
    anchor, offset = k.new_empty(rows), k.new_empty(rows)
    left = k.new_empty(rows, dtype=torch.bool)
    addresses = (v.data_ptr() for v in (items, k, strength, y, anchor, offset, left))
    if over_rows(_loops(items, found, magnitude).odd_map, rows, rows * n, n, *addresses, *link_numbers(found)):
        if check:  # of all rows, whose numbers the errors tell
            torch_backend.check_rows(items, k, strength, row_range(items.abs()))
        some = items[left], k[left], strength[left], link, magnitude, False
        if with_map:
            y[left], anchor[left], offset[left] = torch_backend.odd_map(*some)
        else:
            anchor[left], offset[left] = torch_backend.threshold(*some)
    return y.reshape(batch + y.shape[-1:]).to(x.dtype), anchor.reshape(batch), offset.reshape(batch)


def odd_map_derivative(
    x: Tensor,
    strength: Tensor,
    anchor: Tensor,
    offset: Tensor,
    grad: Tensor,
    link: str,
    magnitude: bool,
    with_strength: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    batch, n, found = x.shape[:-1], x.shape[-1], _link(link)
    items, cotangents = _rows(x), _rows(grad.to(compute_dtype(x)))
    strength, anchor, offset = _flat(strength), _flat(anchor), _flat(offset)
    rows, grad_x, grad_k = items.shape[0], torch.empty_like(items), torch.empty_like(strength)
    grad_strength = torch.empty_like(strength) if with_strength else torch.zeros_like(strength)
    left = strength.new_empty(rows, dtype=torch.bool)
    inputs = (v.data_ptr() for v in (items, strength, anchor, offset, cotangents))
    results = grad_x.data_ptr(), grad_k.data_ptr(), grad_strength.data_ptr() if with_strength else 0, left.data_ptr()
    loop = _loops(items, found, magnitude).derivative
    if over_rows(loop, rows, rows * n, n, *inputs, *results, float(found.q)):
        some = items[left], strength[left], anchor[left], offset[left], cotangents[left]
        of_some = torch_backend.odd_map_derivative(*some, link, magnitude, with_strength)
        grad_x[left], grad_k[left], grad_strength[left] = of_some
    return grad_x.reshape(x.shape).to(x.dtype), grad_k.reshape(batch), grad_strength.reshape(batch)


def _link(key: str) -> ClippedPower:
    found = Link.find(key)
    assert isinstance(found, ClippedPower)
    return found


def _loops(x: Tensor, link: ClippedPower, magnitude: bool) -> Loops:
    return loops_of(link, np.float64 if x.dtype == torch.float64 else np.float32, magnitude)


def _rows(x: Tensor) -> Tensor:
    """As contiguous rows of the computing dtype."""
    return x.detach().to(compute_dtype(x)).reshape(-1, x.shape[-1]).contiguous()


def _flat(value: Tensor) -> Tensor:
    return value.detach().reshape(-1).contiguous()
