"""What a row of many open units is given its count, from the characteristic function of that, in numba.

O(n) time for each of some twenty nodes, where a recursion takes it for each count of its window. Its sums have terms of
both signs; but where the count has a variance of ``MANY`` and about the mean k, a single unit says little of it, and
they take away none of each other's digits: each of the two probabilities keeps its relative accuracy. Other rows are
left to the recursion. See :mod:`khot.kernels.numba_characteristic` for the notation.
"""

# mypy: disable-error-code="no-untyped-def"

import numpy as np

from ..numba_characteristic import DEPTH, MOST, at_nodes, choose_nodes
from ..numba_tools import per_row, summed

MANY = 16.0
LIKELY = 0.1  # the square of P(B = k), times the variance, is more, if the expected number is k: 1 / (2 pi)


@summed
def _variance_of(p, q):
    total = 0.0
    for i in range(p.shape[0]):
        total += p[i] * q[i]
    return total


@per_row
def room(n):
    """Numbers of nodes, and of units at nodes: those of one row, to be used for all."""
    return np.empty((6, MOST)), np.empty(n * MOST), np.empty(n * MOST)


@per_row
def law_of_count(p, q, k, at, real, imag):
    """Writes y of the units and w at the nodes; returns the number of these, 0 for a row to be left, and P(B = k)."""
    variance = _variance_of(p, q)
    if not variance >= MANY:
        return 0, 0.0
    nodes = choose_nodes(variance, k, p.shape[0], DEPTH, at[0], at[1], at[2], at[3])
    law_real, law_imag = at[2, :nodes], at[3, :nodes]
    at_nodes(p, q, at[0, :nodes], at[1, :nodes], real, imag, law_real, law_imag)
    chance = 0.0
    for t in range(nodes):
        chance += law_real[t]
    for t in range(nodes):
        law_real[t] /= chance
        law_imag[t] /= chance
    return nodes if chance > 0 and chance * chance * variance > LIKELY else 0, chance


@summed
def given_count(p, q, real, imag, law_real, law_imag, complement, inclusion):
    """Writes the probabilities of units."""
    nodes = law_real.shape[0]
    for i in range(p.shape[0]):
        delta, at = 0.0, i * nodes
        for t in range(nodes):
            delta += law_real[t] * real[at + t] - law_imag[t] * imag[at + t]
        complement[i], inclusion[i] = q[i] * (1 - p[i] * delta), p[i] * (1 + q[i] * delta)


@summed
def covariance_times(p, q, t, real, imag, law_real, law_imag, sum_real, sum_imag, result):
    """Writes C v for the v with ``pq v = t``."""
    nodes = law_real.shape[0]
    for j in range(nodes):
        sum_real[j] = sum_imag[j] = 0.0
    for i in range(p.shape[0]):
        at = i * nodes
        for j in range(nodes):
            sum_real[j] += t[i] * real[at + j]
            sum_imag[j] += t[i] * imag[at + j]
    mean = 0.0  # of sum t_i delta_i
    for j in range(nodes):
        a, b = sum_real[j], sum_imag[j]
        sum_real[j], sum_imag[j] = a * law_real[j] - b * law_imag[j], a * law_imag[j] + b * law_real[j]
        mean += sum_real[j]
    for i in range(p.shape[0]):
        first = second = others = 0.0
        at, spread = i * nodes, p[i] * q[i]
        for j in range(nodes):
            a, b = real[at + j], imag[at + j]
            c, d = law_real[j] * a - law_imag[j] * b, law_real[j] * b + law_imag[j] * a
            first += c
            second += c * a - d * b
            others += sum_real[j] * a - sum_imag[j] * b
        own = (1 + q[i] * first) * (1 - p[i] * first) - spread * (second - first * first)
        result[i] = own * t[i] + spread * (others - first * mean)
