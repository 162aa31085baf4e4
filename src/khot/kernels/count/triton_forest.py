"""The lowest levels of a product tree in Triton, upwards and downwards in one launch; see ``forest.py``.

A program takes one tree of the forest, or the same tree of several rows, through all of its levels. The laws of a level
are in the program's own scratch buffer, with a barrier between writing it and reading it for the next level: some ten
numbers per unit. A program processes several tasks, so that the scratch does not grow with their number: for trees of
1000 units it has at most 180 MB, twice this for derivatives, four times for second ones.

A lane computes one count of one node at a time, as the sum of the products that belong to it. All sums are of terms
without cancellation, in float64.

Scratch of a program: levels 0, 1, ... of ``(ROWS, nodes, counts)``, one after the other; the nodes 2j and 2j + 1 are
the children of node j, and a last one without a sibling equals its parent. There are four of them: the laws, their
tangents, the derivatives with respect to the laws, and the tangents of those.
"""

# mypy: disable-error-code="no-untyped-def"
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..gpu.plans import PROGRAMS
from ..gpu.tools import on_device

# For trees of up to this many units: rows in a program, entries of a level processed at a time (all levels have about
# as many as there are units, the first twice as many), warps, and the largest number of programs, each of which has a
# scratch and takes several rows. Up to PROGRAMS trees do not fill a large device, and so each gets more warps.
FOREST = (
    (32, 4, 128, 1, 16 * PROGRAMS), (64, 1, 32, 1, 32 * PROGRAMS), (256, 1, 64, 1, 32 * PROGRAMS),
    (1024, 1, 128, 4, 8 * PROGRAMS),
)  # fmt: skip
FEW_TREES = (
    (32, 4, 128, 2, PROGRAMS), (64, 1, 128, 4, PROGRAMS), (256, 1, 256, 8, PROGRAMS), (1024, 1, 512, 16, PROGRAMS),
)  # fmt: skip
NONE = tl.constexpr(2**30)  # a count that is too large for any node


class ForestPlan(NamedTuple):
    """How a kernel processes the lowest levels of product trees.

    Attributes:
        rows: Rows that a program processes at a time.
        block: Entries of a level that it computes at a time.
        warps: Warps of a program.
        programs: Largest number of programs, if there are not more trees.
    """

    rows: int
    block: int
    warps: int
    programs: int


def forest_plan(units: int, trees: int) -> ForestPlan:
    """The plan for so many trees of up to ``2**LEVELS`` units, in all rows."""
    table = FEW_TREES if trees <= PROGRAMS else FOREST
    return next(ForestPlan(*how) for limit, *how in table if units <= limit)


@triton.jit
def lanes(start, per_node, nodes, BLOCK: tl.constexpr):
    """The row, node and entry of BLOCK lanes over (row, node, entry)."""
    lane = start + tl.arange(0, BLOCK)
    place = lane // per_node
    row = place // nodes
    return row, place - row * nodes, lane - place * per_node


