r"""Order sampling with logistic noise in short rows, eight rows side by side.

As in :mod:`.numba_same_design`, the units that have arrived, given that there are k of them, are the same conditional
Poisson design at all times. A unit has weights a and b of not having arrived and of having arrived at time 0, the
larger of which is 1, see :mod:`khot.kernels.count.numba_table`: a table of counts gives the total of the weights of all
sets of k units, the inclusion probabilities m of the design and products with its covariance. At a time s,

.. math:: 1 - F_i = \frac{a_i}{a_i + b_i e^s}, \qquad P(N = k) = \text{total} \cdot e^{ks} / \prod_i (a_i + b_i e^s).

The nodes of the rule lie where P(N = k) is not negligible.
"""

# mypy: disable-error-code="no-untyped-def"

import math
from typing import NamedTuple

import numpy as np

from ..count.numba_table import bend, descend, empty_block, is_sound, lanes_of, row_of, tabulate, weigh_sizes, widest_of
from ..cpu.lanes import LANES, at, every, if_positive, put
from ..cpu.loops import by_lanes, inlined, kernel, per_row
from ..cpu.maths import EXP, LOG
from .numba_range import Array, density_of_logistic

exp, log = EXP[np.float64], LOG[np.float64]
INCLUSION, PRODUCT, LOG_PROB = range(3)  # what the loop computes
SLACK = 4.0  # in addition to the depth, for the largest P(N = k) and for sums of many tails
FACTORS = 4  # whose product is finite if the times are less than FARTHEST
FARTHEST, LARGEST_LOG = 150.0, 600.0
MOST_STEPS, MOST_NODES = 20, 1000


class Room(NamedTuple):
    """Vectors of the units, of the rows and of the nodes."""

    inverse: Array  # 1 / (a + b e^s)
    share: Array  # a m, or a for the units of a set and 0 for others
    result: Array
    change: Array  # a times the derivative of m
    both: Array  # a b g m
    pull: Array  # b g
    own: Array  # a g
    ends: Array  # the first times and the last ones
    nodes: Array  # their number, -1 for rows that are left
    size: Array  # k
    log_total: Array
    power: Array  # k - #{b > a}
    value: Array  # log P(N = k) at the ends
    slope: Array  # its derivative
    total: Array  # the integral of P(N = k) times the sum of the shares
    up: Array  # e^s
    chance: Array  # P(N = k) times the weight, without a factor of each unit


@per_row
def _room(n):
    units, rows, nodes = np.empty((7, n * LANES)), np.empty((8, 2 * LANES)), np.empty((2, MOST_NODES * LANES))
    return Room(
        units[0], units[1], units[2], units[3], units[4], units[5], units[6], rows[0], rows[1], rows[2], rows[3],
        rows[4], rows[5], rows[6], rows[7], nodes[0], nodes[1],
    )  # fmt: skip


@inlined
def _exchange(x, y, i):
    x[i], y[i] = y[i], x[i]


@per_row
def _orient(block, n):
    """What is counted in a row of few zeros becomes the units that have arrived."""
    for lane in range(LANES):
        if block.sign[lane] < 0:
            for i in range(lane, n * LANES, LANES):
                _exchange(block.zero, block.one, i)
                _exchange(block.out, block.included, i)


@by_lanes
def _exponentiate(x):
    for i in range(x.shape[0]):
        x[i] = exp(x[i])


@by_lanes
def _take_logarithms(x):
    for i in range(x.shape[0]):
        x[i] = log(x[i])


@inlined
def _is_open(block, i):
    """Whether a unit may arrive before or after others: one of its weights is 1."""
    return block.zero[i] * block.one[i] > 0


@per_row
def _place_ends(block, room, number, n, k, rows, depth):
    """Writes times beyond the nodes: where the asymptotes of log P(N = k) are negligible."""
    last_rise, last_fall, density, far = 0, 0, 0.0, depth + SLACK
    put(room.log_total, 0, at(block.total, 0))
    _take_logarithms(room.log_total[:LANES])
    for lane in range(LANES):
        sign, size, above, below = block.sign[lane], k[row_of(number, lane, rows)], 0.0, 0.0
        rise, fall, power = size, n - size, size
        for i in range(lane, n * LANES, LANES):
            z = sign * block.z[i]
            power -= z > 0
            if _is_open(block, i):
                above += max(z, 0.0)
                below += max(-z, 0.0)
            else:
                rise -= z > 0
                fall -= z < 0
        is_open = rise > 0 and fall > 0
        if is_open and (rise != last_rise or fall != last_fall):
            last_rise, last_fall, density = rise, fall, density_of_logistic(rise, fall, depth)
        room.size[lane], room.power[lane] = size, power
        room.ends[lane] = -(far + room.log_total[lane] + above) / rise if is_open else 0.0
        room.ends[LANES + lane] = (far + room.log_total[lane] + below) / fall if is_open else 0.0
        room.nodes[lane] = density if is_open else 0.0  # for now per unit of time


