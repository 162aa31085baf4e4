"""Order sampling's integrals as loops over rows on a CPU.

A row is taken without its infinite positions, whose units are certain.
"""

# mypy: disable-error-code="no-untyped-def"

import functools
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..numba_tools import kernel, over_rows, per_row
from . import numba_log_exponential, numba_logistic
from .numba_inclusion import inclusion, product, room
from .numba_range import MAX_NODES

STEPS_OF_LOG_PROB, STEPS_OF_INCLUSION = 100, 200  # of work for a unit: evaluations of the integrand, more or less


@per_row
def _open_units(theta, k, places, finite):
    """Gathers finite positions; their number, and how many of them are to be drawn, -1 where there is a NaN."""
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


def _log_prob_rows(log_prob):
    """The loop for a noise."""

    def rows(first, last, theta, k, value, with_slopes, result, slopes):
        n = theta.shape[1]
        places, units = np.empty(n, np.int64), np.empty(n, np.int64)
        finite, weight, slope, drawn = np.empty(n), np.empty(n), np.empty(n), np.empty(n, np.bool_)
        nodes = np.empty((7, MAX_NODES + 2))
        of_nodes = (nodes[0], nodes[1], nodes[2], nodes[3], nodes[4], nodes[5], nodes[6])
        for r in range(first, last):
            row = r % theta.shape[0]
            count, left = _open_units(theta[row], k[row], places, finite)
            if with_slopes:
                slopes[r] = 0.0
            members = 0
            for i in range(count):
                drawn[i] = value[r, places[i]] != 0
                members += drawn[i]
            if count == 0 and left < 0:
                result[r] = np.nan
            elif _contradicts(theta[row], value[r], count, left):
                result[r] = -np.inf
            elif not 0 < left < count:
                result[r] = 0.0
            elif members == 0:
                result[r] = 0.0
            else:
                result[r] = log_prob(finite, drawn, count, members, with_slopes, slope, units, weight, of_nodes)
                if with_slopes:
                    for i in range(count):
                        slopes[r, places[i]] = slope[i]

    return rows


@functools.cache
def _log_prob_loop(noise: str, dtype: torch.dtype) -> Any:
    of_row = {"logistic": numba_logistic.log_prob, "log_exponential": numba_log_exponential.log_prob}[noise]
    return kernel(_log_prob_rows(of_row), noise)


def order_log_prob(
    theta: Tensor, k: Tensor, value: Tensor, noise: str, with_slopes: bool
) -> tuple[Tensor, Tensor]:
    shape = torch.broadcast_shapes(theta.shape, value.shape)
    batch, n = theta.shape[:-1], shape[-1]
    if shape[len(shape) - theta.ndim : -1] != batch:  # the rows of all positions are not those of each sample
        theta, k = theta.expand(shape), k.expand(shape[:-1])
    positions, values = _rows(theta.double()), _rows(value.expand(shape))
    sizes = k.expand(theta.shape[:-1]).reshape(-1).contiguous()
    result = positions.new_empty(len(values))
    slopes = positions.new_empty(values.shape if with_slopes else (0, n))
    over_rows(
        _log_prob_loop(noise, value.dtype), len(values), STEPS_OF_LOG_PROB * values.numel(), positions.numpy(),
        sizes.numpy(), values.numpy(), with_slopes, result.numpy(), slopes.numpy(),
    )  # fmt: skip
    return result.view(shape[:-1]), slopes.view(shape) if with_slopes else slopes.new_empty(*shape[:-1], 0)


@kernel
def _inclusion_rows(first, last, theta, k, size, result):
    n = theta.shape[1]
    places, finite, probs, space = np.empty(n, np.int64), np.empty(n), np.empty(n), room(n, size, False)
    for r in range(first, last):
        count, left = _open_units(theta[r], k[r], places, finite)
        for i in range(n):
            result[r, i] = np.nan if left < 0 and count == 0 else 1.0 if theta[r, i] > 0 else 0.0
        if 0 < left < count:
            inclusion(finite, count, left, space, probs)
        else:
            probs[:count] = 1.0 if left > 0 else 0.0
        for i in range(count):
            result[r, places[i]] = probs[i]


@kernel
def _product_rows(first, last, theta, k, size, vector, result):
    n = theta.shape[1]
    places, finite, given, found = np.empty(n, np.int64), np.empty(n), np.empty(n), np.empty(n)
    space = room(n, size, True)
    for r in range(first, last):
        count, left = _open_units(theta[r], k[r], places, finite)
        result[r] = 0.0
        if 0 < left < count:
            for i in range(count):
                given[i] = vector[r, places[i]]
            product(finite, count, left, space, given, found)
            for i in range(count):
                result[r, places[i]] = found[i]


def order_inclusion(theta: Tensor, k: Tensor, noise: str) -> Tensor:
    positions, sizes, size = _positions(theta, k)
    result = torch.empty_like(positions)
    steps = STEPS_OF_INCLUSION * positions.numel()
    over_rows(_inclusion_rows, len(positions), steps, positions.numpy(), sizes.numpy(), size, result.numpy())
    return result.view(theta.shape)


def order_inclusion_product(theta: Tensor, k: Tensor, vector: Tensor, noise: str) -> Tensor:
    positions, sizes, size = _positions(theta, k)
    given, result = _rows(vector.double()), torch.empty_like(positions)
    steps = 2 * STEPS_OF_INCLUSION * positions.numel()
    over_rows(
        _product_rows, len(positions), steps, positions.numpy(), sizes.numpy(), size, given.numpy(), result.numpy()
    )
    return result.view(theta.shape)


def _positions(theta: Tensor, k: Tensor) -> tuple[Tensor, Tensor, int]:
    """Rows, their k, and the largest number of units of the rarer kind, drawn or not."""
    positions, sizes = _rows(theta.double()), k.expand(theta.shape[:-1]).reshape(-1).contiguous()
    return positions, sizes, max(1, int(sizes.minimum(theta.shape[-1] - sizes).max()))


def _rows(x: Tensor) -> Tensor:
    return x.detach().reshape(-1, x.shape[-1]).contiguous()