@triton.jit
def load_units(x_ptr, scratch_ptr, units, unit_0, row_0, rows, n, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Loads level 0 from (2, R, n), with lanes over (row, value, unit)."""
    for start in range(0, ROWS * 2 * units, BLOCK):
        row, value, unit = lanes(start, units, 2, BLOCK)
        at = (value.to(tl.int64) * rows + row_0 + row) * n + unit_0 + unit
        x = tl.load(x_ptr + at, mask=(row < ROWS) & (row_0 + row < rows), other=0.0)
        tl.store(scratch_ptr + (row * units + unit) * 2 + value, x, mask=row < ROWS)


@triton.jit
def _store_units(scratch_ptr, out_ptr, units, unit_0, row_0, rows, n, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Stores level 0 to (2, R, n)."""
    for start in range(0, ROWS * 2 * units, BLOCK):
        row, value, unit = lanes(start, units, 2, BLOCK)
        there = (row < ROWS) & (row_0 + row < rows)
        x = tl.load(scratch_ptr + (row * units + unit) * 2 + value, mask=there, other=0.0)
        at = (value.to(tl.int64) * rows + row_0 + row) * n + unit_0 + unit
        tl.store(out_ptr + at, x, mask=there)


@triton.jit
def _merge_level(
    x_ptr, u_ptr, x_above_ptr, u_above_ptr, nodes, parents, width, wide,
    TANGENT: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Computes ``wide`` counts of the parents from ``width`` counts of their children."""
    for start in range(0, ROWS * parents * wide, BLOCK):
        row, parent, c = lanes(start, wide, parents, BLOCK)
        paired = (row < ROWS) & (2 * parent + 1 < nodes)
        held = tl.minimum(row, ROWS - 1)  # lanes beyond the rows read the last one, and store nothing
        left = (held * nodes + 2 * parent) * width
        right = left + width + c
        rest = tl.where(paired, c, NONE)  # to be split between the children
        x, u = tl.zeros((BLOCK,), tl.float64), tl.zeros((BLOCK,), tl.float64)
        for i in range(width):
            inside = (rest - i).to(tl.uint32) < width.to(tl.uint32)  # and not negative
            a, b = tl.load(x_ptr + left + i), tl.load(x_ptr + right - i, mask=inside, other=0.0)
            x += a * b
            if TANGENT:
                u += tl.load(u_ptr + left + i) * b
                u += a * tl.load(u_ptr + right - i, mask=inside, other=0.0)
        alone = (row < ROWS) & (~paired)
        here = alone & (c < width)
        above = (row * parents + parent) * wide + c
        x = tl.where(alone, tl.load(x_ptr + left + c, mask=here, other=0.0), x)
        tl.store(x_above_ptr + above, x, mask=row < ROWS)
        if TANGENT:
            u = tl.where(alone, tl.load(u_ptr + left + c, mask=here, other=0.0), u)
            tl.store(u_above_ptr + above, u, mask=row < ROWS)


@triton.jit
def _split_level(
    x_ptr, u_ptr, g_ptr, v_ptr, g_above_ptr, v_above_ptr, nodes, parents, width, wide,
    TANGENT: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Derivatives for the children, and their tangents, from those for ``wide`` counts of the parents."""
    for start in range(0, ROWS * parents * 2 * width, BLOCK):
        row, parent, entry = lanes(start, 2 * width, parents, BLOCK)
        paired = (row < ROWS) & (2 * parent + 1 < nodes)
        held = tl.minimum(row, ROWS - 1)
        left = (held * nodes + 2 * parent) * width
        c = tl.where(entry < width, entry, entry - width)
        sibling = left + tl.where(paired & (entry < width), width, 0)
        above = (held * parents + parent) * wide + c
        count = tl.where(paired, c, NONE)
        g, v = tl.zeros((BLOCK,), tl.float64), tl.zeros((BLOCK,), tl.float64)
        for j in range(width):
            inside = count + j < wide
            g_above, x = tl.load(g_above_ptr + above + j, mask=inside, other=0.0), tl.load(x_ptr + sibling + j)
            g += g_above * x
            if TANGENT:
                v += tl.load(v_above_ptr + above + j, mask=inside, other=0.0) * x
                v += g_above * tl.load(u_ptr + sibling + j)
        alone = (row < ROWS) & (~paired) & (entry < width)
        g = tl.where(alone, tl.load(g_above_ptr + above, mask=alone, other=0.0), g)
        tl.store(g_ptr + left + entry, g, mask=paired | alone)
        if TANGENT:
            v = tl.where(alone, tl.load(v_above_ptr + above, mask=alone, other=0.0), v)
            tl.store(v_ptr + left + entry, v, mask=paired | alone)


@triton.jit
def _merge_total(
    x_ptr, u_ptr, k_ptr, out_ptr, width, row_0, rows, TANGENT: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    """The one entry of the root that matters, or its tangent, from its two children."""
    row = row_0 + tl.arange(0, ROWS)
    k = tl.load(k_ptr + row, mask=row < rows, other=0).to(tl.int32)[:, None]
    left = (tl.arange(0, ROWS) * (2 * width))[:, None]
    total = tl.zeros((ROWS, BLOCK // ROWS), tl.float64)
    for start in range(0, width, BLOCK // ROWS):
        i = start + tl.arange(0, BLOCK // ROWS)[None, :]
        inside = (i < width) & (i <= k) & (k - i < width)
        a = tl.load(x_ptr + left + i, mask=inside, other=0.0)
        b = tl.load(x_ptr + left + width + k - i, mask=inside, other=0.0)
        if TANGENT:
            total += tl.load(u_ptr + left + i, mask=inside, other=0.0) * b
            total += a * tl.load(u_ptr + left + width + k - i, mask=inside, other=0.0)
        else:
            total += a * b
    tl.store(out_ptr + row, tl.sum(total, 1), mask=row < rows)


@triton.jit
def _split_total(
    x_ptr, u_ptr, g_ptr, v_ptr, k_ptr, grad_ptr, width, row_0, rows,
    TANGENT: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The derivatives of entry k of the root with respect to its two children, times ``grad``."""
    for start in range(0, ROWS * 2 * width, BLOCK):
        row, side, c = lanes(start, width, 2, BLOCK)
        there = (row < ROWS) & (row_0 + row < rows)
        k = tl.load(k_ptr + row_0 + row, mask=there, other=0).to(tl.int32)
        grad = tl.load(grad_ptr + row_0 + row, mask=there, other=0.0)
        inside = there & (c <= k) & (k - c < width)
        here, sibling = (2 * row + side) * width + c, (2 * row + 1 - side) * width + k - c
        tl.store(g_ptr + here, grad * tl.load(x_ptr + sibling, mask=inside, other=0.0), mask=row < ROWS)
        if TANGENT:
            tl.store(v_ptr + here, grad * tl.load(u_ptr + sibling, mask=inside, other=0.0), mask=row < ROWS)


@triton.jit
def _store_roots(x_ptr, out_ptr, tree, trees, wide, row_0, rows, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Stores the highest level to (counts, trees, R)."""
    for start in range(0, ROWS * wide, BLOCK):
        lane = start + tl.arange(0, BLOCK)
        row, c = lane // wide, lane % wide
        there = (row < ROWS) & (row_0 + row < rows)
        x = tl.load(x_ptr + row * wide + c, mask=there, other=0.0)
        tl.store(out_ptr + (c.to(tl.int64) * trees + tree) * rows + row_0 + row, x, mask=there)


@triton.jit
def _load_roots(
    grad_ptr, g_ptr, v_ptr, tree, trees, wide, row_0, rows,
    TANGENT: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Loads the derivatives with respect to the highest level from (counts, trees, R); their tangents are zero."""
    for start in range(0, ROWS * wide, BLOCK):
        lane = start + tl.arange(0, BLOCK)
        row, c = lane // wide, lane % wide
        there = (row < ROWS) & (row_0 + row < rows)
        g = tl.load(grad_ptr + (c.to(tl.int64) * trees + tree) * rows + row_0 + row, mask=there, other=0.0)
        tl.store(g_ptr + row * wide + c, g, mask=row < ROWS)
        if TANGENT:
            tl.store(v_ptr + row * wide + c, tl.zeros((BLOCK,), tl.float64), mask=row < ROWS)


@triton.jit
def level_shape(units, level, bound):
    """Nodes of a tree at a level and counts of each node."""
    return (units + (1 << level) - 1) >> level, tl.minimum(1 << level, bound) + 1


@triton.jit
def merge_levels(x_ptr, u_ptr, units, top, bound, TANGENT: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Computes levels 1 to ``top``, one after the other; returns where the highest begins."""
    at = 0
    for level in range(1, top + 1):
        nodes, width = level_shape(units, level - 1, bound)
        parents, wide = level_shape(units, level, bound)
        above = at + ROWS * nodes * width
        _merge_level(
            x_ptr + at, u_ptr + at, x_ptr + above, u_ptr + above, nodes, parents, width, wide, TANGENT, ROWS, BLOCK
        )
        tl.debug_barrier()
        at = above
    return at


@triton.jit
def _split_levels(
    x_ptr, u_ptr, g_ptr, v_ptr, at, units, top, bound, TANGENT: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    """Goes down to level 0 from ``top``, which begins at ``at``."""
    for down in range(top):
        level = top - down
        nodes, width = level_shape(units, level - 1, bound)
        parents, wide = level_shape(units, level, bound)
        below = at - ROWS * nodes * width
        _split_level(
            x_ptr + below, u_ptr + below, g_ptr + below, v_ptr + below, g_ptr + at, v_ptr + at,
            nodes, parents, width, wide, TANGENT, ROWS, BLOCK,
        )  # fmt: skip
        tl.debug_barrier()
        at = below


@triton.jit
def program():
    """The number of this program in a grid of (trees, others)."""
    return tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)


@triton.jit(do_not_specialize=["scratch_size", "n", "rows", "bound", "levels"])
def _forest(
    leaf_ptr, tangent_ptr, k_ptr, grad_ptr, out_ptr, scratch_ptr, scratch_size, n, rows, bound, levels,
    OUTSIDE: tl.constexpr, TANGENT: tl.constexpr, WHOLE: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Roots, or with OUTSIDE derivatives with respect to the leaves; with TANGENT the tangents of these."""
    tree, trees = tl.program_id(0), tl.num_programs(0)
    unit_0 = tree << levels
    units = n if WHOLE else tl.minimum(n - unit_0, 1 << levels)
    top = levels - 1 if WHOLE else levels  # the highest level in the scratch
    x_ptr = scratch_ptr + program().to(tl.int64) * scratch_size * ((1 + OUTSIDE) * (1 + TANGENT))
    u_ptr = x_ptr + scratch_size
    g_ptr = x_ptr + scratch_size * (1 + TANGENT)
    v_ptr = g_ptr + scratch_size
    for row_0 in range(tl.program_id(1) * ROWS, rows, tl.num_programs(1) * ROWS):
        load_units(leaf_ptr, x_ptr, units, unit_0, row_0, rows, n, ROWS, BLOCK)
        if TANGENT:
            load_units(tangent_ptr, u_ptr, units, unit_0, row_0, rows, n, ROWS, BLOCK)
        tl.debug_barrier()
        at = merge_levels(x_ptr, u_ptr, units, top, bound, TANGENT, ROWS, BLOCK)
        _, wide = level_shape(units, top, bound)
        if OUTSIDE:
            if WHOLE:
                _split_total(
                    x_ptr + at, u_ptr + at, g_ptr + at, v_ptr + at, k_ptr, grad_ptr, wide, row_0, rows,
                    TANGENT, ROWS, BLOCK,
                )  # fmt: skip
            else:
                _load_roots(grad_ptr, g_ptr + at, v_ptr + at, tree, trees, wide, row_0, rows, TANGENT, ROWS, BLOCK)
            tl.debug_barrier()
            _split_levels(x_ptr, u_ptr, g_ptr, v_ptr, at, units, top, bound, TANGENT, ROWS, BLOCK)
            _store_units(v_ptr if TANGENT else g_ptr, out_ptr, units, unit_0, row_0, rows, n, ROWS, BLOCK)
        elif WHOLE:
            _merge_total(x_ptr + at, u_ptr + at, k_ptr, out_ptr, wide, row_0, rows, TANGENT, ROWS, BLOCK)
        else:
            _store_roots((u_ptr if TANGENT else x_ptr) + at, out_ptr, tree, trees, wide, row_0, rows, ROWS, BLOCK)
        tl.debug_barrier()


def scratch_size(units: int, levels: int, bound: int) -> int:
    """The number of entries in all levels of a tree."""
    return sum(-(-units // 2**level) * (min(2**level, bound) + 1) for level in range(levels + 1))


def launch_forest(
    leaf: Tensor, k: Tensor, bound: int, levels: int, grad: Tensor | None = None, tangent: Tensor | None = None
) -> Tensor:
    """Roots ``(counts, trees, R)``; with ``grad`` of that shape, derivatives with respect to the ``leaf (2, n, R)``.

    With ``tangent``, of the leaf's shape, the tangent of these.
    """
    _, n, rows = leaf.shape
    whole, trees, full = n <= 2**levels, -(-n // 2**levels), min(n, 2**levels)
    how, leaves = forest_plan(full, trees * rows), leaf.mT.contiguous()
    counts = 1 if whole else min(2**levels, bound) + 1
    shape = (counts, trees, rows)
    out = torch.empty(shape, dtype=leaf.dtype, device=leaf.device) if grad is None else torch.empty_like(leaves)
    abreast = min(max(1, how.programs // trees), -(-rows // how.rows))  # programs of a tree
    size = how.rows * scratch_size(full, levels - whole, bound)
    parts = (1 if tangent is None else 2) * (1 if grad is None else 2)
    scratch = torch.empty(trees * abreast * parts * size, dtype=leaf.dtype, device=leaf.device)
    u = leaves if tangent is None else tangent.mT.contiguous()
    with on_device(leaf):
        _forest[(trees, abreast)](
            leaves, u, k.contiguous(), scratch if grad is None else grad.contiguous(), out, scratch,
            size, n, rows, bound, levels, OUTSIDE=grad is not None, TANGENT=tangent is not None, WHOLE=whole,
            ROWS=how.rows, BLOCK=how.block, num_warps=how.warps,
        )  # fmt: skip
    if grad is None:
        return out
    return out.mT if out.mT.stride() == leaf.stride() else torch.empty_like(leaf).copy_(out.mT)


def forest_roots(leaf: Tensor, k: Tensor, bound: int, levels: int) -> Tensor:
    return launch_forest(leaf, k, bound, levels)


def forest_outsides(leaf: Tensor, g: Tensor, k: Tensor, bound: int, levels: int) -> Tensor:
    return launch_forest(leaf, k, bound, levels, g)


def forest_bends(
    leaf: Tensor, u: Tensor, g: Tensor, k: Tensor, bound: int, levels: int, with_roots: bool
) -> tuple[Tensor, Tensor]:
    root = launch_forest(leaf, k, bound, levels, None, u) if with_roots else leaf.new_empty(0)
    return root, launch_forest(leaf, k, bound, levels, g, u)
