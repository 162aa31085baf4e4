r"""A product tree that is built once, and its results with derivatives, which are computed from the same tree.

For :math:`P = P(\text{total} = k)`, a multilinear function of the leaves x, a tree gives P itself and the *outside* of
the leaves, :math:`O = \nabla P`. Their derivatives are again such results,

.. math:: dP = \langle O, dx \rangle, \qquad dO = \nabla^2 P \, dx,

the second one by a pass upwards and downwards through the same tree (:meth:`KeptTree.bend`). As :math:`\nabla^2 P` is
symmetric, this is also its transpose. So an autograd graph holds only the leaves and the tree, numbers without a
gradient, and a backward pass frees nothing that another result of the tree needs. Derivatives of higher order come from
a new tree, built from the leaves in differentiable operations.
"""

from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from khot._torch_internals import is_transformed

from ..operators.autograd import SavingFunction, with_forward_mode
from .pairs import merge_polar, split
from .tree import ProductTree, Totals, _pad_even, _shift


class KeptTree(ProductTree):
    """A :class:`~khot.kernels.count.tree.ProductTree` that computes the outsides of its nodes once."""

    def __init__(self, leaf: Tensor, k: Tensor, bound: int, totals: Totals | None = None) -> None:
        super().__init__(leaf, k, bound, totals, with_forest=False)

    def anew(self, leaf: Tensor) -> "KeptTree":
        """A new tree of the same kind with results that are differentiable in the leaf."""
        return KeptTree(leaf, self.k, self.bound, self.totals)

    def leaf_outside(self) -> Tensor:
        """The outside of the leaves, as for any tree; must not be written to."""
        return self._of_leaves

    @cached_property
    def _of_leaves(self) -> Tensor:
        return super().leaf_outside()

    @cached_property
    def levels_outside(self) -> list[Tensor]:
        """The outsides of the levels that are made of pairs, from the root downwards; those of the leaves follow."""
        g, levels = self._root_outside(), []
        for x, level in zip(reversed(self.pairs), reversed(self.plan), strict=True):
            levels.append(self._uncentre(g[:, : x.shape[2]], level))
            g = split(levels[-1], x, level.start).flatten(1, 2)
        self._of_leaves = g[:, : self.leaf.shape[1]]
        return levels

    def bend(self, u: Tensor) -> Tensor:
        """The derivative of the outside of the leaves along a change ``u`` of the leaves, both ``(2, n, R)``.

        It only uses operations that torch.autograd can batch over many cotangents, such as ``reshape``.
        """
        bent = []
        for x, level in zip(self.pairs, self.plan, strict=True):
            u = _pad_even(u, 1)
            bent.append(u.reshape(u.shape[0], 2, u.shape[1] // 2, u.shape[2]))
            u = merge_polar(bent[-1], x, level.start, level.length)
            first = self._first(level)
            u = u if level.radius is None or first is None else _shift(u, first, 2 * level.radius + 1)
        v: Tensor | None = None
        downwards = zip(self.levels_outside, reversed(bent), reversed(self.pairs), reversed(self.plan), strict=True)
        for g, y, x, level in downwards:
            change = split(g, y, level.start)
            if v is not None:
                change = change + split(self._uncentre(v.narrow(1, 0, x.shape[2]), level), x, level.start)
            v = change.reshape(change.shape[0], 2 * change.shape[2], change.shape[3])
        return torch.zeros_like(self.leaf) if v is None else v.narrow(1, 0, self.leaf.shape[1])


class _Probability(SavingFunction):
    @staticmethod
    def forward(leaf: Tensor, tree: KeptTree) -> Tensor:
        return tree.probability()

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None]:
        (leaf,), (tree,) = ctx.saved_tensors, ctx.plan
        if not torch.is_grad_enabled():
            return grad_output * tree.leaf_outside(), None
        if is_transformed():
            return grad_output * tree.anew(leaf).leaf_outside(), None
        return grad_output * leaf_outside(leaf, tree), None


class _LeafOutside(SavingFunction):
    @staticmethod
    def forward(leaf: Tensor, tree: KeptTree) -> Tensor:
        _ = tree.levels_outside  # the derivative needs them
        return tree.leaf_outside().clone()  # the result becomes part of a graph

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None]:
        (leaf,), (tree,) = ctx.saved_tensors, ctx.plan
        return (tree.anew(leaf) if torch.is_grad_enabled() else tree).bend(grad_output), None


def _probability_jvp(ctx: Any, saved: list[Tensor], u: Tensor, *_: None) -> Tensor:
    return (ctx.plan[0].anew(saved[0]).leaf_outside() * u).sum((0, 1))


def _leaf_outside_jvp(ctx: Any, saved: list[Tensor], u: Tensor, *_: None) -> Tensor:
    return ctx.plan[0].anew(saved[0]).bend(u)


_apply_probability = with_forward_mode(_Probability, _probability_jvp)
_apply_leaf_outside = with_forward_mode(_LeafOutside, _leaf_outside_jvp)


def probability(leaf: Tensor, tree: ProductTree) -> Tensor:
    """P(total = k), ``(R,)``, differentiable in the leaves, which are those of the tree or equal to them."""
    if leaf is tree.leaf or not isinstance(tree, KeptTree):
        return tree.probability()
    return _apply_probability(leaf, tree)


def leaf_outside(leaf: Tensor, tree: ProductTree) -> Tensor:
    """P(total = k | unit = 0) and P(total = k | unit = 1), ``(2, n, R)``, likewise; must not be written to."""
    if leaf is tree.leaf or not isinstance(tree, KeptTree):
        return tree.leaf_outside()
    return _apply_leaf_outside(leaf, tree)
