"""Order sampling's integrals as loops over rows on a CPU.

Infinite positions, whose units are certain, are removed from a row first.
"""

# mypy: disable-error-code="no-untyped-def"

import functools
import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from khot._shapes import broadcast_shapes

from ..cpu.lanes import LANES
from ..cpu.loops import array_like, inlined, kernel, over_rows, specialised
from ..cpu.rows import total_of
from . import Integrals
from .numba_arrivals import of_rows_by_nodes, space_for
from .numba_log_prob import log_prob_of
from .numba_noises import LAWS
from .numba_range import WIDEST, fill_nodes, fill_range_of, fill_weights, gather, leave_out_certain
from .numba_same_design import log_prob_with_one_design, of_rows_with_one_design
from .numba_short_rows import INCLUSION, LOG_PROB, PRODUCT, short_rows
from .numba_tables import of_short_rows

Pair = tuple[Tensor, Tensor]

FAR = 0.5 * WIDEST  # exp(-FAR) does not change a probability, and units this far apart still fit into a loop
STEPS_OF_LOG_PROB, STEPS_OF_INCLUSION, STEPS_OF_ARRIVALS = 50, 50, 1000  # approximate work for a unit
MOST_COUNTS = 2**13  # units times counts in a short row, for which recursions are fastest
SHORT, STEPS_OF_SHORT = 128, 16  # units of rows of logistic noise that are computed side by side
NOTHING, NO_VALUES = torch.empty(0, 0, dtype=torch.float64), torch.empty(0, 0, dtype=torch.bool)
TRIALS, ROUNDING = 4, 1e-13  # each trial has twice the nodes of the one before


@inlined
def _contradicts(theta, value, count, k):
    """Whether a value contradicts a certain unit; all units are certain if all remaining ones are drawn, or none."""
    for i in range(theta.shape[0]):
        drawn = value[i]
        if np.isfinite(theta[i]):
            if (k <= 0 and drawn) or (k >= count and not drawn):
                return True
        elif drawn != (theta[i] > 0):
            return True
    return False


@inlined
def _gather_set(finite, value, places, count, drawn):
    """Marks the members, the units of the set, and leaves out units that make no difference.

    The set is drawn if the last of its members arrives before the first of the others. A member that is ``FAR`` above
    all others makes no difference to that, nor does another unit that is ``FAR`` below all members.

    Returns:
        How many units remain, how many of them are members, and the positions of the lowest member and of the highest
        of the others.
    """
    last, best = np.inf, -np.inf
    for i in range(count):
        if value[places[i]]:
            last = min(last, finite[i])
        else:
            best = max(best, finite[i])
    rest, members = 0, 0
    for i in range(count):
        is_member = value[places[i]]
        if (finite[i] - best if is_member else last - finite[i]) < FAR:
            places[rest], finite[rest], drawn[rest] = places[i], finite[i], is_member
            rest += 1
            members += is_member
    return rest, members, last, best


def _log_prob_loop(log_prob):
    """The loop for a noise."""

    @inlined
    def of_open(finite, value, places, count, depth, with_slopes, slope, drawn, room, slopes):
        count, members, last, best = _gather_set(finite, value, places, count, drawn)
        if not 0 < members < count:
            return 0.0
        found = log_prob(finite[:count], drawn[:count], members, last, best, depth, with_slopes, slope, room)
        if with_slopes:
            for i in range(count):
                slopes[places[i]] = slope[i]
        return found

    def rows(first, last, theta, k, value, depth, with_slopes, result, slopes):
        n = theta.shape[1]
        places, finite, slope, drawn = np.empty(n, np.int64), np.empty(n), np.empty(n), np.empty(n, np.bool_)
        room = space_for(n, k, False)
        for r in range(first, last):
            row = r % theta.shape[0]
            count, left = gather(theta[row], k[row], places, finite)
            if with_slopes:
                slopes[r] = 0.0
            if count == 0 and left < 0:
                result[r] = np.nan
            elif _contradicts(theta[row], value[r], count, left):
                result[r] = -np.inf
            elif not 0 < left < count:
                result[r] = 0.0
            else:
                result[r] = of_open(
                    finite, value[r], places, count, depth, with_slopes, slope, drawn, room,
                    slopes[r if with_slopes else 0],
                )  # fmt: skip
        return 0

    return kernel(rows)


