"""The sparse maps by absolute value on a CPU: the signed mask by the loops of masks, the magnitudes by their own.

Rows with numbers that are not of ordinary size, or that a few Newton steps do not solve, go to the torch backend
together; so does what is to become an error.
"""

import numpy as np
import torch
from torch import Tensor

from ..links.base import Link
from ..numba_tools import over_rows
from ..rows import Threshold, compute_dtype
from . import exact
from .numba_magnitude_loops import Loops, loops_of, variant_of


def threshold(x: Tensor, k: Tensor, strength: Tensor, link: str, magnitude: bool, check: bool) -> tuple[Tensor, Tensor]:
    if not magnitude:
        return exact.threshold(x, k, strength, link, "signed", "strength", check)
    return magnitudes(x, k, strength, link, False, check)[1:]


# ---- Magnitudes


def magnitudes(
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
        if check:  # of all rows, whose numbers the errors tell
            exact.threshold(items, sizes, strengths, link, "magnitude", "strength", True)
        some = items[left], sizes[left], strengths[left], link, "magnitude", "strength", False
        if with_values:
            y[left], at.anchor[left], at.offset[left] = exact.mask(*some)
        else:
            at.anchor[left], at.offset[left] = exact.threshold(*some)
    return y.reshape(batch + y.shape[-1:]).to(x.dtype), at.anchor.reshape(batch), at.offset.reshape(batch)


def magnitude_derivative(
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
        some = items[left], strengths[left], anchors[left], offsets[left], cotangents[left]
        found = exact.mask_derivative(*some, link, "magnitude", with_strength)
        grad_x[left], grad_k[left], grad_strength[left] = found
    return grad_x.reshape(x.shape).to(x.dtype), grad_k.reshape(batch), grad_strength.reshape(batch)


def _loops(link: str, items: Tensor) -> Loops:
    return loops_of(variant_of(Link.find(link).q), np.float64 if items.dtype == torch.float64 else np.float32)


def _rows(x: Tensor, like: Tensor | None = None) -> Tensor:
    """As contiguous rows of the computing dtype, of x itself or of another tensor."""
    return x.detach().to(compute_dtype(x if like is None else like)).reshape(-1, x.shape[-1]).contiguous()


def _flat(value: Tensor) -> Tensor:
    return value.detach().reshape(-1).contiguous()
