"""What the launchers of Triton kernels over rows share: how tensors and numbers per row are passed to a program."""

# mypy: disable-error-code="no-untyped-def"

import contextlib
import math
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..exact.rows import FARTHEST
from .target import INTERPRETED, is_cuda

FARTHEST_64 = tl.constexpr(FARTHEST[torch.float64])
LARGEST_64 = tl.constexpr(torch.finfo(torch.float64).max)


LOG2_E = tl.constexpr(math.log2(math.e))


@triton.jit
def reciprocal(x):
    """1 / x; in float32 by one instruction if there is one, to about an ulp."""
    if (x.dtype == tl.float32) and (not INTERPRETED) and is_cuda():
        return tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return 1.0 / x


@triton.jit
def quotient(x, y):
    """x / y by :func:`reciprocal`."""
    return x * reciprocal(y)


@triton.jit
def fast_log2(x):
    """log2(x); in float32 by one instruction if there is one, to 2^-22: absolute near 1, relative elsewhere."""
    if (x.dtype == tl.float32) and (not INTERPRETED) and is_cuda():
        return tl.inline_asm_elementwise(
            "lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return tl.log2(x)


@triton.jit
def rough_log(x):
    """log(x) by :func:`fast_log2`."""
    return fast_log2(x) * (1.0 / LOG2_E)


@triton.jit
def load_tile(x_ptr, start, n, BLOCK: tl.constexpr, DTYPE: tl.constexpr):
    cols = start + tl.arange(0, BLOCK)
    return tl.load(x_ptr + cols, mask=cols < n, other=-float("inf")).to(DTYPE)  # (BLOCK,)


@triton.jit
def split_threshold(t, DTYPE: tl.constexpr):
    """A float64 t as high + low in DTYPE."""
    high = t.to(DTYPE)
    return high, (t - high.to(tl.float64)).to(DTYPE)


@triton.jit
def store_tile(y_ptr, y, start, n, BLOCK: tl.constexpr):
    cols = start + tl.arange(0, BLOCK)
    tl.store(y_ptr + cols, y.to(y_ptr.dtype.element_ty), mask=cols < n)


def rows_of(x: Tensor) -> Tensor:
    """x as (rows, n) with unit last stride, as a view if possible."""
    rows = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()


def in_shape(x: Tensor, shape: Sequence[int]) -> Tensor:
    """x in this shape, without a call of torch if it has it."""
    return x if x.shape == shape else x.reshape(shape)


def without_expansion(draws: int, *parameters: Tensor) -> tuple[int, tuple[Tensor, ...]]:
    """The number of draws and the parameters, where leading axes along which all are expanded become further draws."""
    while parameters[-1].dim() > 0 and all(p.stride(0) == 0 for p in parameters):
        draws, parameters = draws * parameters[0].shape[0], tuple(p[0] for p in parameters)
    return draws, parameters


def on_device(x: Tensor) -> contextlib.AbstractContextManager[object]:
    """A context for launches: Triton launches on the current device, not on the tensor's."""
    return torch.cuda.device_of(x) if x.is_cuda else contextlib.nullcontext()


def arithmetic(x: Tensor) -> tuple[torch.dtype, tl.dtype]:
    return (torch.float64, tl.float64) if x.dtype == torch.float64 else (torch.float32, tl.float32)


@triton.jit
def add2(a0, a1, b0, b1):
    return a0 + b0, a1 + b1


@triton.jit
def add3(a0, a1, a2, b0, b1, b2):
    return a0 + b0, a1 + b1, a2 + b2


@triton.jit
def add4(a0, a1, a2, a3, b0, b1, b2, b3):
    return a0 + b0, a1 + b1, a2 + b2, a3 + b3
