"""Tournaments on a CPU, one after the other: a sort, and duels in place.

As in :mod:`.reference`, units beyond the row fill it up to a power of two.
"""

# mypy: disable-error-code="no-untyped-def"

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ..numba_draws import empty_draws
from ..numba_tools import kernel, over_rows, per_row
from ..philox_numba import random_words, uniform
from .reference import SMALLEST_BLOCK

STEPS = 32  # of work for a unit, more or less
BITS = 63  # of a random key
TINY = np.finfo(np.float64).tiny


@per_row
def _balance(p, k, balanced):
    """:func:`khot.kernels.tournament.balance` of a row."""
    total = spread = 0.0
    for i in range(p.shape[0]):
        each = np.float64(p[i])
        total += each
        spread += each * (1.0 - each)
    share = min(max((k - total) / max(spread, TINY), -1.0), 1.0)
    for i in range(p.shape[0]):
        each = np.float64(p[i])
        balanced[i] = each + each * (1.0 - each) * share


@per_row
def _fill_keys(seed, draw, row, first_unit, key, luck):
    """Random bits with the number of a place in the last ones, and uniform numbers."""
    block = np.int64(key.shape[0])
    for place in range(block):
        a, b, c, d = random_words(seed, draw, row, first_unit + place)
        bits = np.int64((a << np.uint64(31)) | (b >> np.uint64(1)))
        key[place] = (bits & -block) | place
        luck[place] = uniform(c, d)


@per_row
def _sort(key, shift, begin, ordered):
    """Sorts random keys by their first bits, of which few are the same, and then those few by insertion."""
    begin[:] = 0
    for i in range(key.shape[0]):
        begin[(key[i] >> shift) + 1] += 1
    for i in range(1, begin.shape[0]):
        begin[i] += begin[i - 1]
    for i in range(key.shape[0]):
        bucket = key[i] >> shift
        ordered[begin[bucket]] = key[i]
        begin[bucket] += 1
    for i in range(1, ordered.shape[0]):
        new, j = ordered[i], i
        while j > 0 and ordered[j - 1] > new:
            ordered[j] = ordered[j - 1]
            j -= 1
        ordered[j] = new


@per_row
def _play(p, unit, luck, fate):
    """Writes the fates of all units, whose order and probabilities in that order it uses up."""
    half = p.shape[0] // 2
    while half > 0:
        for i in range(half):
            left, right = p[i], p[i + half]
            excess = (max(left, right) - 1.0) + min(left, right)
            chosen = excess >= 0
            weight = 1.0 - left if chosen else right
            total = weight + (1.0 - right if chosen else left)
            right_goes_on = (luck[i + half] * total < weight) != chosen
            decided = unit[i] if right_goes_on else unit[i + half]
            unit[i] = unit[i + half] if right_goes_on else unit[i]
            fate[decided] = chosen
            p[i] = excess if chosen else total
        half //= 2
    fate[unit[0]] = p[0] > 0.5


@kernel
def _tournaments(first, last, probs, k, seed, first_draw, first_row, first_unit, block, x):
    rows, n = probs.shape
    shift = BITS
    while 1 << (BITS - shift) < block:
        shift -= 1
    balanced, luck, p, fate = np.empty(n), np.empty(block), np.empty(block), np.empty(block, np.bool_)
    key, ordered, begin = np.empty(block, np.int64), np.empty(block, np.int64), np.empty(block + 1, np.int64)
    for task in range(first, last):
        draw, row = task // rows, task % rows
        _balance(probs[row], k[row], balanced)
        _fill_keys(seed[0], first_draw + draw, first_row + row, first_unit, key, luck)
        _sort(key, shift, begin, ordered)
        for i in range(block):
            ordered[i] &= block - 1
            p[i] = balanced[ordered[i]] if ordered[i] < n else 0.0
        _play(p, ordered, luck, fate)
        for i in range(n):
            x[task, i] = fate[i]
    return 0


def pivotal_draw(
    probs: Tensor, k: Tensor, seed: Tensor, first: Sequence[int], draws: int, dtype: torch.dtype
) -> Tensor:
    *batch, n = probs.shape
    rows = probs.detach() if probs.dtype in (torch.float32, torch.float64) else probs.detach().double()
    rows = rows.reshape(-1, n).contiguous()
    block = max(SMALLEST_BLOCK, 1 << (n - 1).bit_length())
    x = empty_draws(rows, (draws * len(rows), n), dtype)
    sizes = k.reshape(-1).contiguous()  # of an expanded design the loop would else be compiled once more
    arguments = (v.numpy() for v in (rows, sizes, seed))
    over_rows(_tournaments, len(x), STEPS * len(x) * block, *arguments, *first, block, x.numpy())
    return x.view(draws, *batch, n).to(dtype)
