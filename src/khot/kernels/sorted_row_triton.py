"""What the kernels of the order maps share: how they read a sorted row (..., n) and are launched on many.

Layout: values, places and results (rows, n), contiguous; values as sorted, ``order`` the places that they came from.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .dispatch import SCANS, Table, plan
from .lapsum_triton import compose, decays, load_three, to_double
from .launch_triton import RowNumbers, rows_of


@triton.jit
def _centre(values_ptr, n):
    return 0.5 * (to_double(tl.load(values_ptr)) + to_double(tl.load(values_ptr + n - 1)))


@triton.jit
def items(values_ptr, scale, cols, n):
    """z of a row, its decays from the left and from the right, and the centre."""
    centre, inv_scale = _centre(values_ptr, n), tl.minimum(tl.maximum(1.0 / scale, -1e300), 1e300)
    here, left, right = load_three(values_ptr, cols, n)
    z = (here - centre) * inv_scale
    from_left, from_right = decays(z, (left - centre) * inv_scale, (right - centre) * inv_scale, cols, n)
    return z, from_left, from_right, centre


@triton.jit
def counted_items(values_ptr, scale, cols, n):
    """As :func:`items`, with the sums over the left and the right of each item instead of the decays."""
    z, from_left, from_right, centre = items(values_ptr, scale, cols, n)
    _, before = tl.associative_scan((from_left, from_left), 0, compose)
    _, after = tl.associative_scan((from_right, tl.where(cols < n, from_right, 0.0)), 0, compose, reverse=True)
    return z, before, after, centre


def contiguous_rows(*tensors: Tensor) -> list[Tensor]:
    """Each as (rows, n)."""
    return [rows_of(v).contiguous() for v in tensors]


def scan_options(rows: Tensor, scale: RowNumbers, table: Table = SCANS) -> dict[str, Any]:
    """What all kernels are compiled with."""
    how = plan(len(rows), rows.shape[1], torch.float64, table)
    return {"SCALE_TENSOR": scale.tensor is not None, "BLOCK": how.block, "num_warps": how.warps}


def row_results(rows: Tensor) -> Tensor:
    """Room for one float64 number of each row."""
    return torch.empty(len(rows), dtype=torch.float64, device=rows.device)
