r"""Convolution of pairs, and its adjoint: the two operations of the product tree.

``merge`` convolves the two children of a node, :math:`m_c = \sum_i x_{i,0}\, x_{c-i,1}`. ``split`` gives each child the
correlation of g with its sibling, :math:`s_{i,0} = \sum_j g_{i+j}\, x_{j,1}` and likewise for the other, which is the
gradient of :math:`\langle g, m \rangle` in x. Their derivatives are made of the same two operations, so autograd,
forward mode and vmap work to any order.

Layout: counts first, ``x (width, 2, ...)`` and ``m, g (length, ...)``, of which the entries c = start, start + 1, ...
of the full convolution are kept. Short convolutions run directly over the contiguous trailing axes. They are sums of
products without cancellation, so for nonnegative x every entry keeps its relative accuracy. Long ones (on accelerators
with Triton, only the longest) use the FFT, with errors of a few 1e-16 of the largest entry. The arguments are saved for
the backward pass.
"""

from typing import Any

import torch
from torch import Tensor

from ..operators.autograd import SavingFunction, move_batch_last, with_forward_mode
from . import pair_merge, pair_split


class _Merge(SavingFunction):
    @staticmethod
    def forward(x: Tensor, start: int, length: int) -> Tensor:
        result: Tensor = pair_merge(x, start, length)
        return result

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None, None]:
        (x,) = ctx.saved_tensors
        return split(grad_output, x, ctx.plan[0]), None, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], x: Tensor, start: int, length: int) -> tuple[Tensor, int]:
        out = merge(x.movedim(in_dims[0], -1), start, length)
        return out, out.ndim - 1


class _Split(SavingFunction):
    @staticmethod
    def forward(g: Tensor, x: Tensor, start: int) -> Tensor:
        result: Tensor = pair_split(g, x, start)
        return result

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        (g, x), (start,) = ctx.saved_tensors, ctx.plan
        grad_g = merge_polar(grad_output, x, start, g.shape[0]) if ctx.needs_input_grad[0] else None
        grad_x = split(g, grad_output, start) if ctx.needs_input_grad[1] else None
        return grad_g, grad_x, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], g: Tensor, x: Tensor, start: int) -> tuple[Tensor, int]:
        g, x = move_batch_last(info.batch_size, in_dims, (g, x))
        out = split(g, x, start)
        return out, out.ndim - 1


def _merge_jvp(ctx: Any, saved: list[Tensor], dx: Tensor, *_: None) -> Tensor:
    return merge_polar(dx, saved[0], *ctx.plan)


def _split_jvp(ctx: Any, saved: list[Tensor], dg: Tensor, dx: Tensor, _: None) -> Tensor:
    (g, x), (start,) = saved, ctx.plan
    return split(dg, x, start) + split(g, dx, start)


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
