"""Order sampling's integrals as loops over rows on a CPU.

Infinite positions, whose units are certain, are removed from a row first.
"""

# mypy: disable-error-code="no-untyped-def"

import functools
from typing import Any

import numpy as np
import torch
from torch import Tensor

from khot._tracing import broadcast_shapes

from ..count import bernoulli_count, bernoulli_count_derivative
from ..cpu.loops import inlined, inlined_sum, kernel, over_rows, specialised
from ..cpu.maths import LOG1P
from . import numba_log_exponential, numba_log_uniform, numba_logistic
from .numba_arrivals import loops
from .numba_circle import LEAST_SPREAD, covariances, rarer_given_count, walk
from .numba_inclusion import Law, changes_of_rarer_fates, rarer_fates, seen_from_tilt
from .numba_logistic import space
from .numba_range import gather
from .numba_tilt import solve_tilt

log1p = LOG1P[np.float64]
# Of work for a unit, approximately.
STEPS_OF_LOG_PROB, STEPS_OF_INCLUSION, STEPS_OF_PRODUCT, STEPS_OF_ARRIVALS = 50, 50, 100, 1000


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


def _log_prob_loop(of_row):
    """The loop for a noise."""

    @inlined
    def of_open(finite, value, places, count, depth, with_slopes, slope, drawn, room, slopes):
        members = 0
        for i in range(count):
            drawn[i] = value[places[i]]
            members += drawn[i]
        if not 0 < members < count:
            return 0.0
        found = of_row(finite[:count], drawn[:count], members, depth, with_slopes, slope, room)
        if with_slopes:
            for i in range(count):
                slopes[places[i]] = slope[i]
        return found

    def rows(first, last, theta, k, value, depth, with_slopes, result, slopes):
        n = theta.shape[1]
        places, finite, slope, drawn = np.empty(n, np.int64), np.empty(n), np.empty(n), np.empty(n, np.bool_)
        room = space(n, 0, 3)
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
    of_row = {
        "logistic": numba_logistic.log_prob,
        "log_exponential": numba_log_exponential.log_prob,
        "log_uniform": numba_log_uniform.log_prob,
    }[noise]
    with specialised(noise):
        return _log_prob_loop(of_row)


