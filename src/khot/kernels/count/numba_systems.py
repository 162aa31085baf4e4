r"""Systems in the covariance C of short rows of units given their count, by conjugate gradients, in numba.

C is the Laplacian of a graph: its rows sum to 0. Eight rows are solved at a time; a row that is solved no longer
changes. Rows that are not solved are left to other code.
"""

# mypy: disable-error-code="no-untyped-def"

import numpy as np
import torch
from torch import Tensor

from ..cpu.lanes import LANES, at, every, if_positive, put
from ..cpu.loops import kernel, over_rows, per_row
from . import TABLE_OF_INVERSE
from .numba_table import bend, descend, empty_block, is_sound, lanes_of, row_of, tabulate, weigh_sizes, widest_of

CG_STEPS = 100  # 3 to 10 are usual
SMALL, NEGLIGIBLE = 1e-3, 1e-20  # parts of the variance, as in laws.inverse_newton


@per_row
def _sum(x, y):
    """Sums of products, a vector of rows."""
    total = every(0.0)
    for i in range(x.shape[0] // LANES):
        total = total + at(x, i) * at(y, i)
    return total


@per_row
def _place(block, number, logits, b, rounding, residual, variance, spread):
    """Writes pi (1 - pi) and the entries of b, whose sum is removed, in units that have a choice, and 0 elsewhere.

    A sum that is rounding is removed in proportion to the variances, a larger one evenly.
    """
    rows, n = logits.shape
    for lane in range(LANES):
        r, units = row_of(number, lane, rows), 0
        excess = size = total = 0.0
        for i in range(n):
            c = i * LANES + lane
            whole = block.out[c] + block.included[c]
            block.out[c] /= whole
            block.included[c] /= whole
            variance[c] = block.out[c] * block.included[c]
            is_free = abs(logits[r, i]) < np.inf
            residual[c] = b[r, i] if is_free else 0.0
            units += is_free
            excess += residual[c]
            size += abs(residual[c])
            total += variance[c]
        mean = excess / units if units > 0 and abs(excess) > rounding * size else 0.0
        excess = 0.0
        for i in range(n):
            if abs(logits[r, i]) < np.inf:
                residual[i * LANES + lane] -= mean
                excess += residual[i * LANES + lane]
        share = excess / total if total > 0 else 0.0
        for i in range(n):
            residual[i * LANES + lane] -= share * variance[i * LANES + lane]
        spread[lane] = total


@per_row
def _product(block, n, v, result):
    """C v."""
    for i in range(n):
        put(block.z, i, at(v, i))
    weigh_sizes(block, n)
    bend(block, n)
    for i in range(n):
        put(result, i, at(block.z, i))


@per_row
def _pass_on(block, n, residual, v, variance, spread, along):
    """Solves for units of small variance first, if a norm would only measure these, and passes on their entries."""
    few = many = every(0.0)
    for i in range(n):
        share, b = at(variance, i), at(residual, i)
        alone = if_positive(share, b / share, every(0.0))
        is_common = share - every(SMALL) * at(spread, 0)
        few = few + if_positive(is_common, every(0.0), b * alone)
        many = many + if_positive(is_common, b * alone, every(0.0))
        put(v, i, if_positive(is_common, every(0.0), alone))
    for i in range(n):
        put(v, i, if_positive(few - many, at(v, i), every(0.0)))
    _product(block, n, v, along)
    excess = every(0.0)  # by how much the sum differs from 0, which no v can remove
    for i in range(n):
        put(residual, i, at(residual, i) - at(along, i))
        excess = excess + at(residual, i)
    for i in range(n):
        put(residual, i, at(residual, i) - excess / at(spread, 0) * at(variance, i))


@per_row
def _precondition(residual, inverse, total, out):
    """Writes D^{-1} r minus its mean weighted by D, which is the mean of r; returns the product of the two."""
    n, mean = residual.shape[0] // LANES, every(0.0)
    for i in range(n):
        mean = mean + at(residual, i)
    mean = mean / total
    for i in range(n):
        put(out, i, at(residual, i) * at(inverse, i) - mean)
    return _sum(residual, out)


@per_row
def _solve(block, n, tolerance, residual, v, variance, spread, space, going):
    """Adds the solution of C v = residual to v, up to a constant, in rows that are ``going``, which are 0 when solved.

    Off its diagonal, C is nearly -v v^T / sum v, with v the variances. With this on the diagonal as well, it would be
    D (1 + v / sum v) minus a rank-one matrix, which handles constants. So this D is the preconditioner. Units of
    negligible variance get their part afterwards.
    """
    inverse, z, direction, along, sizes = space[0], space[1], space[2], space[3], space[4]
    whole = at(spread, 0)
    total = whole + _sum(variance, variance) / whole
    for i in range(n):
        share = at(variance, i)
        is_common = share - every(NEGLIGIBLE) * whole
        put(inverse, i, if_positive(is_common, every(1.0) / (share * (every(1.0) + share / whole)), every(0.0)))
    size = _precondition(residual, inverse, total, z)
    for i in range(n):
        put(direction, i, at(z, i))
    goal = every(tolerance * tolerance) * size
    for _ in range(CG_STEPS):
        put(sizes, 0, size - goal)
        left = False
        for lane in range(LANES):
            if going[lane] > 0 and not sizes[lane] > 0:
                going[lane] = 0.0 if sizes[lane] <= 0 else -1.0
            left |= going[lane] > 0
        if not left:
            break
        _product(block, n, direction, along)
        step = if_positive(at(going, 0), size / _sum(direction, along), every(0.0))
        for i in range(n):
            put(v, i, at(v, i) + step * at(direction, i))
            put(residual, i, at(residual, i) - step * at(along, i))
        previous = size
        size = if_positive(at(going, 0), _precondition(residual, inverse, total, z), size)
        share = size / previous
        for i in range(n):
            put(direction, i, at(z, i) + share * at(direction, i))
    for i in range(n):
        share, rest = at(variance, i), at(residual, i)
        put(v, i, at(v, i) + if_positive(at(inverse, i), at(z, i), if_positive(share, rest / share, every(0.0))))


@kernel
def _covariance_blocks(begin, end, logits, b, k, none, tolerance, rounding, result):
    rows, n = logits.shape
    block, units, space = empty_block(n, widest_of(k, k, n), True), np.empty((3, n * LANES)), np.empty((5, n * LANES))
    residual, variance, v, spread, going = units[0], units[1], units[2], np.empty(LANES), np.empty(LANES)
    for number in range(begin, end):
        tabulate(block, number, logits, k, k, none)
        descend(block, n)
        _place(block, number, logits, b, rounding, residual, variance, spread)
        for lane in range(LANES):
            going[lane] = 1.0 if is_sound(block.total[lane]) and spread[lane] > 0 else 0.0
        _pass_on(block, n, residual, v, variance, spread, space[0])
        _solve(block, n, tolerance, residual, v, variance, spread, space, going)
        for lane in range(lanes_of(number, rows)):
            r, mean = number * LANES + lane, 0.0
            for i in range(n):
                mean += variance[i * LANES + lane] * v[i * LANES + lane]
            known = 1.0 if going[lane] == 0 and is_sound(block.total[lane]) else np.nan
            for i in range(n):
                is_free = abs(logits[r, i]) < np.inf and spread[lane] > 0
                result[r, i] = known * (v[i * LANES + lane] - mean / spread[lane] if is_free else 0.0)
    return 0


def covariance_inverse(logits: Tensor, b: Tensor, k: Tensor, tolerance: float, rounding: float) -> Tensor:
    """v ``(R, n)`` with C v = b over the finite logits, and 0 elsewhere.

    b sums to 0 there. A sum of at most ``rounding`` times the sum of absolute values is removed in proportion to the
    diagonal D of C, a larger one evenly. Among the solutions, which differ by constants, v is the one with sum D v = 0.
    It has the relative accuracy ``tolerance``, and is NaN in rows that a kernel could not solve.
    """
    (rows, n), width = logits.shape, min(int(k.max()), logits.shape[-1] - int(k.min()))
    v = torch.full_like(b, torch.nan, memory_format=torch.contiguous_format)
    if n * width <= TABLE_OF_INVERSE:
        given = (x.contiguous().numpy() for x in (logits, b, k))
        blocks = -(-rows // LANES)
        items = blocks * n * 32 * (8 + width)
        over_rows(_covariance_blocks, blocks, items, *given, np.empty(0), tolerance, rounding, v.numpy())
    return v