@functools.cache
def _log_prob_loops(noise: str) -> Any:
    with specialised(noise):
        of_row = log_prob_with_one_design if noise == "logistic" else log_prob_of
        return _log_prob_loop(of_row(LAWS[noise]))


def _log_prob(
    theta: Tensor, k: Tensor, value: Tensor, noise: str, depth: float, with_slopes: bool
) -> tuple[Tensor, Tensor]:
    shape = broadcast_shapes(theta.shape, value.shape)
    batch, n = theta.shape[:-1], shape[-1]
    if shape[len(shape) - theta.ndim : -1] != batch:  # the batch of the values is not that of the positions
        theta, k = theta.expand(shape), k.expand(shape[:-1])
    positions, drawn = _rows(theta.double()), _rows((value != 0).expand(shape))
    sizes = k.expand(theta.shape[:-1]).reshape(-1).contiguous()
    result = positions.new_empty(len(drawn))
    slopes = positions.new_empty(drawn.shape if with_slopes else (1, n))
    if _is_short(noise, positions):
        given, kept = (drawn, NOTHING), (NOTHING, NOTHING.view(-1))
        _over_blocks(LOG_PROB, positions, sizes, depth, given, kept, result.view(1, -1), slopes)
    else:
        steps = STEPS_OF_LOG_PROB * drawn.numel()
        arguments = drawn.numpy(), depth, with_slopes, result.numpy(), slopes.numpy()
        over_rows(_log_prob_loops(noise), len(drawn), steps, array_like(positions), sizes.numpy(), *arguments)
    return result.view(shape[:-1]), slopes.view(shape) if with_slopes else slopes.new_empty(*shape[:-1], 0)


def _rows(x: Tensor) -> Tensor:
    return x.detach().reshape(-1, x.shape[-1]).contiguous()


def _inclusion_loop(space_for, find_range, inclusion):
    """The loop for a noise; ``when`` and ``given`` are described in :class:`.Integrals`."""
    fill_range = fill_range_of(find_range)

    def rows(first, last, theta, k, depth, when, given, result):
        n, skipped = theta.shape[1], 0
        places, finite, weights = np.empty(n, np.int64), np.empty(n), np.empty(n)
        found, room = np.empty(n), space_for(n, k, False)
        for r in range(first, last):
            count, size = gather(theta[r], k[r], places, finite)
            for i in range(n):
                result[r, i] = 1.0 if theta[r, i] > 0 and size >= 0 else 0.0 if size >= 0 else np.nan
            count, size = leave_out_certain(finite, places, count, size, result[r])
            if not 0 < size < count:
                for j in range(count):
                    result[r, places[j]] = 1.0 if size > 0 else 0.0
                continue
            row, weight = finite[:count], weights[:count]
            nodes = fill_range(row, size, depth, weight, room, when[r])
            is_near = False
            for _ in range(TRIALS):
                if nodes < 0 or is_near:
                    break
                inclusion(room, weight, size, nodes, when[r], depth, given[r, :count], found[:count])
                is_near = abs(total_of(found[:count]) - size) <= count * (0.3 * math.exp(-depth) + ROUNDING)
                if not is_near:  # the integrand has edges that are sharper than its peak
                    when[r, 2] *= 2.0
                    nodes = fill_nodes(when[r, 0], when[r, 1], when[r, 2], room.node, room.width)
            if not is_near:
                when[r, 0] = np.nan
                skipped += 1
                continue
            for j in range(count):
                result[r, places[j]] = min(found[j], 1.0)
        return skipped

    return kernel(rows)


