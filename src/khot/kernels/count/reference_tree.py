"""The definition: products of the units' polynomials, unit by unit and term by term, and their derivatives."""

from collections.abc import Callable

import torch
from torch import Tensor


def pair_merge(x: Tensor, start: int, length: int) -> Tensor:
    """Convolves ``x[:, 0]`` with ``x[:, 1]`` along dim 0: ``(width, 2, ...)`` to ``length`` entries at ``start``."""
    width = x.shape[0]
    total = x.new_zeros(max(2 * width - 1, start + length), *x.shape[2:])
    for i in range(width):
        total[i : i + width] += x[i, 0] * x[:, 1]
    return total[start : start + length].clone()


def pair_split(g: Tensor, x: Tensor, start: int) -> Tensor:
    """Gives each child the correlation of ``g`` with its sibling, ``(length, ...)`` to ``(width, 2, ...)``."""
    width, out = x.shape[0], torch.zeros_like(x, memory_format=torch.contiguous_format)
    for i in range(width):
        for j in range(width):
            if 0 <= i + j - start < len(g):
                out[i, 0] += g[i + j - start] * x[j, 1]
                out[i, 1] += g[i + j - start] * x[j, 0]
    return out


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
    """The derivatives along ``u`` of the roots, empty if they are not wanted, and of the outsides at fixed g."""

    def along(function: Callable[[Tensor], Tensor]) -> Tensor:
        tangent: Tensor = torch.func.jvp(function, (leaf,), (u,))[1]
        return tangent

    root = along(lambda x: forest_roots(x, k, bound, levels)) if with_roots else leaf.new_empty(0)
    return root, along(lambda x: forest_outsides(x, g, k, bound, levels))
