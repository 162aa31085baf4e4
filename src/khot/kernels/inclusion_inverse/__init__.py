r"""The logits of a conditional Poisson design with given inclusion probabilities, a row at a time.

* ``inclusion_inverse``: logits for which the units that are ones, k of them given, have these log-odds;
* ``covariance_inverse``: v with C v = b, where C is the covariance of the k-hot vector, a graph's Laplacian.

The reference is a definition for tests. Where no kernel takes a call, :mod:`khot.laws.inverse` solves for all rows
together.
"""

import torch

from ..registry import Operator, only_if
from . import reference

MOST_FACTORED = 2**16  # units of rows whose factors, some 500 bytes a unit, are not too much memory


_not_too_long = only_if(
    lambda x, *_: x.shape[-1] <= MOST_FACTORED,
    f"the factors of rows of more than {MOST_FACTORED} units take too much memory",
)


inclusion_inverse = Operator(
    "inclusion_inverse",
    reference.inclusion_inverse,
    fake=lambda log_odds, k, goal: (torch.empty_like(log_odds), log_odds.new_empty(len(log_odds))),
    batch=False,
)
inclusion_inverse.backend("numba", module=".numba_backend", takes=_not_too_long)

covariance_inverse = Operator(
    "covariance_inverse",
    reference.covariance_inverse,
    fake=lambda logits, b, k, tolerance, rounding: torch.empty_like(b),
    batch=False,
)
covariance_inverse.backend("numba", module=".numba_backend", takes=_not_too_long)
