r"""log P(S) and its gradient for exponential ranks, row by row.

The first of the units outside S arrives after an exponential variable of rate :math:`W = \sum_{j \notin S} w_j`, with
:math:`w_i = e^{\vartheta_i}`. All of S must have arrived by then,

.. math:: P(S) = \int e^{s - e^s} \prod_{i \in S} \big(1 - e^{-x_i}\big) \, ds, \qquad x_i = e^s w_i / W.

The loops run over the units of S and, inside, over the nodes of the quadrature, because short rows have many nodes. The
logarithm h of the integrand is concave, and the product increases, so h is within a depth D of its peak only for
s > -D - 1. With :math:`r_i = f_i / F_i`, the peak is where :math:`e^s = 1 + \sum_S r_i = \nu`, and after it h falls at
least as fast as a Poisson log-probability of :math:`\nu` with the mean :math:`e^s`.
"""

# mypy: disable-error-code="no-untyped-def"

import math

import numpy as np

from ..cpu.loops import inlined, inlined_sum, per_row
from ..cpu.maths import EXP, LOG
from .numba_range import ROOM, WIDEST, density_of, fill_nodes, fill_weights, take_logarithm

exp, log = EXP[np.float64], LOG[np.float64]
SLACK = 2.0  # in addition to the depth, for the logarithm of a probability near 1
STEPS = 50  # of Newton's method, which takes 2 to 6
NEAR = 0.1, 0.5  # accuracy of the time of the peak, and of h where the range begins


def log_prob_of(law):
    """``(theta, drawn, members, last, best, depth, with_slopes, slope, room)``: log P(S) of a row, to e^-depth.

    All positions are finite and 0 < ``members`` < n. ``last`` is the position of the lowest of the members and ``best``
    that of the highest of the others. The result is infinite if the row is left. ``slope`` receives the derivatives.
    """

    @inlined_sum
    def sums(weight, up):
        log_came = ahead = bend = 0.0
        for i in range(weight.shape[0]):
            at = law(weight[i] * up)
            log_came += log(at.came)
            ahead += at.ahead
            bend += at.bend
        return log_came, ahead, bend

    @per_row
    def find_range(weight, depth):
        """Where h is within the depth of its peak, and minus its second derivative there."""
        peak, step, low = 0.5 * math.log(weight.shape[0] + 1.0), 1.0, -depth - 1.0
        goal = log_came = ahead = bend = 0.0
        for _ in range(STEPS):
            is_peak = abs(step) <= NEAR[0]
            log_came, ahead, bend = sums(weight, math.exp(peak))
            if is_peak:
                break
            step = (math.log(1.0 + ahead) - peak) / (1.0 - bend / (1.0 + ahead))
            peak += step
        nu, goal = 1.0 + ahead, peak - math.exp(peak) + log_came - depth
        curvature = nu - bend
        for _ in range(STEPS):  # a tangent lies above h: no step goes too far
            log_came, ahead, bend = sums(weight, math.exp(low))
            left = goal - (low - math.exp(low) + log_came)
            if left <= NEAR[1]:
                break
            low += left / (1.0 - math.exp(low) + ahead)
        return low, math.log(nu + depth + math.sqrt(depth * (depth + 2.0 * nu))), curvature

    @inlined
    def add_member(w, up, product):
        for i in range(up.shape[0]):
            product[i] *= law(w * up[i]).came

    @inlined_sum
    def member_slope(w, up, share):
        total = 0.0
        for i in range(up.shape[0]):
            total += share[i] * law(w * up[i]).ahead
        return total

    @inlined
    def fill_values(weight, each, points, up, product, values):
        for i in range(points.shape[0]):
            up[i], product[i] = exp(points[i]), 1.0
            values[i] = points[i] - up[i]
        for j in range(weight.shape[0]):
            add_member(weight[j], up, product)
            if j % each == each - 1:
                take_logarithm(product, values)
        take_logarithm(product, values)

    @inlined
    def log_prob(theta, drawn, members, last, best, depth, with_slopes, slope, room):
        n, weight, taken, total = theta.shape[0], room.came[:members], 0, 0.0
        fill_weights(theta, best, slope)
        for i in range(n):
            if drawn[i]:
                weight[taken] = slope[i]
                taken += 1
            else:
                total += slope[i]
        delay, depth = best + math.log(total) - last, depth + SLACK
        if delay > WIDEST:
            return np.inf
        for j in range(members):
            weight[j] /= total
        low, high, curvature = find_range(weight, depth)
        nodes = fill_nodes(low, high, density_of(depth, curvature), room.node, room.width)
        if nodes < 0:
            return np.inf
        up, product, share = room.of_nodes[0, :nodes], room.of_nodes[1, :nodes], room.of_nodes[2, :nodes]
        each = max(1, int(ROOM / (1.0 + max(high, -low) + max(delay, 0.0))))
        fill_values(weight, each, room.node[:nodes], up, product, share)
        found = _weigh(share, room.width[:nodes])
        if with_slopes:
            taken, of_members = 0, 0.0
            for j in range(members):
                weight[j] = member_slope(weight[j], up, share)
                of_members += weight[j]
            for i in range(n):
                if drawn[i]:
                    slope[i] = weight[taken]
                    taken += 1
                else:
                    slope[i] *= -of_members / total
        return found

    return log_prob


@inlined
def _weigh(values, width):
    """Turns logarithms of values into shares of the integral, and returns its logarithm."""
    peak, total = values[0], 0.0
    for i in range(values.shape[0]):
        peak = max(peak, values[i])
    for i in range(values.shape[0]):
        values[i] = exp(values[i] - peak) * width[i]
        total += values[i]
    for i in range(values.shape[0]):
        values[i] /= total
    return math.log(total) + peak
