"""Values of a quadrature in logarithms, and each of them as a share of the integral."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import math

from ..numba_tools import per_row

LEAST_RATE = 1e-300  # so that it has a logarithm


@per_row
def weigh(values, count, step):
    """Turns logarithms of values, at steps of these lengths, to shares of the integral, and returns its logarithm."""
    peak = values[0]
    for i in range(1, count):
        peak = max(peak, values[i])
    total = 0.0
    for i in range(count):
        values[i] = math.exp(values[i] - peak) * step[i]
        total += values[i]
    for i in range(count):
        values[i] /= total
    return math.log(total) + peak
