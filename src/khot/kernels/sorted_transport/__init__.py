r"""The sorted transport plan and its first derivative.

Forward: y, the first k rows of the plan P of sorted SOFT top-k, a softmax over places of
:math:`s_{ji}(x, t, T)`, T half the epsilon.

Derivatives, by the implicit function theorem. With ds the change of s at fixed thresholds and dg that of the places'
duals, which keep the sums over the items as they are,

.. math:: dP = P \circ (ds + dg - \langle P, ds + dg\rangle), \qquad
    H\,dg = -\textstyle\sum_i P_{\cdot i} \circ (ds_{\cdot i} - \langle P_{\cdot i}, ds_{\cdot i}\rangle),

with the (places - 1)-square Hessian H of the dual.

How the thresholds are found: :mod:`khot.kernels.sorted_transport.solver`.
"""

import torch
from torch import Tensor

from ..registry import MAX_N, Operator
from . import reference
from .reference import places

MOST_PLACES = {torch.float32: 16, torch.float64: 8}  # k + 1: of more a thread has no room for an item
MOST_PLACES_ON_HOST = 200  # of more a library that multiplies matrices is nearly as fast as loops
LONE_ROW = 2**15  # entries; a row has one program, so that longer ones want FEW_ROWS of them at least
FEW_ROWS = 16


def _fits(x: Tensor, k: int) -> bool:
    n, rows = x.shape[-1], places(k, x.shape[-1])
    most = MOST_PLACES[torch.float64 if x.dtype == torch.float64 else torch.float32]
    return 1 < rows <= most and rows * n <= MAX_N and (n <= LONE_ROW or x.numel() >= FEW_ROWS * n)


def _has_few_places(x: Tensor, k: int) -> bool:
    return 1 < places(k, x.shape[-1]) <= MOST_PLACES_ON_HOST


def _like_plan(x: Tensor, half: Tensor, k: int, tol: float, max_iter: int, check: bool) -> tuple[Tensor, Tensor]:
    *batch, n = x.shape
    return x.new_empty(*batch, k, n), x.new_empty(*batch, places(k, n) - 1, dtype=torch.float64)


def _like_gradients(x: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    grad_x = torch.empty_like(x, memory_format=torch.contiguous_format)
    return grad_x, x.new_empty(x.shape[:-1], dtype=torch.float64)


sorted_transport = Operator("sorted_transport", reference.sorted_transport, fake=_like_plan)
sorted_transport.backend("triton", module=".triton_forward", takes=lambda x, half, k, *_: _fits(x, k))
sorted_transport.backend("numba", module=".numba_backend", takes=lambda x, half, k, *_: _has_few_places(x, k))
sorted_transport.backend("torch", module=".torch_backend")

sorted_transport_derivative = Operator(
    "sorted_transport_derivative", reference.sorted_transport_derivative, fake=_like_gradients
)
sorted_transport_derivative.backend(
    "triton", module=".triton_backward", takes=lambda x, half, t, grad_y, with_half: _fits(x, grad_y.shape[-2])
)
sorted_transport_derivative.backend(
    "numba",
    module=".numba_backend",
    takes=lambda x, half, t, grad_y, with_half: _has_few_places(x, grad_y.shape[-2]),
)
sorted_transport_derivative.backend("torch", module=".torch_backend")
