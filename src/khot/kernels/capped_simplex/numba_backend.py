"""The mask, its threshold and its derivative as loops over rows on a CPU, for ordinary rows.

Those with numbers near the limits of their dtype, whose tails underflow, or that a few Newton steps do not solve go to
the torch backend together; so does what is to become an error.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..contents import check_contents
from ..links.base import Link, link_numbers
from ..numba_tools import over_rows
from ..rows import Threshold, compute_dtype, row_range
from . import torch_backend
from .numba_loops import Loops, loops_of


def threshold(x: Tensor, k: Tensor, scale: Tensor, link: str, softness: str, check: bool) -> tuple[Tensor, Tensor]:
    _, anchor, offset = _solve(x, k, scale, link, None, softness, check)
    return anchor, offset


def mask(
    x: Tensor, k: Tensor, scale: Tensor, link: str, log: bool, softness: str, check: bool
) -> tuple[Tensor, Tensor, Tensor]:
    return _solve(x, k, scale, link, log, softness, check)


def _solve(
    x: Tensor, k: Tensor, scale: Tensor, link: str, log: bool | None, softness: str, check: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """y or log y, empty if ``log`` is None, and the threshold."""
    batch, n = x.shape[:-1], x.shape[-1]
    found = Link.find(link)
    items = _rows(x)
    rows = items.shape[0]
    k, scale = _flat(k), _flat(scale)
    y = torch.empty_like(items) if log is not None else items.new_empty((rows, 0))
    at = Threshold(k.new_empty(rows), k.new_empty(rows))
    left = np.zeros(rows, np.bool_)
    arguments = (items, k, scale, y, *at)
    loop = _loops(found, items, bool(log)).mask
    over_rows(loop, rows, rows * n, *map(_array, arguments), left, *link_numbers(found))
    if left.any():
        _solve_by_torch(torch.from_numpy(left), items, k, scale, y, at, found, log, softness, check)
    return y.reshape(batch + y.shape[-1:]).to(x.dtype), at.anchor.reshape(batch), at.offset.reshape(batch)


def _solve_by_torch(
    left: Tensor, x: Tensor, k: Tensor, scale: Tensor, y: Tensor, at: Threshold, link: Link, log: bool | None,
    softness: str, check: bool,
) -> None:  # fmt: skip
    """Fills in the rows that are ``left``."""
    if check:  # of all rows, whose numbers the errors tell
        check_contents(x, k, scale, softness, row_range(x))
    some = x[left], k[left], scale[left], link.key
    if log is None:
        at.anchor[left], at.offset[left] = torch_backend.threshold(*some, softness, False)
    else:
        y[left], at.anchor[left], at.offset[left] = torch_backend.mask(*some, log, softness, False)


def mask_derivative(
    x: Tensor, scale: Tensor, anchor: Tensor, offset: Tensor, grad: Tensor, link: str, log: bool, with_scale: bool
) -> tuple[Tensor, Tensor, Tensor]:
    batch, n = x.shape[:-1], x.shape[-1]
    found = Link.find(link)
    items, cotangents = _rows(x), _rows(grad.to(compute_dtype(x)))
    rows = items.shape[0]
    scale, at = _flat(scale), Threshold(_flat(anchor), _flat(offset))
    grad_x, grad_k = torch.empty_like(items), torch.empty_like(scale)
    grad_scale = torch.empty_like(scale) if with_scale else torch.zeros_like(scale)
    left = np.zeros(rows, np.bool_)
    arguments = (items, scale, *at, cotangents, grad_x, grad_k, grad_scale)
    loop = _loops(found, items, log).derivative
    over_rows(loop, rows, rows * n, *map(_array, arguments), left, float(found.q), with_scale)
    if left.any():
        some = torch.from_numpy(left)
        inputs = (items[some], scale[some], at.anchor[some], at.offset[some], cotangents[some])
        grad_x[some], grad_k[some], grad_scale[some] = torch_backend.mask_derivative(*inputs, link, log, with_scale)
    return grad_x.reshape(x.shape).to(x.dtype), grad_k.reshape(batch), grad_scale.reshape(batch)


def _loops(link: Link, x: Tensor, log: bool) -> Loops:
    return loops_of(link, np.float64 if x.dtype == torch.float64 else np.float32, log)


def _rows(x: Tensor) -> Tensor:
    """As contiguous rows of the computing dtype."""
    return x.detach().to(compute_dtype(x)).reshape(-1, x.shape[-1]).contiguous()


def _flat(value: Tensor) -> Tensor:
    return value.detach().reshape(-1).contiguous()


def _array(x: Tensor) -> Any:
    return x.numpy()
