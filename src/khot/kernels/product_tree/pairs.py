r"""Convolution of pairs, and its adjoint: the two operations of the product tree.

``merge`` convolves the two children of a node, :math:`m_c = \sum_i x_{i,0}\, x_{c-i,1}`; ``split`` gives each child the
correlation of g with its sibling, :math:`s_{i,0} = \sum_j g_{i+j}\, x_{j,1}` and likewise for the other, which is the
gradient of :math:`\langle g, m \rangle` in x. Their derivatives are made of the two operations again, so that autograd,
forward mode and vmap go to any order.

Layout: counts first, ``x (width, 2, ...)`` and ``m, g (length, ...)``, of which the entries c = start, start + 1, ...
of the full convolution are kept. Short convolutions run directly over the contiguous trailing axes: sums of products
without cancellation, so that non-negative x keep the relative accuracy of every entry. Long ones, on
accelerators with Triton only the longest, go through the FFT, with errors of a few 1e-16 of the largest entry. Saved
for backward: the arguments.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from ..autograd import with_forward_mode
from ..registry import operator, triton_runs
from ..tiles import TRITON_WIDTH

DIRECT_WIDTH = 33  # widest child convolved directly; from there the FFT is faster


def _fft_length(width: int, start: int, length: int) -> int:
    """A size with small factors, so long that cyclic wrap-around spoils only entries that are not kept."""
    minimum = max(start + length, 2 * width - 1 - start)
    return min(odd << max(0, math.ceil(math.log2(minimum / odd))) for odd in (1, 3, 5, 9, 15))


def _compact(x: Tensor) -> Tensor:
    """A contiguous copy, never a view that keeps a larger buffer alive."""
    return x.clone(memory_format=torch.contiguous_format)


def _has_kernel(x: Tensor) -> bool:
    return x.dtype == torch.float64 and x.shape[0] <= TRITON_WIDTH and triton_runs(x)


@operator("pair_merge")
def _merge(x: Tensor, start: int, length: int) -> Tensor:
    width = x.shape[0]
    if _has_kernel(x):
        from .triton_pairs import launch_merge

        return launch_merge(x, start, length)
    if width <= DIRECT_WIDTH:
        out = x.new_zeros(length, *x.shape[2:])
        for i in range(width):
            low, high = max(0, start - i), min(width, start + length - i)
            if low < high:
                out[i + low - start : i + high - start].addcmul_(x[low:high, 1], x[i, 0])
        return out
    size = _fft_length(width, start, length)
    spectrum = torch.fft.rfft(x, size, dim=0)
    return _compact(torch.fft.irfft(spectrum[:, 0] * spectrum[:, 1], size, dim=0)[start : start + length])


@operator("pair_split")
def _split(g: Tensor, x: Tensor, start: int) -> Tensor:
    width, length = x.shape[0], g.shape[0]
    if _has_kernel(x):
        from .triton_pairs import launch_split

        return launch_split(g, x, start)
    sibling = x.flip(1)
    if width <= DIRECT_WIDTH:
        out = torch.zeros_like(x)
        for j in range(width):
            low, high = max(0, start - j), min(width, start + length - j)
            if low < high:
                out[low:high].addcmul_(g[low + j - start : high + j - start].unsqueeze(1), sibling[j])
        return out
    size = _fft_length(width, start, length)
    spectrum = torch.fft.rfft(F.pad(g.movedim(0, -1), (start, 0)).movedim(-1, 0), size, dim=0)
    product = spectrum.unsqueeze(1) * torch.fft.rfft(sibling, size, dim=0).conj()
    return _compact(torch.fft.irfft(product, size, dim=0)[:width])


@_merge.register_fake
def _(x: Tensor, start: int, length: int) -> Tensor:
    return x.new_empty(length, *x.shape[2:])


@_split.register_fake
def _(g: Tensor, x: Tensor, start: int) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


class _Merge(Function):
    @staticmethod
    def forward(x: Tensor, start: int, length: int) -> Tensor:
        return _merge(x, start, length)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, ctx.start, ctx.length = inputs
        ctx.save_for_backward(x)
        ctx.save_for_forward(x)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None, None]:
        (x,) = ctx.saved_tensors
        return split(grad_output, x, ctx.start), None, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], x: Tensor, start: int, length: int) -> tuple[Tensor, int]:
        out = merge(x.movedim(in_dims[0], -1), start, length)
        return out, out.ndim - 1


class _Split(Function):
    @staticmethod
    def forward(g: Tensor, x: Tensor, start: int) -> Tensor:
        return _split(g, x, start)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        g, x, ctx.start = inputs
        ctx.save_for_backward(g, x)
        ctx.save_for_forward(g, x)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        g, x = ctx.saved_tensors
        grad_g = merge_polar(grad_output, x, ctx.start, g.shape[0]) if ctx.needs_input_grad[0] else None
        grad_x = split(g, grad_output, ctx.start) if ctx.needs_input_grad[1] else None
        return grad_g, grad_x, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], g: Tensor, x: Tensor, start: int) -> tuple[Tensor, int]:
        def batch_last(tensor: Tensor, dim: int | None) -> Tensor:
            if dim is None:
                return tensor.unsqueeze(-1).expand(*tensor.shape, info.batch_size)
            return tensor.movedim(dim, -1)

        out = split(batch_last(g, in_dims[0]), batch_last(x, in_dims[1]), start)
        return out, out.ndim - 1


def _merge_jvp(ctx: Any, saved: list[Tensor], dx: Tensor, *_: None) -> Tensor:
    return merge_polar(dx, saved[0], ctx.start, ctx.length)


def _split_jvp(ctx: Any, saved: list[Tensor], dg: Tensor, dx: Tensor, _: None) -> Tensor:
    g, x = saved
    return split(dg, x, ctx.start) + split(g, dx, ctx.start)


_apply_merge = with_forward_mode(_Merge, _merge_jvp)
_apply_split = with_forward_mode(_Split, _split_jvp)


def merge(x: Tensor, start: int, length: int) -> Tensor:
    """Convolves ``x[:, 0]`` with ``x[:, 1]`` along dim 0, ``(width, 2, ...)`` to ``(length, ...)``."""
    return _apply_merge(x, start, length)


def split(g: Tensor, x: Tensor, start: int) -> Tensor:
    """Gives each child the correlation of ``g`` with its sibling, ``(length, ...)`` to ``(width, 2, ...)``."""
    return _apply_split(g, x, start)


def merge_polar(u: Tensor, x: Tensor, start: int, length: int) -> Tensor:
    """The symmetric bilinear form ``u_0 * x_1 + x_0 * u_1``; :func:`merge` is half of it at ``u = x``."""
    first, second = torch.stack((u[:, 0], x[:, 1]), 1), torch.stack((x[:, 0], u[:, 1]), 1)
    return merge(first, start, length) + merge(second, start, length)