@inlined
def _evaluate(block, room, n, end):
    """Writes log P(N = k) and its derivative at the first times or at the last ones, of which it gets e^s."""
    up, product, came, filled = at(room.up, end), every(1.0), every(0.0), 0
    for i in range(n):
        b = at(block.one, i) * up
        both = at(block.zero, i) + b
        came, product = came + b / both, product * both
        if i % FACTORS == FACTORS - 1 or i == n - 1:
            put(room.inverse, filled, product)
            product, filled = every(1.0), filled + 1
    put(room.slope, end, at(room.size, 0) - came)
    _take_logarithms(room.inverse[: filled * LANES])
    value = at(room.log_total, 0) + at(room.size, 0) * at(room.ends, end)
    for i in range(filled):
        value = value - at(room.inverse, i)
    put(room.value, end, value)


@per_row
def _narrow(block, room, n, depth):
    """Moves times inwards, by Newton's method, to where log P(N = k) is less than this by at most 1: it is concave."""
    for _ in range(MOST_STEPS):
        is_done = True
        for i in range(2 * LANES):
            room.ends[i] = room.up[i] = min(max(room.ends[i], -FARTHEST), FARTHEST)
        _exponentiate(room.up[: 2 * LANES])
        for end in range(2):
            _evaluate(block, room, n, end)
        for i in range(2 * LANES):
            left = -(depth + SLACK) - room.value[i]
            if left > 1.0 and room.nodes[i % LANES] > 0:
                room.ends[i] += left / room.slope[i]
                is_done = False
        if is_done:
            break


@per_row
def _place_nodes(block, room, n, depth):
    """Writes the number of nodes of each row, -1 for rows that are left, and the nodes."""
    _narrow(block, room, n, depth)
    most, step, weight = 0, room.slope, room.value
    for lane in range(LANES):
        low, high, density = room.ends[lane], room.ends[LANES + lane], room.nodes[lane]
        count, farthest = int((high - low) * density) + 2 if density > 0 else 0, max(-low, high)
        is_near = farthest < FARTHEST and farthest * abs(room.power[lane]) < LARGEST_LOG
        if not (is_sound(block.total[lane]) and is_near and count <= MOST_NODES):
            count = -1
        room.nodes[lane], step[lane] = count, (high - low) / max(count - 1, 1)
        weight[lane] = step[lane] * block.total[lane]
        most = max(most, count)
    low, steps, power = at(room.ends, 0), at(step, 0), at(room.power, 0)
    for node in range(most):  # those after the last of a row have no weight
        s = low + every(float(node)) * steps
        put(room.up, node, s)
        put(room.chance, node, power * s)
    _exponentiate(room.up[: most * LANES])
    _exponentiate(room.chance[: most * LANES])
    for node in range(most):
        share = if_positive(at(room.nodes, 0) - every(float(node)), at(weight, 0), every(0.0))
        put(room.chance, node, at(room.chance, node) * share)
    return most


@inlined
def _begin_node(block, room, n, node):
    """The sum of the shares at a node, and P(N = k) times the weight; also writes the inverses."""
    up, one, chance, rate = at(room.up, node), every(1.0), at(room.chance, node), every(0.0)
    for i in range(n):
        a, b = at(block.zero, i), at(block.one, i)
        inverse = one / (a + b * up)
        put(room.inverse, i, inverse)
        rate = rate + at(room.share, i) * inverse
        chance = chance * (inverse * if_positive(b - a, up, one))
    return up, rate, chance


@per_row
def _add_fates(block, room, n, most):
    """Writes the integrals of P(N = k) F_i (sum_j (1 - F_j) m_j + (1 - F_i) m_i), and of P(N = k) times the sum."""
    total = every(0.0)
    for i in range(n):
        put(room.result, i, total)
    for node in range(most):
        up, rate, chance = _begin_node(block, room, n, node)
        total, chance = total + chance * rate, chance * up
        for i in range(n):
            inverse = at(room.inverse, i)
            put(room.result, i, at(room.result, i) + chance * inverse * (rate + at(room.share, i) * inverse))
    for i in range(n):
        put(room.result, i, at(room.result, i) * at(block.one, i))
    put(room.total, 0, total)


@per_row
def _add_changes(block, room, n, most):
    """Writes their derivatives; ``total`` is at first the mean of the g."""
    for i in range(n):
        put(room.result, i, every(0.0))
    for node in range(most):
        up, rate, chance = _begin_node(block, room, n, node)
        pull, change = every(0.0), every(0.0)
        for i in range(n):
            inverse = at(room.inverse, i)
            pull = pull + at(room.pull, i) * inverse
            change = change + (at(room.change, i) - at(room.both, i) * up * inverse) * inverse
        log_count, chance = at(room.total, 0) - pull * up, chance * up
        for i in range(n):
            inverse = at(room.inverse, i)
            bend = (log_count + at(room.own, i) * inverse) * (rate + at(room.share, i) * inverse) + change
            bend = bend + (at(room.change, i) - at(room.both, i) * up * inverse) * inverse
            put(room.result, i, at(room.result, i) + chance * inverse * bend)
    for i in range(n):
        put(room.result, i, at(room.result, i) * at(block.one, i))


