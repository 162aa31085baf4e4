r"""Units given their number of ones in long rows, in numba, by nodes of a characteristic function; draws by halves.

A row whose count has almost no variance, in which nodes lose digits, is left to other code: its results are NaN.

Draws. The units are independent, with k ones on average. The first half is drawn without a condition. With c ones
there, the draw is accepted with a probability in proportion to :math:`L(k - c)`, where L is the law of the number of
ones in the second half. The same is done with the second half, its first quarter and so on. With B the number of ones
of all units, this takes :math:`\max L / P(B = k)` attempts on average, whatever has been drawn before. Units are in the
order of their variance, so that a half of the rest has at least half of its variance. So the attempts of each half are
at most some :math:`\sqrt 2` times as many as those of the one before it, and all draw about 2.4 n units.
"""

# mypy: disable-error-code="no-untyped-def"

import math

import numpy as np
import torch
from torch import Tensor

from ..cpu.loops import inlined, kernel, over_rows, per_row, summed
from ..cpu.maths import EXP
from ..cpu.random_numbers import uniform_pair
from ..cpu.rows import total_of
from ..threshold import solve_threshold
from .numba_nodes import MOST, covariance_times, given_count, law_of_count, room

CLOSE_MEAN = 0.25  # largest distance of the expected number of ones from k for which nodes are well placed
FACTORS = 512  # this many numbers of at least a half have a product that is a normal number
NEGLIGIBLE = 1e-30  # probabilities at the ends of a law that do not count
KINDS = 64  # classes of units by their variance

_exp = EXP[np.float64]


@summed
def fates(theta, tilt, p, q):
    """Writes the probabilities of one and of zero; returns the product of the larger ones."""
    product = 1.0
    for i in range(theta.shape[0]):
        z = theta[i] - tilt
        e = _exp(-abs(z))
        s = 1.0 / (1.0 + e)
        few = e * s
        p[i] = s if z > 0 else few
        q[i] = few if z > 0 else s
        product *= s
    return product


@per_row
def _chances(theta, tilt, p, q):
    """Writes the probabilities of one and of zero; returns the sum of ``log(1 + e^-|z|)``."""
    total = 0.0
    for start in range(0, theta.shape[0], FACTORS):
        stop = min(start + FACTORS, theta.shape[0])
        total -= math.log(fates(theta[start:stop], tilt, p[start:stop], q[start:stop]))
    return total


@kernel
def _law_rows(begin, end, theta, k, tilt, log_total, complement, inclusion):
    n = theta.shape[1]
    p, q, at = np.empty(n), np.empty(n), room()
    for r in range(begin, end):
        log_size = _chances(theta[r], tilt[r], p, q)
        nodes, chance = law_of_count(p, q, k[r], at)
        if nodes == 0 or not abs(total_of(p) - k[r]) <= CLOSE_MEAN:
            tilt[r] = log_total[r] = np.nan
            complement[r, :] = inclusion[r, :] = np.nan
            continue
        log_total[r] = math.log(chance) + log_size
        given_count(p, q, nodes, at, complement[r], inclusion[r])
    return 0


