r"""Order sampling: draws by independent ranks, and the integrals over one variable that are its law.

The k units of smallest :math:`R_i = E_i - \vartheta_i` are drawn, E independent noise with the distribution function F
and the density f, :math:`F_i = F(s + \vartheta_i)`. A set S is drawn if the last of its units is ahead of all others,
and unit i if it is ahead of all but k - 1 of the others,

.. math::
    P(S) = \int \prod_{i \in S} F_i \prod_{i \notin S} (1 - F_i) \sum_{j \in S} \frac{f_j}{F_j} \, ds, \qquad
    \pi_i = \int f_i \, P\big(\#\{j \ne i: R_j < s\} < k\big) \, ds.

``order_log_prob`` gives log P(S) with its gradient. ``order_inclusion`` gives the :math:`\pi_i`. The number of units
that have come by a time is a sum of independent Bernoulli variables; for logistic noise these units, if they are k, are
a conditional Poisson design that is the same for all times. ``order_inclusion_product`` gives the product of the
Jacobian with a vector. It is symmetric, as :math:`\pi` is the gradient of the expected sum of the k largest
:math:`-R_i`: one product serves both modes of differentiation.

Positions are float64; one of ``inf`` includes its unit, ``-inf`` excludes it. Results have relative errors of about
e^-depth, for ``EXACT`` or ``SINGLE`` precision. The reference is the definition, in small pieces of Gauss' rule. What
no backend here takes is for :mod:`khot.laws.order_sampling`, and so are derivatives of higher order.

``order_draw`` makes the ranks e^noise e^-(theta_i - t), with t such that the k-th is near 1, and chooses the k smallest
ones; :mod:`.noises` has the laws of the noise. In kernels noise, ranks and selection are one, made of a seed that
torch's generator gives: on a CPU of float64 numbers; on an accelerator, where the seed stays, ranks in float32 do,
their noise being accurate in both tails. In plain torch on a CPU the ranks are float64 numbers from torch's generator,
and the second factor, which all draws of a design share, is kept.
"""

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor
from torch.nn.functional import pad

from khot._tracing import broadcast_shapes

from ..random_numbers.philox import Place
from ..registry import Backends, DrawOperator, Operator
from . import reference, reference_draw
from .reference_draw import draw_ranks, rank_centre, rank_scale

__all__ = [
    "EXACT",
    "SINGLE",
    "depth_for",
    "draw_ranks",
    "order_draw",
    "order_inclusion",
    "order_inclusion_product",
    "order_log_prob",
    "rank_centre",
    "rank_scale",
    "ranks_of_parts",
]

EXACT, SINGLE = 34.0, 21.0  # errors of 2e-15, before rounding, and of 8e-10, which float32 does not see


def depth_for(dtype: torch.dtype) -> float:
    """The depth of integrals that are rounded to this dtype."""
    return EXACT if dtype == torch.float64 else SINGLE


def _like_value(
    theta: Tensor, k: Tensor, value: Tensor, noise: str, depth: float, with_slopes: bool
) -> tuple[Tensor, Tensor]:
    shape = broadcast_shapes(theta.shape, value.shape)
    slopes = shape if with_slopes else (*shape[:-1], 0)
    return theta.new_empty(shape[:-1], dtype=torch.float64), theta.new_empty(slopes, dtype=torch.float64)


order_log_prob = Operator("order_log_prob", reference.order_log_prob, fake=_like_value)
order_log_prob.backend("numba", module=".numba_backend")


def _like_law(theta: Tensor, k: Tensor, noise: str, depth: float) -> tuple[Tensor, ...]:
    of_units = theta.shape if noise == "logistic" else (len(theta), 0)
    shapes = theta.shape, (len(theta), 2), (len(theta),), of_units, of_units, (len(theta), 2)
    return tuple(theta.new_empty(shape) for shape in shapes)


order_inclusion = Operator(
    "order_inclusion",
    reference.order_inclusion,
    fake=_like_law,
    batch=False,
)
order_inclusion.backend("numba", module=".numba_backend")

order_inclusion_product = Operator(
    "order_inclusion_product",
    reference.order_inclusion_product,
    fake=lambda theta, *_: torch.empty_like(theta),
    batch=False,
)
order_inclusion_product.backend("numba", module=".numba_backend")

order_draw = DrawOperator("order_draw", reference_draw.order_draw)
order_draw.backend("triton", module=".triton_draw", takes=DrawOperator.fills_device)
order_draw.backend("numba", module=".numba_draw", takes=DrawOperator.has_draws)

# The ranks alone, for a process that has some of the units of a row and selects among all.
order_ranks = Backends(__name__, "order_ranks")
order_ranks.backend("numba", module=".numba_draw", takes=DrawOperator.has_draws)


def ranks_of_parts(theta: Tensor, centre: Tensor, seed: Tensor, first: Sequence[int], draws: int, noise: str) -> Tensor:
    """Ranks ``(draws, *batch, m)`` in float64 of units that may begin anywhere in their rows, as ``first`` says."""
    before = Place(*first).unit % 2  # two units share a place of the counter
    place = Place(*first)._replace(unit=Place(*first).unit - before)
    if before:
        theta = pad(theta, (before, 0))
    ranks = (order_ranks.find(theta, draws) or reference_draw.order_ranks)(theta, centre, seed, place, draws, noise)
    return cast(Tensor, ranks[..., before:])
