"""The mask, its threshold and its derivative as loops over rows on a CPU, for ordinary rows.

Those with numbers near the limits of their dtype, whose tails underflow, or that a few Newton steps do not solve go to
the torch backend together; so does what is to become an error.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..contents import check_contents
from ..links.base import Link, link_numbers
from ..numba_tools import over_rows
from ..rows import Threshold, compute_dtype, row_range
from . import exact, numba_odd
from .kinds import KINDS, Kind
from .numba_loops import Loops, loops_of

ORDINARY = 2.0**40  # strengths up to which, and down to the inverse of which, float32 does


def threshold(
    x: Tensor, k: Tensor, scale: Tensor, link: str, kind: str, softness: str, check: bool
) -> tuple[Tensor, Tensor]:
    if KINDS[kind].absolute:
        return numba_odd.threshold(x, k, scale, link, KINDS[kind].grows, check)
    _, anchor, offset = _solve(x, k, scale, link, kind, softness, check, False)
    return anchor, offset


def mask(
    x: Tensor, k: Tensor, scale: Tensor, link: str, kind: str, softness: str, check: bool
) -> tuple[Tensor, Tensor, Tensor]:
    if kind == "magnitude":
        return numba_odd.magnitudes(x, k, scale, link, True, check)
    if kind == "signed":
        return _signed_mask(x, k, scale, link, check)
    return _solve(x, k, scale, link, kind, softness, check, True)


def _solve(
    x: Tensor, k: Tensor, scale: Tensor, link: str, kind: str, softness: str, check: bool, with_values: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """y or log y, empty if it is not wanted, and the threshold."""
    batch, n = x.shape[:-1], x.shape[-1]
    found, items = Link.find(link), _rows(x)
    rows = items.shape[0]
    k, scale = _flat(k), _flat(scale)
    y = torch.empty_like(items) if with_values else items.new_empty((rows, 0))  # empty: address 0 writes no values
    at = Threshold(k.new_empty(rows), k.new_empty(rows))
    left = k.new_empty(rows, dtype=torch.bool)
    results = (v.data_ptr() for v in (y, *at, left))
    arguments = items.data_ptr(), k.data_ptr(), 0.0, scale.data_ptr(), 0.0, *results, *link_numbers(found)
    if over_rows(_loops(found, items, KINDS[kind].log).mask, rows, rows * n, n, *arguments):
        if check:  # of all rows, whose numbers the errors tell
            check_contents(items, k, scale, softness, row_range(items))
        some = items[left], k[left], scale[left], link, kind, softness, False
        if with_values:
            y[left], at.anchor[left], at.offset[left] = exact.mask(*some)
        else:
            at.anchor[left], at.offset[left] = exact.threshold(*some)
    return y.reshape(batch + y.shape[-1:]).to(x.dtype), at.anchor.reshape(batch), at.offset.reshape(batch)


def mask_derivative(
    x: Tensor, scale: Tensor, anchor: Tensor, offset: Tensor, grad: Tensor, link: str, kind: str, with_scale: bool
) -> tuple[Tensor, Tensor, Tensor]:
    if kind == "magnitude":
        return numba_odd.magnitude_derivative(x, scale, Threshold(anchor, offset), grad, link, with_scale)
    if kind == "signed":
        return _signed_derivative(x, scale, Threshold(anchor, offset), grad, link, with_scale)
    batch, n = x.shape[:-1], x.shape[-1]
    found = Link.find(link)
    items, cotangents = _rows(x), _rows(grad.to(compute_dtype(x)))
    rows = items.shape[0]
    scale, at = _flat(scale), Threshold(_flat(anchor), _flat(offset))
    grad_x, grad_k = torch.empty_like(items), torch.empty_like(scale)
    grad_scale = torch.empty_like(scale) if with_scale else torch.zeros_like(scale)
    left = scale.new_empty(rows, dtype=torch.bool)
    inputs = (v.data_ptr() for v in (*at, cotangents))
    results = grad_x.data_ptr(), grad_k.data_ptr(), grad_scale.data_ptr() if with_scale else 0, left.data_ptr()
    arguments = items.data_ptr(), scale.data_ptr(), 0.0, *inputs, *results, float(found.q)
    if over_rows(_loops(found, items, KINDS[kind].log).derivative, rows, rows * n, n, *arguments):
        some = items[left], scale[left], at.anchor[left], at.offset[left], cotangents[left]
        grad_x[left], grad_k[left], grad_scale[left] = exact.mask_derivative(*some, link, kind, with_scale)
    return grad_x.reshape(x.shape).to(x.dtype), grad_k.reshape(batch), grad_scale.reshape(batch)


def _loops(link: Link, x: Tensor, log: bool) -> Loops:
    return loops_of(link, np.float64 if x.dtype == torch.float64 else np.float32, log)


def _rows(x: Tensor) -> Tensor:
    """As contiguous rows of the computing dtype."""
    return x.detach().to(compute_dtype(x)).reshape(-1, x.shape[-1]).contiguous()


def _flat(value: Tensor) -> Tensor:
    return value.detach().reshape(-1).contiguous()


class Plain(NamedTuple):
    """The map of contiguous scores in a computing dtype, k and scale being numbers, at the least fixed cost.

    Attributes:
        mask: ``(x, k, scale, link, kind)``: y or log y, anchors and offsets; None if not all rows are ordinary.
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
    loop = _loops(link, x, kind.log).mask
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
    loop = _loops(link, x, kind.log).derivative
    return None if over_rows(loop, rows, items, n, x.data_ptr(), 0, scale, *inputs, *results, float(link.q)) else grad_x


PLAIN = Plain(_plain_mask, _plain_gradient)


# ---- The signed mask: the mask of abs(x) where its threshold is above 0, else the link itself


def _signed_mask(x: Tensor, k: Tensor, strength: Tensor, link: str, check: bool) -> tuple[Tensor, Tensor, Tensor]:
    a = x.detach().to(compute_dtype(x)).abs()
    if not (_are_ordinary(strength) and math.isfinite(a.sum())):  # or so large that they seem to be infinite
        return exact.mask(x, k, strength, link, "signed", "strength", check)
    y, anchor, offset = _solve(a, k, strength, link, "mask", "strength", check, True)
    idle = anchor + offset * strength <= 0
    if bool(idle.any()):
        anchor[idle] = offset[idle] = 0.0
        found = Link.find(link)
        y[idle] = found.value(_free_distances(a.double() if found.is_steep else a, strength, idle)[0]).to(y.dtype)
    return (y * x.sign()).to(x.dtype), anchor, offset


def _are_ordinary(strength: Tensor) -> bool:
    return bool(((strength > 1 / ORDINARY) & (strength < ORDINARY)).all())


def _free_distances(x: Tensor, strength: Tensor, idle: Tensor) -> tuple[Tensor, Tensor]:
    """z of rows whose threshold is at 0, and their strengths as a column."""
    column = strength[idle].to(x.dtype).unsqueeze(-1)
    return x[idle].abs() / column, column


def _signed_derivative(
    x: Tensor, strength: Tensor, at: Threshold, grad: Tensor, link: str, with_strength: bool
) -> tuple[Tensor, Tensor, Tensor]:
    if not _are_ordinary(strength):
        return exact.mask_derivative(x, strength, *at, grad, link, "signed", with_strength)
    wide = x.detach().to(compute_dtype(x))
    sign, cotangents = wide.sign(), grad.to(wide.dtype)
    found = mask_derivative(wide.abs(), strength, *at, cotangents * sign, link, "mask", with_strength)
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