def bernoulli_count(logits: Tensor, _: Tensor, k: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    tilt, (rows, n) = solve_threshold(logits, k), logits.shape
    results = tilt, torch.empty_like(tilt), torch.empty_like(logits), torch.empty_like(logits)
    over_rows(_law_rows, rows, rows * n * 16, logits.numpy(), k.numpy(), *(x.numpy() for x in results))
    return results


@per_row
def _changes(p, q, g, t):
    """Writes how much each p grows along the cotangents, minus a multiple of pq, which changes no conditional law."""
    total = scale = 0.0
    for i in range(p.shape[0]):
        t[i] = p[i] * q[i] * g[i]
        total += t[i]
        scale += p[i] * q[i]
    if scale > 0:
        for i in range(p.shape[0]):
            t[i] -= p[i] * q[i] * (total / scale)


@kernel
def _derivative_rows(begin, end, theta, k, tilt, g, result):
    n = theta.shape[1]
    p, q, t, at, sizes = np.empty(n), np.empty(n), np.empty(n), room(), np.empty((MOST, n))
    for r in range(begin, end):
        _chances(theta[r], tilt[r], p, q)
        nodes, _ = law_of_count(p, q, k[r], at)
        if nodes == 0:
            result[r, :] = np.nan
            continue
        _changes(p, q, g[r], t)
        covariance_times(p, q, t, nodes, at, sizes, result[r])
    return 0


def bernoulli_count_derivative(
    logits: Tensor, _: Tensor, k: Tensor, tilt: Tensor, complement: Tensor, inclusion: Tensor, g: Tensor
) -> Tensor:
    result = torch.empty_like(logits)
    arguments = (x.contiguous().numpy() for x in (logits, k, tilt, g, result))
    over_rows(_derivative_rows, len(k), logits.numel() * 32, *arguments)
    return result


@inlined
def _kind(theta, tilt):
    """The larger, the more variance a unit has; units of a kind have variances that differ by a factor of at most 4."""
    return KINDS - 1 - int(min(abs(theta - tilt), KINDS - 1.0))


@per_row
def _by_variance(theta, tilt, p, order, sorted_p):
    """Writes the units in the order of their kinds."""
    ends = np.zeros(KINDS + 1, np.int64)
    for i in range(p.shape[0]):
        ends[_kind(theta[i], tilt) + 1] += 1
    for kind in range(KINDS):
        ends[kind + 1] += ends[kind]
    for i in range(p.shape[0]):
        kind = _kind(theta[i], tilt)
        order[ends[kind]], sorted_p[ends[kind]] = i, p[i]
        ends[kind] += 1


@summed
def _mixed(same, less, p, result):
    """The law of a count with one more unit."""
    for m in range(result.shape[0]):
        result[m] = (1.0 - p) * same[m] + p * less[m]


@per_row
def _laws_of_rest(p, laws, peaks):
    """Writes the laws of the numbers of ones among the last n / 2, n / 4, ..., 1 and 0 units, and their largest values.

    Counts begin one place later.
    """
    n, first, last, level = p.shape[0], 1, 1, laws.shape[0] - 1
    law, other = np.zeros(laws.shape[1]), np.zeros(laws.shape[1])
    law[1] = 1.0
    for m in range(n // 2 + 1):
        if m == n >> level + 1:
            laws[level], peaks[level] = law, law.max()
            level -= 1
        if m < n // 2:
            last += 1
            _mixed(law[first : last + 1], law[first - 1 : last], p[n - 1 - m], other[first : last + 1])
            law, other = other, law
            while law[last] < NEGLIGIBLE:
                law[last] = other[last] = 0.0
                last -= 1
            while law[first] < NEGLIGIBLE:
                law[first] = other[first] = 0.0
                first += 1


@per_row
def _draw(p, laws, peaks, k, seed, draw, row, drawn):
    """Draws the units of a row."""
    n, left, start, place = p.shape[0], k, 0, 0
    for level in range(laws.shape[0]):
        stop, rest, share = n - (n >> level + 1), -1, 0.0
        while not 0 <= rest < laws.shape[1] - 1 or share >= laws[level, rest + 1]:
            rest = left
            for i in range(start, stop, 2):
                even, odd = uniform_pair(seed, draw, row, place)
                place += 1
                drawn[i] = even < p[i]
                rest -= drawn[i]
                if i + 1 < stop:
                    drawn[i + 1] = odd < p[i + 1]
                    rest -= drawn[i + 1]
            share = uniform_pair(seed, draw, row, place)[0] * peaks[level]
            place += 1
        left, start = rest, stop


@kernel
def _draw_tasks(begin, end, parts, theta, k, tilt, names, seed, out, is_lost):
    draws, _, n = out.shape
    p, q, sorted_p, order, drawn = np.empty(n), np.empty(n), np.empty(n), np.empty(n, np.int64), np.empty(n, np.bool_)
    levels = 0
    while n >> levels > 0:
        levels += 1
    laws, peaks = np.empty((levels, n // 2 + 2)), np.empty(levels)
    for task in range(begin, end):
        r, part = task // parts, task % parts
        _chances(theta[r], tilt[r], p, q)
        is_lost[r] = not abs(total_of(p) - k[r]) <= CLOSE_MEAN
        if not is_lost[r]:
            _by_variance(theta[r], tilt[r], p, order, sorted_p)
            _laws_of_rest(sorted_p, laws, peaks)
            for d in range(draws * part // parts, draws * (part + 1) // parts):
                _draw(sorted_p, laws, peaks, k[r], seed[0], d, names[r], drawn)
                for i in range(n):
                    out[d, r, order[i]] = drawn[i]
    return 0


def draw(logits: Tensor, k: Tensor, names: Tensor, seed: Tensor, parts: int, out: Tensor) -> Tensor:
    """Writes draws ``(draws, R, n)`` with the random numbers of rows of these numbers, in as many parts of each row.

    Returns:
        The rows ``(R,)`` that it leaves to other code.
    """
    draws, rows, n = out.shape
    lost = out.new_empty(rows)
    arguments = (x.contiguous().numpy() for x in (logits, k, solve_threshold(logits, k), names, seed, out, lost))
    over_rows(_draw_tasks, rows * parts, (64 * parts + 4 * draws) * rows * n, parts, *arguments)
    return lost
