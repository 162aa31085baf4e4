"""The sparse maps by absolute value on a CPU: the signed mask by the loops of masks, the magnitudes by their own.

Rows with numbers that are not of ordinary size, or that a few Newton steps do not solve, go to the torch backend
together; so does what is to become an error.
"""

import math

import numpy as np
import torch
from torch import Tensor

from .. import threshold as masks
from ..links.base import Link
from ..numba_tools import over_rows
from ..rows import Threshold, compute_dtype
from . import torch_backend
from .numba_loops import Loops, loops_of, variant_of
from .search import far_dtype


def threshold(x: Tensor, k: Tensor, strength: Tensor, link: str, magnitude: bool, check: bool) -> tuple[Tensor, Tensor]:
    if not magnitude:
        return torch_backend.threshold(x, k, strength, link, magnitude, check)
    return _magnitudes(x, k, strength, link, False, check)[1:]


def odd_map(
    x: Tensor, k: Tensor, strength: Tensor, link: str, magnitude: bool, check: bool
) -> tuple[Tensor, Tensor, Tensor]:
    return (_magnitudes if magnitude else _signed_mask)(x, k, strength, link, True, check)


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
    derivative = _magnitude_derivative if magnitude else _signed_derivative
    return derivative(x, strength, Threshold(anchor, offset), grad, link, with_strength)


# ---- Magnitudes


def _magnitudes(
    x: Tensor, k: Tensor, strength: Tensor, link: str, with_values: bool, check: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """y, empty without values, and the thresholds."""
    batch, n, items = x.shape[:-1], x.shape[-1], _rows(x)
    rows = len(items)
    sizes, strengths = _flat(k), _flat(strength)
    y = torch.empty_like(items) if with_values else items.new_empty((rows, 0))  # at no address
    at = Threshold(torch.empty_like(sizes), torch.empty_like(sizes))
    left, loops = sizes.new_empty(rows, dtype=torch.bool), _loops(link, items)
    addresses = (v.data_ptr() for v in (items, sizes, strengths, y, *at, left))
    if over_rows(loops.odd_map, rows, rows * n, n, *addresses, float(Link.find(link).q)):
        if with_values and left.all():  # without copies of everything
            del y, items
            return torch_backend.odd_map(x, k, strength, link, True, check)
        if check:  # of all rows, whose numbers the errors tell
            torch_backend.check_rows(items, sizes, strengths)
        some = items[left], sizes[left], strengths[left], link, True, False
        if with_values:
            y[left], at.anchor[left], at.offset[left] = torch_backend.odd_map(*some)
        else:
            at.anchor[left], at.offset[left] = torch_backend.threshold(*some)
    return y.reshape(batch + y.shape[-1:]).to(x.dtype), at.anchor.reshape(batch), at.offset.reshape(batch)


def _magnitude_derivative(
    x: Tensor, strength: Tensor, at: Threshold, grad: Tensor, link: str, with_strength: bool
) -> tuple[Tensor, Tensor, Tensor]:
    batch, n, items = x.shape[:-1], x.shape[-1], _rows(x)
    rows = len(items)
    strengths, anchors, offsets, cotangents = _flat(strength), _flat(at.anchor), _flat(at.offset), _rows(grad, items)
    grad_x, grad_k, grad_strength = torch.empty_like(items), torch.empty_like(strengths), torch.zeros_like(strengths)
    left, loops = strengths.new_empty(rows, dtype=torch.bool), _loops(link, items)
    before = (v.data_ptr() for v in (items, strengths, anchors, offsets, cotangents))
    after = grad_x.data_ptr(), grad_k.data_ptr(), grad_strength.data_ptr() if with_strength else 0, left.data_ptr()
    if over_rows(loops.derivative, rows, rows * n, n, *before, *after, float(Link.find(link).q)):
        if left.all():  # without copies of everything
            del grad_x, items, cotangents
            return torch_backend.odd_map_derivative(x, strength, *at, grad, link, True, with_strength)
        some = items[left], strengths[left], anchors[left], offsets[left], cotangents[left]
        found = torch_backend.odd_map_derivative(*some, link, True, with_strength)
        grad_x[left], grad_k[left], grad_strength[left] = found
    return grad_x.reshape(x.shape).to(x.dtype), grad_k.reshape(batch), grad_strength.reshape(batch)


def _loops(link: str, items: Tensor) -> Loops:
    return loops_of(variant_of(Link.find(link).q), np.float64 if items.dtype == torch.float64 else np.float32)


def _rows(x: Tensor, like: Tensor | None = None) -> Tensor:
    """As contiguous rows of the computing dtype, of x itself or of another tensor."""
    return x.detach().to(compute_dtype(x if like is None else like)).reshape(-1, x.shape[-1]).contiguous()


def _flat(value: Tensor) -> Tensor:
    return value.detach().reshape(-1).contiguous()


# ---- The signed mask: the mask of abs(x) where its threshold is above 0, else the link itself


def _signed_mask(
    x: Tensor, k: Tensor, strength: Tensor, link: str, with_values: bool, check: bool
) -> tuple[Tensor, Tensor, Tensor]:
    a = x.detach().to(compute_dtype(x)).abs()
    if far_dtype(x, strength) != a.dtype or not math.isfinite(a.sum()):  # or so large that they seem to be infinite
        return torch_backend.odd_map(x, k, strength, link, False, check)
    y, anchor, offset = masks.mask(a, k, strength, link, False, "strength", check)
    idle = anchor + offset * strength <= 0
    if bool(idle.any()):
        anchor[idle] = offset[idle] = 0.0
        found = Link.find(link)
        y[idle] = found.value(_free_distances(a.double() if found.is_steep else a, strength, idle)[0]).to(y.dtype)
    return (y * x.sign()).to(x.dtype), anchor, offset


def _free_distances(x: Tensor, strength: Tensor, idle: Tensor) -> tuple[Tensor, Tensor]:
    """z of rows whose threshold is at 0, and their strengths as a column."""
    column = strength[idle].to(x.dtype).unsqueeze(-1)
    return x[idle].abs() / column, column


def _signed_derivative(
    x: Tensor, strength: Tensor, at: Threshold, grad: Tensor, link: str, with_strength: bool
) -> tuple[Tensor, Tensor, Tensor]:
    if far_dtype(x, strength) != compute_dtype(x):
        return torch_backend.odd_map_derivative(x, strength, *at, grad, link, False, with_strength)
    wide = x.detach().to(compute_dtype(x))
    sign, cotangents = wide.sign(), grad.to(wide.dtype)
    found = masks.mask_derivative(wide.abs(), strength, *at, cotangents * sign, link, False, with_strength)
    grad_x, grad_k, grad_strength = found
    grad_x = grad_x * sign
    idle = (at.anchor == 0) & (at.offset == 0)
    if bool(idle.any()):
        z, column = _free_distances(wide, strength, idle)
        slopes = Link.find(link).slope(z) * cotangents[idle] / column
        grad_x[idle], grad_k[idle] = slopes, 0.0
        if with_strength:
            grad_strength[idle] = -(slopes * sign[idle] * z.clamp(max=1)).sum(-1).double()
    return grad_x.to(x.dtype), grad_k, grad_strength
