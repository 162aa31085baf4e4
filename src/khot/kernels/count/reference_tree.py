"""The definition of the forest: products of the units' polynomials, unit by unit, and their derivatives."""

import torch
from torch import Tensor


def forest_roots(leaf: Tensor, k: Tensor, bound: int, levels: int) -> Tensor:
    """The laws of the counts of trees of ``2**levels`` units, see :mod:`khot.kernels.count.forest`.

    Args:
        leaf: Weights of 0 and 1 of each unit ``(2, n, R)``, float64.
        k: The entry ``(R,)`` that is kept of a single tree.
        bound: Largest count.
        levels: Number of levels of a tree.
    """
    n, rows, units = leaf.shape[1], leaf.shape[2], 2**levels
    laws = []
    for first in range(0, n, units):
        law = leaf.new_zeros(min(units, bound) + 1, rows)
        law[0] = 1
        for out, chosen in leaf[:, first : first + units].unbind(1):
            law = torch.cat([law[:1] * out, law[1:] * out + law[:-1] * chosen])
        laws.append(law)
    roots = torch.stack(laws, 1)
    return roots.gather(0, k.expand(1, 1, -1)) if n <= units else roots


def forest_outsides(leaf: Tensor, g: Tensor, k: Tensor, bound: int, levels: int) -> Tensor:
    """The derivative of ``(g * roots).sum()`` with respect to the leaves ``(2, n, R)``."""
    return torch.func.grad(lambda x: (g * forest_roots(x, k, bound, levels)).sum())(leaf)


def forest_bends(
    leaf: Tensor, u: Tensor, g: Tensor, k: Tensor, bound: int, levels: int, with_roots: bool
) -> tuple[Tensor, Tensor]:
    """The derivatives along ``u`` of the roots, empty if they are not wanted, and of the outsides at fixed g.

    These are the derivatives of ``(u * outsides).sum()`` with respect to g and to the leaves.
    """

    def product(g: Tensor, x: Tensor) -> Tensor:
        return (u * forest_outsides(x, g, k, bound, levels)).sum()

    root, outside = torch.func.grad(product, argnums=(0, 1))(g, leaf)
    return root if with_roots else leaf.new_empty(0), outside
