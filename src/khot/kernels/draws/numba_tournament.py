"""Tournaments on a CPU, one after the other: a sort, and duels in place.

A long row needs 13 bytes per unit beside the result. Its keys are first moved to parts that fit into a cache, and each
part is sorted there. The probabilities then overwrite the keys. The random numbers of the duels, which would be another
8 bytes per unit, are computed again when they are needed.
"""

# mypy: disable-error-code="no-untyped-def"

import numpy as np
import torch
from torch import Tensor

from ..cpu.loops import array_like, inlined, kernel, over_rows, per_row
from ..cpu.random_numbers import empty_draws, random_words, uniform

STEPS = 32  # approximate work for a unit
BITS = 63  # of a random key
# Units of the longest row that is sorted as a whole and keeps its random numbers. A part of a longer row has half as
# many on average, and this is 100 deviations more.
PART = 2**15
TINY = np.finfo(np.float64).tiny


@per_row
def _fill(seed, draw, row, start, block, key, luck):
    """Random bits that end in the number of a place, and uniform numbers, for places that begin at ``start``."""
    for i in range(key.shape[0]):
        place = start + i
        a, b, c, d = random_words(seed, draw, row, place)
        key[i] = (np.int64((a << np.uint64(31)) | (b >> np.uint64(1))) & -block) | place
        luck[i] = uniform(c, d)


@per_row
def _find_bounds(key, first, last, shift, bucket, bound):
    """Finds where the buckets of keys with equal first bits will begin, starting with number ``bucket``."""
    for i in range(bound.shape[0]):
        bound[i] = 0
    for i in range(first, last):
        bound[(key[i] >> shift) - bucket + 1] += 1
    bound[0] = first
    for i in range(1, bound.shape[0]):
        bound[i] += bound[i - 1]


@per_row
def _sort(key, first, last, shift, bucket, bound, ordered):
    """Sorts random keys by their first bits, in which few are equal, and then those few by insertion."""
    _find_bounds(key, first, last, shift, bucket, bound)
    for i in range(first, last):
        own = (key[i] >> shift) - bucket
        ordered[bound[own] - first] = key[i]
        bound[own] += 1
    for i in range(first, last):
        new, j = ordered[i - first], i
        while j > first and key[j - 1] > new:
            key[j] = key[j - 1]
            j -= 1
        key[j] = new


@per_row
def _take_to_parts(key, shift, bound, free):
    """Permutes keys so that those of each part are together: the key in hand takes the next free place of its part."""
    _find_bounds(key, 0, key.shape[0], shift, 0, bound)
    for part in range(bound.shape[0]):
        free[part] = bound[part]
    for part in range(bound.shape[0] - 1):
        while free[part] < bound[part + 1]:
            hand = key[free[part]]
            own = hand >> shift
            while own != part:
                place = free[own]
                free[own] += 1
                hand, key[place] = key[place], hand
                own = hand >> shift
            key[free[part]] = hand
            free[part] += 1


@per_row
def _line_up(key, block, probs, k, unit, p):
    """Units in the order of their keys, and their probabilities by :func:`khot.kernels.draws.balance`.

    ``p`` may use the memory of the keys.
    """
    total = spread = 0.0
    for i in range(probs.shape[0]):
        each = np.float64(probs[i])
        total += each
        spread += each * (1.0 - each)
    share = min(max((k - total) / max(spread, TINY), -1.0), 1.0)
    for place in range(key.shape[0]):
        own = key[place] & (block - 1)
        each = np.float64(probs[own])
        unit[place] = own
        p[place] = each + each * (1.0 - each) * share


@inlined
def _duels(p, unit, half, duels, luck, fate):
    """Writes the fates of the units that are decided; those that go on move to the first places."""
    for i in range(duels):
        left, right = p[i], p[i + half]
        excess = (max(left, right) - 1.0) + min(left, right)
        chosen = excess >= 0
        weight = 1.0 - left if chosen else right
        total = weight + (1.0 - right if chosen else left)
        right_goes_on = (luck[i] * total < weight) != chosen
        decided = unit[i] if right_goes_on else unit[i + half]
        unit[i] = unit[i + half] if right_goes_on else unit[i]
        fate[decided] = chosen
        p[i] = excess if chosen else total


@per_row
def _write(fate, x):
    for i in range(fate.shape[0]):
        x[i] = fate[i]


@kernel
def _tournaments(first, last, probs, k, seed, bits, x):
    rows, n = probs.shape
    is_long, block, shift, part_shift = n > PART, 1 << bits, BITS - bits, BITS
    parts, buckets = (2 * block // PART, PART // 2) if is_long else (1, block)
    while 1 << (BITS - part_shift) < parts:
        part_shift -= 1
    part, free, bound = np.zeros(parts + 1, np.int32), np.empty(parts + 1, np.int32), np.empty(buckets + 1, np.int32)
    ordered, luck = np.empty(min(n, PART), np.int64), np.empty(min(n, PART))
    key, unit, fate = np.empty(n, np.int64), np.empty(n, np.int32), np.empty(n, np.bool_)
    part[parts], p = n, key.view(np.float64)
    for task in range(first, last):
        draw, row = task // rows, task % rows
        for i in range(0, n, PART):
            _fill(seed[0], draw, row, i, block, key[i : i + PART], luck)
        if is_long:
            _take_to_parts(key, part_shift, part, free)
        for i in range(parts):
            _sort(key, part[i], part[i + 1], shift, i * buckets, bound, ordered)
        _line_up(key, block, probs[row], k[row], unit, p)
        count, half = n, block // 2
        while half > 0:
            if is_long:
                for i in range(half, count, PART):
                    some = ordered[: min(PART, count - i)]  # keys that are no longer needed
                    _fill(seed[0], draw, row, i, block, some, luck)
                    _duels(p[i - half :], unit[i - half :], half, some.shape[0], luck, fate)
            else:
                _duels(p, unit, half, count - half, luck[half:], fate)
            count, half = half, half // 2
        fate[unit[0]] = p[0] > 0.5
        _write(fate, x[task])
    return 0


def pivotal_draw(probs: Tensor, k: Tensor, seed: Tensor, draws: int, dtype: torch.dtype) -> Tensor:
    *batch, n = probs.shape
    rows = probs.detach() if probs.dtype in (torch.float32, torch.float64) else probs.detach().double()
    rows = rows.reshape(-1, n).contiguous()
    x = empty_draws(rows, (draws * len(rows), n), dtype)
    sizes = k.reshape(-1).contiguous()  # otherwise the loop would be compiled again for an expanded design
    arguments = array_like(rows), sizes.numpy(), seed.numpy(), (n - 1).bit_length(), x.numpy()
    over_rows(_tournaments, len(x), STEPS * len(x) * n, *arguments)
    return x.view(draws, *batch, n).to(dtype)
