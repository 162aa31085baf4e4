"""What the kernels of the order maps share: how they read a sorted row (..., n) and how they are launched.

Layout: values, positions and results (rows, n), contiguous; values are sorted, ``order`` has their original positions.
"""

# mypy: disable-error-code="no-untyped-def"

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..gpu.plans import Table, plan
from ..gpu.tools import RowNumbers, rows_of
from .triton_scans import compose, decays, load_three

ROWS: Table = {torch.float64: ((128, 1), (512, 8), (1024, 16))}
FAR = tl.constexpr(1600.0)  # as in khot.kernels.order.torch_sums


@triton.jit
def items(values_ptr, scale, cols, n):
    """Half of each item, so that differences do not overflow; the gap to its left; its decays from both sides.

    A distance in scales is such a difference divided by half the scale; for neighbours it is exact anywhere.
    """
    here, left, right = load_three(values_ptr, cols, n)
    here, left, right, inverse = 0.5 * here, 0.5 * left, 0.5 * right, 1.0 / (0.5 * scale)
    to_left, to_right = (here - left) * inverse, (right - here) * inverse
    from_left, from_right = decays(to_left, to_right, cols, n)
    return here, to_left, from_left, from_right


@triton.jit
def counted_items(values_ptr, scale, cols, n):
    """Like :func:`items`, with the sums over the left and the right of each item instead of the decays."""
    here, to_left, from_left, from_right = items(values_ptr, scale, cols, n)
    _, before = tl.associative_scan((from_left, from_left), 0, compose)
    _, after = tl.associative_scan((from_right, tl.where(cols < n, from_right, 0.0)), 0, compose, reverse=True)
    return here, to_left, before, after


@triton.jit
def coordinates(to_left, cols, n):
    """z of the items in one coordinate with 0 in the middle, for derivatives with respect to the scale.

    The widest gaps, which nothing crosses, are left out: the derivatives do not depend on them.
    """
    steps = tl.where((cols > 0) & (cols < n) & (to_left < FAR), to_left, 0.0)
    return tl.cumsum(steps, 0) - 0.5 * tl.sum(steps, 0)


def contiguous_rows(*tensors: Tensor) -> list[Tensor]:
    """Each tensor as (rows, n)."""
    return [rows_of(v).contiguous() for v in tensors]


def scan_options(rows: Tensor, scale: RowNumbers, table: Table = ROWS) -> dict[str, Any]:
    """The options with which all kernels are compiled."""
    how = plan(len(rows), rows.shape[1], torch.float64, table)
    return {"SCALE_TENSOR": scale.tensor is not None, "BLOCK": how.block, "num_warps": how.warps}


def row_results(rows: Tensor) -> Tensor:
    """An empty tensor for one float64 number per row."""
    return torch.empty(len(rows), dtype=torch.float64, device=rows.device)
