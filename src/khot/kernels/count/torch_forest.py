"""The lowest levels of product trees in plain torch, by :mod:`khot.kernels.count.pairs`: differentiable."""

import torch
from torch import Tensor

from .pairs import merge, merge_polar, split


def _leaf_pairs(x: Tensor, certain: float, levels: int) -> Tensor:
    """Leaves, or their tangents, with all trees filled up by units that are certainly zero: ``(2, 2, nodes, R)``."""
    _, n, rows = x.shape
    pad = torch.zeros(2, -n % 2**levels, rows, dtype=x.dtype, device=x.device)
    pad[0] = certain
    return _pairs(torch.cat((x, pad), 1))


def _pairs(x: Tensor) -> Tensor:
    return torch.unflatten(x, 1, (-1, 2)).movedim(2, 1)


def _unpaired(x: Tensor) -> Tensor:
    return x.movedim(1, 2).flatten(1, 2)


def _only(total: Tensor, k: Tensor, whole: bool) -> Tensor:
    return total.gather(0, k.expand(1, 1, -1)) if whole else total


def _everywhere(g: Tensor, k: Tensor, whole: bool, counts: int) -> Tensor:
    """The adjoint of :func:`_only`."""
    if not whole:
        return g
    return torch.where(torch.arange(counts, device=k.device).view(-1, 1, 1) == k, g, 0.0)


def roots_reference(leaf: Tensor, k: Tensor, bound: int, levels: int) -> Tensor:
    """The definition of :func:`roots`, differentiable to any order."""
    x = _leaf_pairs(leaf, 1.0, levels)
    for level in range(1, levels):
        x = _pairs(merge(x, 0, min(2**level, bound) + 1))
    return _only(merge(x, 0, min(2**levels, bound) + 1), k, leaf.shape[1] <= 2**levels)


def bends_reference(
    leaf: Tensor, u: Tensor | None, g: Tensor, k: Tensor, bound: int, levels: int, with_roots: bool = True
) -> tuple[Tensor, Tensor]:
    """The definition of :func:`bends` or, without u, in its second result, of :func:`outsides`."""
    counts, whole = [min(2**level, bound) + 1 for level in range(levels + 1)], leaf.shape[1] <= 2**levels
    x, bent = [_leaf_pairs(leaf, 1.0, levels)], [] if u is None else [_leaf_pairs(u, 0.0, levels)]
    for wide in counts[1:-1]:
        if u is not None:
            bent.append(_pairs(merge_polar(bent[-1], x[-1], 0, wide)))
        x.append(_pairs(merge(x[-1], 0, wide)))
    root = leaf.new_empty(0)
    if u is not None and with_roots:
        root = _only(merge_polar(bent[-1], x[-1], 0, counts[-1]), k, whole)
    g = _everywhere(g, k, whole, counts[-1])
    v = torch.zeros_like(g)
    for level in reversed(range(levels)):
        if u is not None:
            v = _unpaired(split(v, x[level], 0) + split(g, bent[level], 0))
        g = _unpaired(split(g, x[level], 0))
    return root, (g if u is None else v)[:, : leaf.shape[1]]


def forest_roots(leaf: Tensor, k: Tensor, bound: int, levels: int) -> Tensor:
    return roots_reference(leaf, k, bound, levels)


def forest_outsides(leaf: Tensor, g: Tensor, k: Tensor, bound: int, levels: int) -> Tensor:
    return bends_reference(leaf, None, g, k, bound, levels)[1].clone()


def forest_bends(
    leaf: Tensor, u: Tensor, g: Tensor, k: Tensor, bound: int, levels: int, with_roots: bool
) -> tuple[Tensor, Tensor]:
    root, outside = bends_reference(leaf, u, g, k, bound, levels, with_roots)
    return root, outside.clone()
