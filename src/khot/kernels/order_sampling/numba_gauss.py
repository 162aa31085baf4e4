"""Gauss' rule between the kinks of an integrand, as loops for one row.

The integrand is with respect to s. Between kinks it is a polynomial of e^s, divided by e^s, and resembles a normal
density where it is large. On a piece of length h, in standard deviations, m points leave an error of about
:math:`(32 m / h^2 e)^{-m}`, from the ellipse in the complex plane on which a normal density grows least.
"""

# mypy: disable-error-code="no-untyped-def"

import math

import numpy as np

from ..cpu.loops import inlined
from ..cpu.maths import LOG

log = LOG[np.float64]
MOST_POINTS = 40  # of a rule
LONGEST = 8.0  # length of a piece, in standard deviations
RATES = 3.0  # contribution of the rates of arrival to the curvature of a logarithm
_RULES = [np.polynomial.legendre.leggauss(m) for m in range(1, MOST_POINTS + 1)]
# The points of the rule with m points begin at m (m - 1) / 2.
POINTS, WEIGHTS = np.concatenate([x for x, _ in _RULES]), np.concatenate([w for _, w in _RULES])


@inlined
def fill_gauss(kinks, degree, low, high, curvature, depth, node, width):
    """Nodes and weights between low and high, with kinks in ascending order; returns their number, -1 without room.

    ``curvature`` is minus the second derivative of the logarithm of the integrand at its peak.
    """
    count, before, square = 0, low, curvature + RATES
    for j in range(kinks.shape[0] + 1):
        after = min(kinks[j], high) if j < kinks.shape[0] else high
        if not after > before:
            continue
        pieces = int((after - before) * math.sqrt(square) / LONGEST) + 1
        step = (after - before) / pieces
        m, ratio = 1, 32.0 / (step * step * square)
        while m < MOST_POINTS and m * (math.log(ratio * m) - 1.0) < depth:
            m += 1
        m = min(m, degree // 2 + 1)
        if count + m * pieces > node.shape[0]:
            return -1
        share = 0.5 * -math.expm1(-step)  # half of the length in e^s, relative to its end
        for i in range(m):
            t = 1.0 - share * (1.0 - POINTS[m * (m - 1) // 2 + i])
            away, weight = math.log(t), share * WEIGHTS[m * (m - 1) // 2 + i] / t
            for piece in range(pieces):
                node[count], width[count] = before + step * (piece + 1) + away, weight
                count += 1
        before = after
    return count
