r"""The characteristic function of the number of ones of independent units, at the nodes of an integral, in numba.

Units of chances :math:`p_i = 1 - q_i`, k of which are expected to be ones, have the characteristic functions
:math:`\varphi_i(t) = q_i + p_i e^{it}`. With :math:`y_i(t) = (e^{it} - 1) / \varphi_i(t)` at N nodes t, a few of which
are enough, and the mean

.. math:: \langle f \rangle = \operatorname{Re} \sum_t w_t f(t), \qquad
    w_t = \frac{e^{-ikt} \prod_l \varphi_l(t)}{N P(B = k)}, \qquad \delta_i = \langle y_i \rangle,

what belongs to units given B = k are

.. math:: \pi_i = p_i (1 + q_i \delta_i), \quad 1 - \pi_i = q_i (1 - p_i \delta_i), \qquad
    C_{ij} = p_i q_i p_j q_j (\langle y_i y_j \rangle - \delta_i \delta_j), \quad i \ne j.
"""

# mypy: disable-error-code="no-untyped-def"

import math

from .numba_tools import per_row

DEPTH, NODES = 41.4, 31  # as in khot.laws.characteristic: nodes of e^-41.4, and how many there are above that at most
LANES = 4  # nodes are taken by fours
MOST = 32


@per_row
def choose_nodes(variance, k, m, depth, versine, sine, law_real, law_imag):
    """Writes 1 - cos t, sin t and e^{-ikt} times the weight of the nodes; returns how many there are.

    Some of no weight fill up what a processor does at once.
    """
    radius = depth / 3 + math.sqrt(depth * depth / 9 + 2 * depth * variance)
    last = math.ceil(min(radius, float(max(k, m - k))) / 2)
    count = 2 * last + 1
    step = 2 * math.pi / count
    end = 2 * math.asin(min(1.0, math.sqrt(0.5 * depth / variance)))
    nodes = min(min(NODES, last + 1), 1 + math.ceil(end / step))
    turn = k % count * step
    half_cos, half_sin, turn_cos, turn_sin = math.cos(step / 2), math.sin(step / 2), math.cos(turn), math.sin(turn)
    a, b, c, d, size = 1.0, 0.0, 1.0, 0.0, 1.0 / count
    for j in range(nodes):
        versine[j], sine[j] = 2 * b * b, 2 * a * b
        law_real[j], law_imag[j] = size * c, -size * d
        a, b = a * half_cos - b * half_sin, a * half_sin + b * half_cos
        c, d, size = c * turn_cos - d * turn_sin, c * turn_sin + d * turn_cos, 2.0 / count
    padded = (nodes + LANES - 1) // LANES * LANES
    for j in range(nodes, padded):
        versine[j] = sine[j] = law_real[j] = law_imag[j] = 0.0
    return padded
