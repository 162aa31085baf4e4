r"""The sorted transport plan and its first derivative, in plain torch.

Forward: y, the first k rows of the plan P of sorted SOFT top-k, a softmax over places of
:math:`s_{ji}(x, t, T)`, where T is half of epsilon.

Derivatives follow from the implicit function theorem. With ds the change of s at fixed thresholds, and dg that of the
places' duals, which keep the sums over the items constant,

.. math:: dP = P \circ (ds + dg - \langle P, ds + dg\rangle), \qquad
    H\,dg = -\textstyle\sum_i P_{\cdot i} \circ (ds_{\cdot i} - \langle P_{\cdot i}, ds_{\cdot i}\rangle),

where H is the Hessian of the dual, with places - 1 rows and columns.

:mod:`.plan` explains the plan, and :mod:`.solver` how the thresholds are found. All of it is in float64.
"""

import torch
from torch import Tensor

from ..registry import Operator
from . import solver
from .plan import places


def _like_plan(x: Tensor, half: Tensor, k: int, tol: float, max_iter: int, check: bool) -> tuple[Tensor, Tensor]:
    *batch, n = x.shape
    return x.new_empty(*batch, k, n), x.new_empty(*batch, places(k, n) - 1, dtype=torch.float64)


def _like_gradients(x: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    grad_x = torch.empty_like(x, memory_format=torch.contiguous_format)
    return grad_x, x.new_empty(x.shape[:-1], dtype=torch.float64)


sorted_transport = Operator("sorted_transport", solver.sorted_transport, fake=_like_plan)
sorted_transport_derivative = Operator(
    "sorted_transport_derivative", solver.sorted_transport_derivative, fake=_like_gradients
)
