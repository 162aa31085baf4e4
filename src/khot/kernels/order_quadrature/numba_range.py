"""The range of an integral and the nodes of the trapezoidal rule, for the logarithm of an integrand with one peak.

As :mod:`khot.laws.quadrature` finds them, for one row: a factory closes over the function that fills in the logarithm at
some points, ``evaluate(problem, points, count, values)``.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import math

from ..numba_tools import per_row

DEPTH = 32.0  # e^-32 of its peak is where an integrand ends
EPS = 1e-15  # rounding of its logarithm
GRID = 16  # points of one trial, two registers of them
TRIALS = 600
STEP = 0.3  # of the rule, at most: e^(-pi^2 / STEP) is its error, for poles and zeros at height pi / 2
RESOLUTION = 40.0  # nodes in a range that is as narrow as a normal density
MAX_NODES = 8192
MARGIN = 60.0  # further than this from all positions nothing happens


def range_finder(evaluate):
    """``function(problem, low, high, points, values)`` that narrows a range to where something is, on grids."""

    @per_row
    def narrowed(points, values):
        """The outer and inner ends of what is left between points."""
        peak = values[0]
        for i in range(1, GRID):
            peak = max(peak, values[i])
        least = peak - DEPTH - EPS * abs(peak)
        first, last = 0, GRID - 1
        while first < GRID - 1 and not values[first] >= least:
            first += 1
        while last > first and not values[last] >= least:
            last -= 1
        return points[max(first - 1, 0)], points[first], points[last], points[min(last + 1, GRID - 1)]

    @per_row
    def find(problem, low, high, points, values):
        for _ in range(TRIALS):
            width = high - low
            for i in range(GRID):
                points[i] = low + width * (i / (GRID - 1))
            evaluate(problem, points, GRID, values)
            low, inner_low, inner_high, high = narrowed(points, values)
            if high - low >= width / 2:
                break
        half = GRID // 2
        for i in range(half):
            share = i / (half - 1)
            points[i], points[half + i] = low + (inner_low - low) * share, inner_high + (high - inner_high) * share
        evaluate(problem, points, GRID, values)
        low, _, _, high = narrowed(points, values)
        return low, high

    return find


@per_row
def fill_nodes(low, high, points):
    """The nodes of the trapezoidal rule; their number, and the weight of each."""
    width = high - low
    count = min(MAX_NODES, math.ceil(math.hypot(width / STEP, RESOLUTION)))
    for i in range(count + 1):
        points[i] = low + i * (width / count)
    return count + 1, width / count
