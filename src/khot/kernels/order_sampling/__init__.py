r"""Order sampling: draws by independent ranks, and the one-dimensional integrals that define their law.

A draw consists of the k units of smallest :math:`R_i = E_i - \vartheta_i`, where E is independent noise with the
distribution function F and the density f, and :math:`F_i = F(s + \vartheta_i)`. A set S is drawn if the last of its
units arrives before all others, and unit i if it arrives before all but k - 1 of the others,

.. math::
    P(S) = \int \prod_{i \in S} F_i \prod_{i \notin S} (1 - F_i) \sum_{j \in S} \frac{f_j}{F_j} \, ds, \qquad
    \pi_i = \int f_i \, P\big(\#\{j \ne i: R_j < s\} < k\big) \, ds.

The number of units that have arrived by a time is a sum of independent Bernoulli variables. For logistic noise these
units, given that there are k of them, are a conditional Poisson design that is the same at all times. The Jacobian of
:math:`\pi` is symmetric, as :math:`\pi` is the gradient of the expected sum of the k largest :math:`-R_i`, so one
product with a vector serves both modes of differentiation.

Positions are float64; ``inf`` includes a unit and ``-inf`` excludes it. Results have relative errors of about e^-depth,
for ``EXACT`` or ``SINGLE`` precision. The definition is :mod:`khot.laws.order_sampling`, which computes calls that no
backend here takes, rows that a loop leaves, and derivatives of higher order.

``order_draw`` computes the ranks e^noise e^-(theta_i - t), with t such that the k-th is near 1, and selects the k
smallest; :mod:`.noises` has the laws of the noise. Kernels fuse noise, ranks and selection, starting from a seed from
torch's generator. On a CPU they use float64 numbers. On an accelerator, where the seed stays on the device, ranks are
in float32, with noise that is accurate in both tails. In plain torch on a CPU the ranks are float64 numbers from
torch's generator, and the second factor, which all draws of a design share, is kept.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ..registry import DrawOperator, Operation, has_draws
from . import reference_draw
from .reference_draw import draw_ranks, rank_centre, rank_scale

__all__ = [
    "EXACT",
    "LEAST_SPREAD",
    "SINGLE",
    "Adjusted",
    "Integrals",
    "adjusted",
    "depth_for",
    "draw_ranks",
    "integrals",
    "order_draw",
    "rank_centre",
    "rank_scale",
]

EXACT, SINGLE = 34.0, 21.0  # errors of 2e-15 before rounding, and of 8e-10, which is invisible in float32


def depth_for(dtype: torch.dtype) -> float:
    """The depth for integrals that are rounded to this dtype."""
    return EXACT if dtype == torch.float64 else SINGLE


class Integrals(NamedTuple):
    """Both integrals, for a noise by name, to a depth.

    Attributes:
        log_prob: ``(theta, k, value, noise, depth, with_slopes)``, for positions ``(*batch, n)``, integers ``(*batch)``
            and k-hot values ``(*sample, *batch, n)``: log-probabilities ``(*sample, *batch)``, which are ``-inf`` for a
            value that contradicts an infinite position and ``inf`` for rows that are left to the exact path; and the
            derivatives ``(*sample, *batch, n)``, if they are needed.
        inclusion: ``(theta, k, noise, depth)``, for positions ``(R, n)`` and integers ``(R,)``: probabilities ``(R,
            n)``, and what products reuse: numbers ``(R, 5)`` that describe the range of the integral, NaN for rows that
            are left; and others, such as the probabilities of units given that k have arrived, if they are the same at
            all times.
        product: ``(theta, k, when, given, vector, noise, depth)``: the Jacobian of the probabilities times a vector.
    """

    log_prob: Callable[[Tensor, Tensor, Tensor, str, float, bool], tuple[Tensor, Tensor]]
    inclusion: Callable[[Tensor, Tensor, str, float], tuple[Tensor, Tensor, Tensor]]
    product: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, str, float], Tensor]


integrals = Operation(__name__, "INTEGRALS")
integrals.backend("numba", module=".numba_backend")

LEAST_SPREAD = 0.25  # lower bound of d, as the adjustment is an expansion for large d and inverts the order for small d


class Adjusted(NamedTuple):
    """The adjusted log-odds of :mod:`khot.laws.pareto` for scores ``(*batch, n)`` of the mask with the logistic link.

    Attributes:
        value: ``(x, anchor, offset, k, scale)``, for numbers k and scale, and thresholds of the mask that need not be
            accurate: the positions, and more accurate offsets.
        gradient: ``(x, anchor, offset, scale, grad)``: the gradient in x, from that in the positions.
    """

    value: Callable[[Tensor, Tensor, Tensor, int, float], tuple[Tensor, Tensor]]
    gradient: Callable[[Tensor, Tensor, Tensor, float, Tensor], Tensor]


adjusted = Operation(__name__, "ADJUSTED")
adjusted.backend("numba", module=".numba_adjusted")

LONG_DRAW, MANY_DRAWS = 2**17, 32  # draws of more units get one program each only if there are this many of them


def _fills_device(x: Tensor, n: int, rows: int, draws: int) -> str | None:
    if draws > 0 and n > LONG_DRAW and draws * rows < MANY_DRAWS:
        return "torch spreads a long row over the whole device, and there are too few draws for a program each"
    return has_draws(x, n, rows, draws)


order_draw = DrawOperator("order_draw", reference_draw.order_draw)
order_draw.backend("triton", module=".triton_draw", takes=_fills_device)
order_draw.backend("numba", module=".numba_draw", takes=has_draws)