@per_row
def _normalise(block, n):
    for i in range(n):
        out, included = at(block.out, i), at(block.included, i)
        both = out + included
        put(block.out, i, out / both)
        put(block.included, i, included / both)


@per_row
def _place_cotangents(block, room, number, vector):
    """Writes the g of the open units, less their mean, into z."""
    rows, n = vector.shape
    for lane in range(LANES):
        r, total, count = row_of(number, lane, rows), 0.0, 0
        for i in range(n):
            is_open = _is_open(block, i * LANES + lane)
            total += vector[r, i] if is_open else 0.0
            count += is_open
        mean = total / max(count, 1)
        for i in range(n):
            g = vector[r, i] - mean if _is_open(block, i * LANES + lane) else 0.0
            block.z[i * LANES + lane] = room.pull[i * LANES + lane] = g


@per_row
def _place_changes(block, room, n):
    """Replaces the g and the derivatives of m by what the integral needs."""
    total = every(0.0)
    for i in range(n):
        a, b, g, m = at(block.zero, i), at(block.one, i), at(room.pull, i), at(block.included, i)
        total = total + g * m
        put(room.own, i, a * g)
        put(room.pull, i, b * g)
        put(room.change, i, a * at(block.z, i))
        put(room.both, i, a * b * g * m)
    put(room.total, 0, total)


@per_row
def _score(block, room, number, most, value, draw, rows, result, slopes):
    """log P(S) of one value for each row of a block, and its derivatives; a row is left if its weight underflows."""
    n, with_slopes = value.shape[1], len(slopes) == len(value)
    for lane in range(LANES):
        drawn = value[draw * rows + row_of(number, lane, rows)]
        room.slope[lane] = -room.log_total[lane]
        for i in range(n):
            at_unit = i * LANES + lane
            z = block.sign[lane] * block.z[at_unit]
            room.share[at_unit] = block.zero[at_unit] if drawn[i] else 0.0
            if drawn[i] != (z > 0):
                is_lost = abs(z) < np.inf and not _is_open(block, at_unit)
                room.slope[lane] -= np.nan if is_lost else abs(z)
    _add_fates(block, room, n, most)
    for lane in range(lanes_of(number, rows)):
        r, count = draw * rows + number * LANES + lane, room.nodes[lane]
        found, total = room.slope[lane], room.total[lane]
        is_left = count < 0 or found != found
        result[r] = np.inf if is_left else found + math.log(total) if found > -np.inf and count > 0 else found
        if with_slopes:
            for i in range(n):
                is_open = count > 0 and _is_open(block, i * LANES + lane)
                slopes[r, i] = value[r, i] - room.result[i * LANES + lane] / total if is_open else 0.0


@kernel
def short_rows(begin, end, what, theta, k, depth, given, kept, result, slopes):
    """Computes what one of the :class:`.Integrals` returns, for rows of one length.

    Given are the values to score and the vectors of products, for which tilts are kept beside a mark of rows that are
    left. Log-probabilities are in the first row of ``result``. Slopes are written if there is room for them.
    """
    (rows, n), (value, vector), (when, tilts), left = theta.shape, given, kept, 0
    block, room = empty_block(n, widest_of(k, k, n), what == PRODUCT), _room(n)
    for number in range(begin, end):
        tabulate(block, number, theta, k, k, tilts if what == PRODUCT else tilts[:0])
        _place_ends(block, room, number, n, k, rows, depth)
        if what != LOG_PROB:
            descend(block, n)
            _normalise(block, n)
        if what == PRODUCT:
            weigh_sizes(block, n)
            _place_cotangents(block, room, number, vector)
            bend(block, n)
        _orient(block, n)
        most = _place_nodes(block, room, n, depth)
        if what == LOG_PROB:
            for draw in range(len(value) // rows):
                _score(block, room, number, most, value, draw, rows, result[0], slopes)
            continue
        for i in range(n):
            put(room.share, i, at(block.zero, i) * at(block.included, i))
        if what == PRODUCT:
            _place_changes(block, room, n)
            _add_changes(block, room, n, most)
        else:
            _add_fates(block, room, n, most)
        for lane in range(lanes_of(number, rows)):
            r, count = number * LANES + lane, room.nodes[lane]
            when[r, 0], tilts[r] = np.nan if count < 0 else 0.0, block.shift[lane]
            left += count < 0
            for i in range(n):
                if count > 0 and _is_open(block, i * LANES + lane):
                    result[r, i] = min(room.result[i * LANES + lane], 1.0 if what == INCLUSION else np.inf)
                else:
                    result[r, i] = block.included[i * LANES + lane] if what == INCLUSION else 0.0
    return left
