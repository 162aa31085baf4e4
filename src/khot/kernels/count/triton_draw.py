"""Exact draws down the lowest levels of a product tree in Triton, in one launch.

A program computes the laws of a tree as in the module ``triton_forest``, then goes down with several draws at a time:
the count of a left child given that of its parent, by inversion, with a lane for each node and draw. The counts of a
level are in a scratch buffer; random numbers come from torch, one for each node of each draw.
"""

# mypy: disable-error-code="no-untyped-def"

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..gpu.tools import on_device
from ..random_numbers import uniform
from .triton_forest import forest_plan, lanes, level_shape, load_units, merge_levels, program, scratch_size

DRAWN = 16  # entries of the lowest level that a thread draws


@triton.jit
def _draw_level(
    x_ptr, above_ptr, noise_ptr, count_above_ptr, count_ptr, nodes, parents, width, wide, chunk,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Draws the counts of the children, given the counts of their parents, (ROWS, chunk, parents)."""
    for start in range(0, ROWS * chunk * parents, BLOCK):
        row, sample, parent = lanes(start, parents, chunk, BLOCK)
        there = row < ROWS
        paired = there & (2 * parent + 1 < nodes)
        draw = row * chunk + sample
        c = tl.load(count_above_ptr + draw * parents + parent, mask=there, other=0)
        left = x_ptr + (row * nodes + 2 * parent) * width
        total = tl.load(above_ptr + (row * parents + parent) * wide + c, mask=paired, other=0.0)
        target = total * tl.load(noise_ptr + draw * (nodes // 2) + parent, mask=paired, other=0.0)
        cumulative = tl.zeros((BLOCK,), tl.float64)
        index, possible = tl.zeros((BLOCK,), tl.int32), tl.zeros((BLOCK,), tl.int32)
        for i in range(width):
            inside = paired & (i <= c) & (c - i < width)
            mass = tl.load(left + i, mask=inside, other=0.0)
            mass *= tl.load(left + width + c - i, mask=inside, other=0.0)
            cumulative += mass
            index += tl.where(cumulative <= target, 1, 0)
            possible = tl.where(mass > 0, i, possible)
        index = tl.where(paired, tl.minimum(index, possible), c)  # larger only by rounding
        child = count_ptr + draw * nodes + 2 * parent
        tl.store(child, index, mask=there)
        tl.store(child + 1, c - index, mask=paired)


@triton.jit
def _load_counts(
    root_ptr, count_ptr, tree, row_0, rows, sample_0, samples, chunk,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Loads the counts of the trees from (trees, R, samples)."""
    for start in range(0, ROWS * chunk, BLOCK):
        row, sample, _ = lanes(start, 1, chunk, BLOCK)
        there = (row < ROWS) & (row_0 + row < rows) & (sample_0 + sample < samples)
        at = (tree.to(tl.int64) * rows + row_0 + row) * samples + sample_0 + sample
        tl.store(count_ptr + row * chunk + sample, tl.load(root_ptr + at, mask=there, other=0), mask=row < ROWS)


@triton.jit
def _store_draws(
    count_ptr, out_ptr, units, unit_0, row_0, rows, sample_0, samples, chunk, n,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Stores the draws of units to (samples, R, n)."""
    for start in range(0, ROWS * chunk * units, BLOCK):
        row, sample, unit = lanes(start, units, chunk, BLOCK)
        there = (row < ROWS) & (row_0 + row < rows) & (sample_0 + sample < samples)
        count = tl.load(count_ptr + (row * chunk + sample) * units + unit, mask=there, other=0)
        at = ((sample_0 + sample).to(tl.int64) * rows + row_0 + row) * n + unit_0 + unit
        tl.store(out_ptr + at, count == 1, mask=there)


@triton.jit(do_not_specialize=["scratch_size", "n", "rows", "samples", "chunk", "bound", "levels", "tasks"])
def _forest_draw(
    leaf_ptr, root_ptr, noise_ptr, out_ptr, scratch_ptr, count_ptr, scratch_size, n, rows, samples, chunk, bound,
    levels, tasks, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Names as in :func:`launch_draw`."""
    tree, row_blocks = tl.program_id(0), tl.cdiv(rows, ROWS)
    unit_0 = tree << levels
    parity = ROWS * chunk * tl.minimum(n, 1 << levels)  # counts of a level; two levels alternate
    units = tl.minimum(n - unit_0, 1 << levels)
    x_ptr = scratch_ptr + program().to(tl.int64) * scratch_size
    count_ptr += program().to(tl.int64) * (2 * parity)
    for task in range(tl.program_id(1), tasks, tl.num_programs(1)):
        row_0 = task % row_blocks * ROWS
        sample_0 = task // row_blocks * chunk
        load_units(leaf_ptr, x_ptr, units, unit_0, row_0, rows, n, ROWS, BLOCK)
        _load_counts(root_ptr, count_ptr, tree, row_0, rows, sample_0, samples, chunk, ROWS, BLOCK)
        tl.debug_barrier()
        at = merge_levels(x_ptr, x_ptr, units, levels, bound, False, ROWS, BLOCK)
        here = 0
        noise = noise_ptr + parity.to(tl.int64) * (task * tl.num_programs(0) + tree)
        for down in range(levels):
            level = levels - down
            nodes, width = level_shape(units, level - 1, bound)
            parents, wide = level_shape(units, level, bound)
            below = at - ROWS * nodes * width
            _draw_level(
                x_ptr + below, x_ptr + at, noise, count_ptr + here, count_ptr + (parity - here), nodes, parents, width,
                wide, chunk, ROWS, BLOCK,
            )  # fmt: skip
            tl.debug_barrier()
            at = below
            here = parity - here
            noise += ROWS * chunk * (nodes // 2)
        _store_draws(count_ptr + here, out_ptr, units, unit_0, row_0, rows, sample_0, samples, chunk, n, ROWS, BLOCK)
        tl.debug_barrier()


def launch_draw(leaf: Tensor, bound: int, levels: int, counts: Tensor, generator: torch.Generator | None) -> Tensor:
    """Draws the units ``(n, R, samples)``, bool, given the counts ``(trees, R, samples)`` of the trees."""
    (_, n, rows), (trees, _, samples) = leaf.shape, counts.shape
    full = min(n, 2**levels)  # units of a tree, except perhaps the last
    how = forest_plan(full, trees * rows * -(-samples // DRAWN))
    abreast = min(how.rows, triton.next_power_of_2(rows))  # rows of a program; if there are few, it makes many draws
    chunks = -(-max(1, samples) // max(1, DRAWN * how.block // (full * abreast)))
    chunk = -(-max(1, samples) // chunks)
    tasks = -(-rows // abreast) * -(-max(1, samples) // chunk)  # of a tree
    programs = min(max(1, how.programs // trees), tasks)  # of a tree
    parity = abreast * chunk * full  # as in the kernel
    size = abreast * scratch_size(full, levels, bound)
    noise = uniform((trees * tasks * parity,), leaf.dtype, leaf.device, generator)
    out = torch.empty(samples, rows, n, dtype=torch.bool, device=leaf.device)
    scratch = torch.empty(trees * programs * size, dtype=leaf.dtype, device=leaf.device)
    drawn = torch.empty(trees * programs * 2 * parity, dtype=torch.int32, device=leaf.device)
    with on_device(leaf):
        _forest_draw[(trees, programs)](
            leaf.mT.contiguous(), counts.int().contiguous(), noise, out, scratch, drawn, size,
            n, rows, samples, chunk, bound, levels, tasks, ROWS=abreast, BLOCK=how.block, num_warps=how.warps,
        )  # fmt: skip
    return out.permute(2, 1, 0)
