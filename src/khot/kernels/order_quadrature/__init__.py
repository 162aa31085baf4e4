r"""Order sampling's integrals over one variable, and their first derivatives.

The k units of smallest :math:`R_i = E_i - \vartheta_i` are drawn, E independent noise with the distribution function F
and the density f, :math:`F_i = F(s + \vartheta_i)`. A set S is drawn if the last of its units is ahead of all others,
and unit i if it is ahead of all but k - 1 of the others,

.. math::
    P(S) = \int \prod_{i \in S} F_i \prod_{i \notin S} (1 - F_i) \sum_{j \in S} \frac{f_j}{F_j} \, ds, \qquad
    \pi_i = \int f_i \, P\big(\#\{j \ne i: R_j < s\} < k\big) \, ds.

``order_log_prob`` gives log P(S) with its gradient, ``order_inclusion`` the :math:`\pi_i`, and
``order_inclusion_product`` the product of their Jacobian with a vector. The Jacobian is symmetric, as :math:`\pi` is the
gradient of the expected sum of the k largest :math:`-R_i`: one product serves both modes of differentiation.

Positions are float64 ``(*batch, n)``; one of ``inf`` includes its unit, ``-inf`` excludes it. The reference is the
definition, in small pieces of Gauss' rule. What takes a call that no backend here does is :mod:`khot.laws.order_sampling`,
in differentiable torch operations, and so do derivatives of higher order.
"""

import torch
from torch import Tensor

from ..registry import Operator
from . import reference

__all__ = ["order_inclusion", "order_inclusion_product", "order_log_prob"]

LONGEST_COUNT = 2048  # units of a row whose count has a recursion; from here on it is a product tree that is fast


def _like_value(
    theta: Tensor, k: Tensor, value: Tensor, noise: str, with_slopes: bool
) -> tuple[Tensor, Tensor]:
    shape = torch.broadcast_shapes(theta.shape, value.shape)
    slopes = shape if with_slopes else (*shape[:-1], 0)
    return theta.new_empty(shape[:-1], dtype=torch.float64), theta.new_empty(slopes, dtype=torch.float64)


order_log_prob = Operator("order_log_prob", reference.order_log_prob, fake=_like_value)
order_log_prob.backend(
    "numba",
    module=".numba_backend",
    takes=lambda theta, k, value, noise, with_slopes: noise in ("logistic", "log_exponential"),
)

order_inclusion = Operator(
    "order_inclusion",
    reference.order_inclusion,
    fake=lambda theta, k, noise: theta.new_empty(theta.shape, dtype=torch.float64),
)
order_inclusion.backend(
    "numba",
    module=".numba_backend",
    takes=lambda theta, k, noise: noise == "logistic" and theta.shape[-1] <= LONGEST_COUNT,
)

order_inclusion_product = Operator(
    "order_inclusion_product",
    reference.order_inclusion_product,
    fake=lambda theta, k, vector, noise: theta.new_empty(theta.shape, dtype=torch.float64),
)
order_inclusion_product.backend(
    "numba",
    module=".numba_backend",
    takes=lambda theta, k, vector, noise: noise == "logistic" and theta.shape[-1] <= LONGEST_COUNT,
)
