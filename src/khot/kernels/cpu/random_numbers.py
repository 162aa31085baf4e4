"""The random numbers of :mod:`khot.kernels.random_numbers.philox` inside numba kernels, one place at a time.

These are functions of a seed, a draw, a row and a place, all of them integers; words are uint64 below 2^32.
"""

# mypy: disable-error-code="no-untyped-def"

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from .loops import inlined, per_row

U = np.uint64
_WORD, _HALF = U(0xFFFFFFFF), U(32)
_FIRST_FACTOR, _SECOND_FACTOR = U(0xD2511F53), U(0xCD9E8D57)
_FIRST_STEP, _SECOND_STEP = U(0x9E3779B9), U(0xBB67AE85)


@inlined
def random_words(seed, draw, row, place):
    """Four numbers of 32 random bits."""
    a, b, c, d = U(place), U(row), U(draw), U(0)  # numba promotes uint64 and int64 to float
    low, high = U(seed) & _WORD, U(seed) >> _HALF
    for _ in range(10):
        first, third = a * _FIRST_FACTOR, c * _SECOND_FACTOR
        a, b = (third >> _HALF) ^ b ^ low, third & _WORD
        c, d = (first >> _HALF) ^ d ^ high, first & _WORD
        low, high = (low + _FIRST_STEP) & _WORD, (high + _SECOND_STEP) & _WORD
    return a, b, c, d


@inlined
def uniform(high, low):
    """A float64 number uniform on [0, 1), with 53 random bits."""
    return np.float64((high << U(21)) | (low >> U(11))) * 2.0**-53


@inlined
def uniform_pair(seed, draw, row, place):
    """The random numbers of an even unit and of the odd unit after it, which share a place in the counter."""
    words = random_words(seed, draw, row, place)
    return uniform(words[0], words[1]), uniform(words[2], words[3])


def empty_draws(like: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """A tensor of a dtype that loops are compiled for: this one, or bool, from which the draws must be converted."""
    return like.new_empty(shape, dtype=dtype if dtype in (torch.float32, torch.float64) else torch.bool)


@per_row
def fill_uniform(seed, draw, row, u):
    """Numbers uniform on [0, 1) for the units of a row, as in ``uniform_rows``."""
    n = u.shape[0]
    for place in range(n // 2):
        u[2 * place], u[2 * place + 1] = uniform_pair(seed, draw, row, place)
    if n % 2 > 0:
        u[n - 1] = uniform_pair(seed, draw, row, n // 2)[0]
