r"""The lowest levels of the product tree as one operation, for which accelerators have a fused kernel.

The n units are split into trees of ``2**levels`` neighbours; the last tree has the rest. The root of a tree is the law
of its count, up to ``bound``; if a single tree holds all units, only the entry k is kept. The roots F are multilinear
in the leaves x. With cotangents g of the roots and tangents u of the leaves, three operations are closed under
derivatives:

* ``roots``: F;
* ``outsides``: :math:`O = J_F(x)^T g`, the derivative of :math:`\langle g, F \rangle` with respect to the leaves;
* ``bends``: the tangents of both along u, :math:`J_F(x) u` and :math:`\partial_u O`, which are the derivatives of
  :math:`\langle u, O \rangle` with respect to g and x.

The arguments are saved for the backward pass, in which the kernel computes the levels again. Derivatives of ``bends``,
which are of the third order, are those of the definition.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from khot._torch_internals import for_transforms

from ..operators.autograd import SavingFunction, move_batch_last, with_forward_mode
from . import FOREST_LEVELS, forest_bends, forest_outsides, forest_roots, roots_shape
from .reference_tree import forest_bends as bends_reference


def forest_levels(leaf: Tensor, widest: int) -> int:
    """The number of levels over the leaves ``(2, n, R)`` to compute here: all, or in a long row up to ``widest``.

    A single tree has exactly as many levels as it needs; the kernel relies on that.
    """
    n = leaf.shape[1]
    if n < 2 or leaf.dtype != torch.float64 or not forest_roots.is_fused(leaf):
        return 0
    whole = (n - 1).bit_length()
    return whole if whole <= FOREST_LEVELS else min(widest, FOREST_LEVELS)


def tree_sums(x: Tensor, levels: int) -> Tensor:
    """Sums over the units of each tree, ``(n, R)`` to ``(trees, R)``."""
    return torch.unflatten(F.pad(x.T, (0, -len(x) % 2**levels)), 1, (-1, 2**levels)).sum(2).T


class _OfRows(SavingFunction):
    """A Function of tensors ``(..., R)``, whose rows take in the batch of a vmap."""

    @classmethod
    def vmap(cls, info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> Any:
        tensors = [x for x in arguments if isinstance(x, Tensor)]
        rows = (x.flatten(-2) for x in move_batch_last(info.batch_size, in_dims, tensors))
        out = cls.apply(*rows, *arguments[len(tensors) :])
        if isinstance(out, Tensor):
            return torch.unflatten(out, -1, (-1, info.batch_size)), out.ndim
        found = [x if x.ndim == 1 else torch.unflatten(x, -1, (-1, info.batch_size)) for x in out]  # roots may be empty
        return tuple(found), tuple(None if x.ndim == 1 else x.ndim - 1 for x in found)


class _Roots(_OfRows):
    @staticmethod
    def forward(leaf: Tensor, k: Tensor, bound: int, levels: int) -> Tensor:
        result: Tensor = forest_roots(leaf, k, bound, levels)
        return result

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None, None, None]:
        leaf, k = ctx.saved_tensors
        return outsides(leaf, grad_output, k, *ctx.plan), None, None, None


class _Outsides(_OfRows):
    @staticmethod
    def forward(leaf: Tensor, g: Tensor, k: Tensor, bound: int, levels: int) -> Tensor:
        result: Tensor = forest_outsides(leaf, g, k, bound, levels)
        return result

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        leaf, g, k = ctx.saved_tensors
        (bound, levels), wanted = ctx.plan, ctx.needs_input_grad[1]
        grad_g, grad_leaf = bends(leaf, grad_output, g, k, bound, levels, wanted)
        return grad_leaf, grad_g if wanted else None, None, None, None


class _Bends(_OfRows):
    @staticmethod
    def forward(
        leaf: Tensor, u: Tensor, g: Tensor, k: Tensor, bound: int, levels: int, with_roots: bool
    ) -> tuple[Tensor, Tensor]:
        root, outside = forest_bends(leaf, u, g, k, bound, levels, with_roots)
        return root, outside

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        *inputs, k = ctx.saved_tensors
        return *_transposed(ctx.plan, k, inputs)(*grads), None, None, None, None


def _transposed(plan: list[Any], k: Tensor, inputs: list[Tensor]) -> Callable[..., tuple[Tensor, ...]]:
    """The derivative of :func:`bends`, transposed."""

    def transposed(*grads: Tensor) -> tuple[Tensor, ...]:
        with for_transforms():
            return torch.func.vjp(lambda leaf, u, g: bends_reference(leaf, u, g, k, *plan), *inputs)[1](grads)

    return transposed


def _roots_jvp(ctx: Any, saved: list[Tensor], u: Tensor, *_: None) -> Tensor:
    leaf, k = saved
    return bends(leaf, u, leaf.new_zeros(roots_shape(leaf, *ctx.plan)), k, *ctx.plan)[0]


def _outsides_jvp(ctx: Any, saved: list[Tensor], u: Tensor, dg: Tensor, *_: None) -> Tensor:
    (leaf, g, k), (bound, levels) = saved, ctx.plan
    return outsides(leaf, dg, k, bound, levels) + bends(leaf, u, g, k, bound, levels, False)[1]


def _bends_jvp(ctx: Any, saved: list[Tensor], *tangents: Any) -> tuple[Tensor, Tensor]:
    *inputs, k = saved
    leaf, (*plan, with_roots) = inputs[0], ctx.plan
    zeros = leaf.new_zeros(roots_shape(leaf, *plan) if with_roots else 0), torch.zeros_like(leaf)
    # The transposed map is linear, so its derivative is transposed again: torch.func.jvp does not nest in other modes.
    with for_transforms():
        return torch.func.vjp(_transposed(ctx.plan, k, inputs), *zeros)[1](tangents[:3])


_apply_roots = with_forward_mode(_Roots, _roots_jvp)
_apply_outsides = with_forward_mode(_Outsides, _outsides_jvp)
_apply_bends = with_forward_mode(_Bends, _bends_jvp)


def roots(leaf: Tensor, k: Tensor, bound: int, levels: int) -> Tensor:
    """The roots ``(counts, trees, R)``, or ``(1, 1, R)`` of a single tree, of leaves ``(2, n, R)`` and k ``(R,)``."""
    return _apply_roots(leaf, k, bound, levels)


def outsides(leaf: Tensor, g: Tensor, k: Tensor, bound: int, levels: int) -> Tensor:
    """The derivative of ``(g * roots).sum()`` with respect to the leaves ``(2, n, R)``."""
    return _apply_outsides(leaf, g, k, bound, levels)


def bends(
    leaf: Tensor, u: Tensor, g: Tensor, k: Tensor, bound: int, levels: int, with_roots: bool = True
) -> tuple[Tensor, Tensor]:
    """The derivatives along ``u`` of the roots, empty if they are not wanted, and of :func:`outsides` at fixed g."""
    return _apply_bends(leaf, u, g, k, bound, levels, with_roots)
