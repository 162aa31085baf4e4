"""Draws of order sampling on a CPU: the ranks of a row in float64, and the k smallest of them by counting."""

# mypy: disable-error-code="no-untyped-def"

import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..cpu.loops import array_like, inlined, kernel, over_rows, per_row, specialised
from ..cpu.maths import EXP, LOG
from ..cpu.random_numbers import empty_draws, fill_uniform
from ..selection.numba_counting import SUSPECT, mark_largest
from .reference_draw import LARGEST_LOG, SMALLEST

STEPS = 16  # approximate work for a unit
FEW = 32  # units of a row that needs no guess of its k-th rank
exp, log = EXP[np.float64], LOG[np.float64]


@inlined
def _odds(u):
    return u / (1.0 - u)


@inlined
def _exponential(u):
    return -log(u)


# The exponential of a noise from a uniform number, by the name of the noise.
NOISES = {"logistic": _odds, "log_exponential": _exponential}


@functools.cache
def _loop(noise: str) -> Callable[..., int]:
    with specialised(noise):
        return _rows_of(_fill_ranks_of(NOISES[noise]))


def _fill_ranks_of(exp_noise: Any) -> Any:
    @per_row
    def fill_ranks(theta, centre, u):
        for i in range(u.shape[0]):
            z = min(max(theta[i] - centre, -LARGEST_LOG), LARGEST_LOG)
            certain = np.float64(theta[i] == np.inf) - np.float64(theta[i] == -np.inf)  # 100 more
            u[i] = -exp_noise(max(u[i], SMALLEST)) * exp(-(z + 100.0 * certain))

    return fill_ranks


def _rows_of(fill_ranks: Any) -> Callable[..., int]:
    def rows(first, last, theta, k, centre, seed, x):
        count, n = theta.shape
        u, t = np.empty(n), -1.0
        for task in range(first, last):
            draw, row = task // count, task % count
            fill_uniform(seed[0], draw, row, u)
            fill_ranks(theta[row], centre[row], u)
            found, _, _ = mark_largest(u, k[row], (math.e * t, t, t / math.e), SUSPECT, x[task])
            t = found if n > FEW else t  # rows are often alike; shorter ones would have to wait for each other
        return 0

    return kernel(rows)


def order_draw(
    theta: Tensor, k: Tensor, centre: Tensor, seed: Tensor, draws: int, dtype: torch.dtype, noise: str
) -> Tensor:
    *batch, n = theta.shape
    positions = theta.detach().double().reshape(-1, n).contiguous()
    x = empty_draws(positions, (draws * len(positions), n), dtype)
    # Contiguous numbers of rows, even for an expanded design, for which the loop would otherwise be compiled again.
    sizes, centres = (v.reshape(-1).contiguous() for v in (k, centre))
    arguments = map(Tensor.numpy, (sizes, centres, seed, x))
    over_rows(_loop(noise), len(x), STEPS * x.numel(), array_like(positions), *arguments)
    return x.view(draws, *batch, n).to(dtype)
