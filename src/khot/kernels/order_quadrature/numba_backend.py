"""Order sampling's integrals as loops over rows on a CPU.

A row is taken without its infinite positions, whose units are certain.
"""

# mypy: disable-error-code="no-untyped-def"

import functools
from typing import Any

import numpy as np
import torch
from torch import Tensor

from khot._tracing import broadcast_shapes

from ..numba_tools import kernel, over_rows, per_row, specialised
from . import numba_log_exponential, numba_logistic
from .numba_inclusion import inclusion, product, seen_from_tilt
from .numba_logistic import space

STEPS_OF_LOG_PROB, STEPS_OF_INCLUSION, STEPS_OF_PRODUCT = 50, 50, 100  # of work for a unit, more or less


@per_row
def _gather(theta, k, places, finite):
    """Gathers the finite positions; their number, and how many of them are to be drawn, -1 where there is a NaN."""
    count = 0
    for i in range(theta.shape[0]):
        if np.isfinite(theta[i]):
            places[count], finite[count] = i, theta[i]
            count += 1
        elif theta[i] == np.inf:
            k -= 1
        elif theta[i] != -np.inf:
            return 0, -1
    return count, k


@per_row
def _contradicts(theta, value, count, k):
    """Whether a value has another fate for a certain unit; all are certain if all that are left are drawn, or none."""
    for i in range(theta.shape[0]):
        drawn = value[i] != 0
        if np.isfinite(theta[i]):
            if (k <= 0 and drawn) or (k >= count and not drawn):
                return True
        elif drawn != (theta[i] > 0):
            return True
    return False


def _log_prob_loop(of_row):
    """The loop for a noise."""

    @per_row
    def of_open(finite, value, places, count, depth, with_slopes, slope, drawn, room, slopes):
        members = 0
        for i in range(count):
            drawn[i] = value[places[i]] != 0
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
            count, left = _gather(theta[row], k[row], places, finite)
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
    of_row = {"logistic": numba_logistic.log_prob, "log_exponential": numba_log_exponential.log_prob}[noise]
    with specialised(noise):
        return _log_prob_loop(of_row)


def order_log_prob(
    theta: Tensor, k: Tensor, value: Tensor, noise: str, depth: float, with_slopes: bool
) -> tuple[Tensor, Tensor]:
    shape = broadcast_shapes(theta.shape, value.shape)
    batch, n = theta.shape[:-1], shape[-1]
    if shape[len(shape) - theta.ndim : -1] != batch:  # the rows of all positions are not those of each sample
        theta, k = theta.expand(shape), k.expand(shape[:-1])
    if value.dtype not in (torch.float32, torch.float64):
        value = value.float()
    positions, values = _rows(theta.double()), _rows(value.expand(shape))
    sizes = k.expand(theta.shape[:-1]).reshape(-1).contiguous()
    result = positions.new_empty(len(values))
    slopes = positions.new_empty(values.shape if with_slopes else (1, n))
    over_rows(
        _log_prob_loops(noise), len(values), STEPS_OF_LOG_PROB * values.numel(), positions.numpy(), sizes.numpy(),
        values.numpy(), depth, with_slopes, result.numpy(), slopes.numpy(),
    )  # fmt: skip
    return result.view(shape[:-1]), slopes.view(shape) if with_slopes else slopes.new_empty(*shape[:-1], 0)


def _rows(x: Tensor) -> Tensor:
    return x.detach().reshape(-1, x.shape[-1]).contiguous()


@per_row
def _gather_three(places, count, a, b, c, of_a, of_b, of_c):
    for i in range(count):
        of_a[i], of_b[i], of_c[i] = a[places[i]], b[places[i]], c[places[i]]


@kernel
def _inclusion_rows(first, last, theta, k, tilts, log_counts, missing, came, depth, result, ends):
    n = theta.shape[1]
    places, finite, found = np.empty(n, np.int64), np.empty(n), np.empty(n)
    out, included, drawn, room = np.empty(n), np.empty(n), np.zeros(n, np.bool_), space(n, 0, 3)
    for r in range(first, last):
        count, left = _gather(theta[r], k[r], places, finite)
        ends[r, :] = np.nan
        if not 0 < left < count:
            result[r, :] = came[r]
            continue
        _gather_three(places, count, missing[r], came[r], came[r], out, included, included)
        sides = seen_from_tilt(finite[:count], drawn, left, tilts[r, 0], tilts[r, 1], room)
        log_count = log_counts[r, 0] + log_counts[r, 1]
        inclusion(sides, included, out, log_count, ends[r], depth, room, found)
        result[r, :] = came[r]
        for i in range(count):
            result[r, places[i]] = found[i]
    return 0


def order_inclusion(
    theta: Tensor, k: Tensor, tilt: Tensor, log_count: Tensor, missing: Tensor, came: Tensor, depth: float
) -> tuple[Tensor, Tensor]:
    result, ends = torch.empty_like(theta), theta.new_empty(len(theta), 2)
    arguments = (x.numpy() for x in (theta, k, tilt, log_count, missing, came))
    steps = STEPS_OF_INCLUSION * theta.numel()
    over_rows(_inclusion_rows, len(theta), steps, *arguments, depth, result.numpy(), ends.numpy())
    return result, ends


@kernel
def _product_rows(first, last, theta, k, tilts, log_counts, missing, came, ends, vector, change, depth, result):
    n = theta.shape[1]
    places, finite, found, given = np.empty(n, np.int64), np.empty(n), np.empty(n), np.empty((4, n))
    drawn, room = np.zeros(n, np.bool_), space(n, 0, 6)
    for r in range(first, last):
        count, left = _gather(theta[r], k[r], places, finite)
        result[r, :] = 0.0
        if not 0 < left < count:
            continue
        _gather_three(places, count, missing[r], came[r], vector[r], given[0], given[1], given[2])
        _gather_three(places, count, change[r], change[r], change[r], given[3], given[3], given[3])
        sides = seen_from_tilt(finite[:count], drawn, left, tilts[r, 0], tilts[r, 1], room)
        log_count = log_counts[r, 0] + log_counts[r, 1]
        product(sides, given[1], given[0], log_count, ends[r], depth, room, given[2], given[3], found)
        for i in range(count):
            result[r, places[i]] = found[i]
    return 0


def order_inclusion_product(
    theta: Tensor, k: Tensor, tilt: Tensor, log_count: Tensor, missing: Tensor, came: Tensor, ends: Tensor,
    vector: Tensor, change: Tensor, depth: float,
) -> Tensor:  # fmt: skip
    result = torch.empty_like(theta)
    arguments = (x.numpy() for x in (theta, k, tilt, log_count, missing, came, ends, vector, change))
    over_rows(_product_rows, len(theta), STEPS_OF_PRODUCT * theta.numel(), *arguments, depth, result.numpy())
    return result