def _product_loop(space_for, product):
    def rows(first, last, theta, k, depth, when, given, vector, result):
        n = theta.shape[1]
        places, finite, weights = np.empty(n, np.int64), np.empty(n), np.empty(n)
        found, g, room = np.empty(n), np.empty(n), space_for(n, k, True)
        for r in range(first, last):
            count, size = gather(theta[r], k[r], places, finite)
            count, size = leave_out_certain(finite, places, count, size, result[r])
            result[r, :] = 0.0
            if np.isnan(when[r, 0]) or not 0 < size < count:
                continue
            row, weight, mean_of_g = finite[:count], weights[:count], 0.0
            fill_weights(row, when[r, 3], weight)
            for j in range(count):
                g[j] = vector[r, places[j]]
                mean_of_g += g[j] / count
            for j in range(count):
                g[j] -= mean_of_g
            nodes = fill_nodes(when[r, 0], when[r, 1], when[r, 2], room.node, room.width)
            product(room, weight, size, nodes, when[r], depth, given[r, :count], g[:count], found[:count])
            for j in range(count):
                result[r, places[j]] = found[j]
        return 0

    return kernel(rows)


@functools.cache
def _inclusion_loops(name: str, is_short: bool) -> tuple[Any, Any]:
    """The loops of inclusion probabilities and of products for a noise."""
    functions_of = of_rows_with_one_design if name == "logistic" else of_short_rows if is_short else of_rows_by_nodes
    with specialised(f"{name} {is_short}"):
        space_for, find_range, inclusion, product = functions_of(LAWS[name])
        return _inclusion_loop(space_for, find_range, inclusion), _product_loop(space_for, product)


def _over_rows(number: int, noise: str, theta: Tensor, k: Tensor, depth: float, *arrays: Tensor, each: int = 1) -> None:
    """Runs a loop over all rows; the method depends on the length and size of a row, not on its neighbours."""
    n, shorts = theta.shape[-1], len(k)
    if noise == "logistic":
        shorts = 0
    elif n * n > 2 * MOST_COUNTS:
        is_short = torch.minimum(k, n - k) * n <= MOST_COUNTS
        shorts = int(is_short.sum())
        if 0 < shorts < len(k):
            for rows in (is_short, ~is_short):
                some, size, *parts = (x[rows] for x in (theta, k, *arrays))
                _over_rows(number, noise, some, size, depth, *parts, each=each)
                for x, part in zip(arrays, parts, strict=True):
                    x[rows] = part
            return
    steps = each * (STEPS_OF_INCLUSION if noise == "logistic" else STEPS_OF_ARRIVALS) * theta.numel()
    loop = _inclusion_loops(noise, shorts > 0)[number]
    over_rows(loop, len(theta), steps, array_like(theta), k.numpy(), depth, *(x.numpy() for x in arrays))


def _over_blocks(
    what: int, theta: Tensor, k: Tensor, depth: float, given: Pair, kept: Pair, result: Tensor, slopes: Tensor = NOTHING
) -> None:
    """Runs the loop for short rows of logistic noise."""
    items, rows = STEPS_OF_SHORT * max(theta.numel(), given[0].numel()), (array_like(theta), k.numpy())
    pairs = (tuple(x.numpy() for x in pair) for pair in (given, kept))
    blocks = -(-len(theta) // LANES)
    over_rows(short_rows, blocks, items, what, *rows, depth, *pairs, result.numpy(), slopes.numpy())


def _is_short(noise: str, theta: Tensor) -> bool:
    return noise == "logistic" and theta.shape[-1] <= SHORT


def _inclusion(theta: Tensor, k: Tensor, noise: str, depth: float) -> tuple[Tensor, Tensor, Tensor]:
    result, when = torch.empty_like(theta), theta.new_zeros(len(theta), 5)
    if _is_short(noise, theta):
        tilts = theta.new_empty(len(theta))
        _over_blocks(INCLUSION, theta, k, depth, (NO_VALUES, NOTHING), (when, tilts), result)
        return result, when, tilts
    given = theta.new_zeros(len(theta), theta.shape[-1] if noise == "logistic" else 0)
    _over_rows(0, noise, theta, k, depth, when, given, result)
    return result, when, given


def _product(theta: Tensor, k: Tensor, when: Tensor, given: Tensor, vector: Tensor, noise: str, depth: float) -> Tensor:
    result = torch.empty_like(theta)
    if _is_short(noise, theta):
        _over_blocks(PRODUCT, theta, k, depth, (NO_VALUES, vector), (when, given), result)
    else:
        _over_rows(1, noise, theta, k, depth, when, given, vector, result, each=2)
    return result


INTEGRALS = Integrals(_log_prob, _inclusion, _product)