def order_log_prob(
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
    over_rows(
        _log_prob_loops(noise), len(drawn), STEPS_OF_LOG_PROB * drawn.numel(), positions.numpy(), sizes.numpy(),
        drawn.numpy(), depth, with_slopes, result.numpy(), slopes.numpy(),
    )  # fmt: skip
    return result.view(shape[:-1]), slopes.view(shape) if with_slopes else slopes.new_empty(*shape[:-1], 0)


def _rows(x: Tensor) -> Tensor:
    return x.detach().reshape(-1, x.shape[-1]).contiguous()


@inlined_sum
def _sum_of_logarithms(weight):
    total = 0.0
    for j in range(weight.shape[0]):
        total += log1p(weight[j])
    return total


@inlined
def _law_given(sides, places, missing, came, log_count, rarer, usual):
    """The law of a row for which it is already known."""
    for j in range(sides.end):
        i = places[sides.place[j]]
        rarer[j] = missing[i] if j < sides.above else came[i]
        usual[j] = came[i] if j < sides.above else missing[i]
    return Law(sides, rarer[: sides.end], usual[: sides.end], log_count)


@inlined
def _law_found(sides, places, depth, room, missing, came, rarer, usual):
    """The law of a row that has some spread, which is also stored."""
    s = room.of_units[3]
    circle = walk(sides, depth, room.of_nodes[3:], s)
    rarer_given_count(sides, circle, s, rarer)
    for j in range(sides.end):
        usual[j] = 1.0 - rarer[j]
        i = places[sides.place[j]]
        missing[i], came[i] = (rarer[j], usual[j]) if j < sides.above else (usual[j], rarer[j])
    log_count = np.log(circle.chance) + _sum_of_logarithms(sides.weight[: sides.end])
    return Law(sides, rarer[: sides.end], usual[: sides.end], log_count)


@kernel
def _inclusion_rows(first, last, theta, k, given, depth, of_rows, left, result):
    """``of_rows`` has results that products reuse, see :func:`.reference.order_inclusion`."""
    tilts, log_count, missing, came, ends = of_rows
    n, skipped = theta.shape[1], 0
    places, finite, drawn = np.empty(n, np.int64), np.empty(n), np.zeros(n, np.bool_)
    rarer, usual, fate, room = np.empty(n), np.empty(n), np.empty(n), space(n, 1, 7)
    for r in range(first, last):
        count, size = gather(theta[r], k[r], places, finite)
        left[r] = False
        for i in range(n):
            result[r, i] = 1.0 if theta[r, i] > 0 and size >= 0 else 0.0 if size >= 0 else np.nan
        if not 0 < size < count:
            for j in range(count):
                result[r, places[j]] = 1.0 if size > 0 else 0.0
            continue
        if not given:
            ends[r, 0] = np.nan
            tilts[r, 0], tilts[r, 1] = solve_tilt(finite[:count], size)
        sides = seen_from_tilt(finite[:count], drawn, size, tilts[r, 0], tilts[r, 1], room)
        if given:
            law = _law_given(sides, places, missing[r], came[r], log_count[r], rarer, usual)
        elif sides.curvature > LEAST_SPREAD:
            law = _law_found(sides, places, depth, room, missing[r], came[r], rarer, usual)
            log_count[r] = law.log_count
        else:
            left[r] = True
            skipped += 1
            continue
        rarer_fates(law, ends[r], depth, room, fate)
        for j in range(count):
            result[r, places[sides.place[j]]] = 1.0 - fate[j] if j < sides.above else fate[j]
    return skipped


@kernel
def _product_rows(first, last, theta, k, depth, of_rows, vector, changes, left, result):
    """``changes`` are those of units given N = k if the recursion has found the law of a row, and otherwise empty."""
    (tilts, log_count, missing, came, ends), given = of_rows, changes.size > 0
    n, skipped = theta.shape[1], 0
    places, finite, drawn = np.empty(n, np.int64), np.empty(n), np.zeros(n, np.bool_)
    rarer, usual, h, change, found = np.empty(n), np.empty(n), np.empty(n), np.empty(n), np.empty(n)
    room = space(n, 1, 10)
    for r in range(first, last):
        count, size = gather(theta[r], k[r], places, finite)
        left[r] = False
        result[r, :] = 0.0
        if not 0 < size < count:
            continue
        sides = seen_from_tilt(finite[:count], drawn, size, tilts[r, 0], tilts[r, 1], room)
        if not given and not sides.curvature > LEAST_SPREAD:
            left[r] = True
            skipped += 1
            continue
        law = _law_given(sides, places, missing[r], came[r], log_count[r], rarer, usual)
        _fill_vector(law, places, vector[r], h)
        if given:
            for j in range(count):
                change[j] = (
                    -changes[r, places[sides.place[j]]] if j < sides.above else changes[r, places[sides.place[j]]]
                )
        else:
            s = room.of_units[3]
            covariances(sides, walk(sides, depth, room.of_nodes[3:], s), s, h, rarer, change)
        changes_of_rarer_fates(law, ends[r], depth, room, h, change, found)
        for j in range(count):
            result[r, places[sides.place[j]]] = -found[j] if j < sides.above else found[j]
    return skipped


@inlined
def _fill_vector(law, places, vector, h):
    """The vector in terms of rarer fates, less its mean, which changes no product; this makes terms smaller."""
    sides = law.sides
    total, weights = 0.0, np.finfo(np.float64).tiny
    for j in range(sides.end):
        h[j] = vector[places[sides.place[j]]]
        weight = law.rarer[j] * law.usual[j]
        total += weight * h[j]
        weights += weight
    for j in range(sides.end):
        h[j] -= total / weights
        h[j] = -h[j] if j < sides.above else h[j]


def order_inclusion(
    theta: Tensor, k: Tensor, noise: str, depth: float
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    rows = len(theta)
    if noise != "logistic":
        return _inclusion_by_arrivals(theta, k, noise, depth)
    result, missing, came = torch.empty_like(theta), torch.zeros_like(theta), torch.zeros_like(theta)
    tilt, ends, log_count = theta.new_zeros(rows, 2), theta.new_zeros(rows, 2), theta.new_zeros(rows)
    found = tilt, log_count, missing, came, ends
    some = _run_inclusion(theta, k, False, depth, found, result)
    if some is not None:
        law = _law_of_recursion(theta[some], k[some])
        again = torch.empty_like(theta[some])
        _run_inclusion(theta[some], k[some], True, depth, law, again)
        result[some] = again
        for all_rows, few in zip(found, law, strict=True):
            all_rows[some] = few
    return result, *found


def _inclusion_by_arrivals(
    theta: Tensor, k: Tensor, noise: str, depth: float
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    result, ends, curvature = torch.empty_like(theta), theta.new_zeros(len(theta), 2), theta.new_zeros(len(theta))
    arguments = (x.numpy() for x in (ends, curvature, result))
    over_rows(
        loops(noise)[0], len(theta), STEPS_OF_ARRIVALS * theta.numel(), theta.numpy(), k.numpy(), depth, *arguments,
    )  # fmt: skip
    none = theta.new_empty(len(theta), 0)
    return result, torch.zeros_like(ends), curvature, none, none.clone(), ends


def _product_by_arrivals(
    theta: Tensor, k: Tensor, curvature: Tensor, ends: Tensor, vector: Tensor, noise: str, depth: float
) -> Tensor:
    result = torch.empty_like(theta)
    arguments = (x.numpy() for x in (ends, curvature, vector, result))
    over_rows(
        loops(noise)[1], len(theta), 2 * STEPS_OF_ARRIVALS * theta.numel(), theta.numpy(), k.numpy(), depth, *arguments,
    )  # fmt: skip
    return result


def _run_inclusion(
    theta: Tensor, k: Tensor, given: bool, depth: float, law: tuple[Tensor, ...], result: Tensor
) -> Tensor | None:
    """Runs the loop; returns the rows that it has left."""
    left = torch.empty_like(k, dtype=torch.bool)
    arguments = theta.numpy(), k.numpy(), given, depth, tuple(x.numpy() for x in law), left.numpy(), result.numpy()
    skipped = over_rows(_inclusion_rows, len(theta), STEPS_OF_INCLUSION * theta.numel(), *arguments)
    return left if skipped else None


def _law_of_recursion(theta: Tensor, k: Tensor) -> tuple[Tensor, ...]:
    """The results of the loop for other rows: the tilt, log P(N = k) and so on, but no ends."""
    tilt, log_count, missing, came = bernoulli_count(theta, k)
    return tilt, log_count.sum(-1), missing, came, torch.full_like(tilt, torch.nan)


def order_inclusion_product(
    theta: Tensor,
    k: Tensor,
    tilt: Tensor,
    log_count: Tensor,
    missing: Tensor,
    came: Tensor,
    ends: Tensor,
    vector: Tensor,
    noise: str,
    depth: float,
) -> Tensor:
    if noise != "logistic":
        return _product_by_arrivals(theta, k, log_count, ends, vector, noise, depth)
    law, result = (tilt, log_count, missing, came, ends), torch.empty_like(theta)
    some = _run_product(theta, k, depth, law, vector, vector[:0], result)
    if some is not None:
        few, sizes, given, again = theta[some], k[some], [x[some] for x in law], torch.empty_like(theta[some])
        change = bernoulli_count_derivative(few, sizes, given[0], vector[some])
        _run_product(few, sizes, depth, tuple(given), vector[some], change, again)
        result[some] = again
    return result


def _run_product(
    theta: Tensor,
    k: Tensor,
    depth: float,
    law: tuple[Tensor, ...],
    vector: Tensor,
    change: Tensor,
    result: Tensor,
) -> Tensor | None:
    left = torch.empty_like(k, dtype=torch.bool)
    of_rows, results = tuple(x.numpy() for x in law), (x.numpy() for x in (vector, change, left, result))
    steps = STEPS_OF_PRODUCT * theta.numel()
    skipped = over_rows(_product_rows, len(theta), steps, theta.numpy(), k.numpy(), depth, of_rows, *results)
    return left if skipped else None
