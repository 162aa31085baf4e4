"""Products of the units' generating polynomials, in a tree: the law of a sum of independent indicators.

The operators are the convolution of pairs and its adjoint, and the lowest levels of a tree at a time;
:mod:`khot.kernels.product_tree.pairs` and :mod:`khot.kernels.product_tree.forest` make differentiable functions of
them, and :mod:`khot.kernels.product_tree.tree` the tree. For an accelerator only is the forest worth while: torch does
the pairs one level after the other.
"""

from typing import Any

import torch
from torch import Tensor

from ..registry import Backends, Operator
from . import reference

FOREST_LEVELS = 10  # of trees that a program holds
TRITON_WIDTH = 1024  # widest child of a node above those that is convolved directly; from there the FFT is faster


def roots_shape(leaf: Tensor, bound: int, levels: int) -> tuple[int, int, int]:
    """Of what the trees of ``2**levels`` of the leaves ``(2, n, R)`` have for roots."""
    n, rows = leaf.shape[1:]
    return (1 if n <= 2**levels else min(2**levels, bound) + 1), -(-n // 2**levels), rows


def _narrow(x: Tensor) -> str | None:
    if x.dtype != torch.float64:
        return "its kernels are for float64"
    return None if x.shape[0] <= TRITON_WIDTH else f"the FFT is faster for children wider than {TRITON_WIDTH}"


def _like_bends(leaf: Tensor, u: Tensor, g: Tensor, k: Tensor, bound: int, levels: int, with_roots: bool) -> Any:
    return leaf.new_empty(roots_shape(leaf, bound, levels) if with_roots else 0), torch.empty_like(leaf)


pair_merge = Operator(
    "pair_merge",
    reference.pair_merge,
    fake=lambda x, start, length: x.new_empty(length, *x.shape[2:]),
    batch=False,
)
pair_merge.backend("triton", module=".triton_pairs", takes=lambda x, *_: _narrow(x))
pair_merge.backend("torch", module=".torch_pairs")

pair_split = Operator(
    "pair_split",
    reference.pair_split,
    fake=lambda g, x, start: torch.empty_like(x, memory_format=torch.contiguous_format),
    batch=False,
)
pair_split.backend("triton", module=".triton_pairs", takes=lambda g, x, start: _narrow(x))
pair_split.backend("torch", module=".torch_pairs")

forest_roots = Operator(
    "forest_roots",
    reference.forest_roots,
    fake=lambda leaf, k, bound, levels: leaf.new_empty(roots_shape(leaf, bound, levels)),
    batch=False,
)
forest_roots.backend("triton", module=".triton_forest")
forest_roots.backend("torch", module=".torch_forest")

forest_outsides = Operator(
    "forest_outsides", reference.forest_outsides, fake=lambda leaf, *_: torch.empty_like(leaf), batch=False
)
forest_outsides.backend("triton", module=".triton_forest")
forest_outsides.backend("torch", module=".torch_forest")

forest_bends = Operator("forest_bends", reference.forest_bends, fake=_like_bends, batch=False)
forest_bends.backend("triton", module=".triton_forest")
forest_bends.backend("torch", module=".torch_forest")

# Draws of the units of whole trees, given how many each has; without it a tree draws level by level.
forest_draw = Backends(__name__, "launch_draw")
forest_draw.backend("triton", module=".triton_draw")
