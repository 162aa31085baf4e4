r"""The sorted transport plan and its first derivative.

Forward: y, the first k rows of the plan P of sorted SOFT top-k, a softmax over places of
:math:`s_{ji}(x, t, T)`, where T is half of epsilon.

Derivatives follow from the implicit function theorem. With ds the change of s at fixed thresholds, and dg that of the
places' duals, which keep the sums over the items constant,

.. math:: dP = P \circ (ds + dg - \langle P, ds + dg\rangle), \qquad
    H\,dg = -\textstyle\sum_i P_{\cdot i} \circ (ds_{\cdot i} - \langle P_{\cdot i}, ds_{\cdot i}\rangle),

where H is the Hessian of the dual, with places - 1 rows and columns.

:mod:`khot.kernels.transport.solver` explains how the thresholds are found.
"""

import torch
from torch import Tensor

from ..operators.platforms import MAX_N
from ..registry import Operator
from . import reference
from .reference import places

MOST_PLACES = {torch.float32: 16, torch.float64: 8}  # k + 1; a thread has no room for an item with more
MOST_PLACES_ON_HOST = 200  # with more, a library for matrix products is nearly as fast as loops
LONE_ROW = 2**15  # entries; a row has one program, so longer rows run only if there are at least FEW_ROWS
FEW_ROWS = 16
ONE_PLACE = "there is one place, and nothing to solve"


def _fits(x: Tensor, k: int) -> str | None:
    n, rows = x.shape[-1], places(k, x.shape[-1])
    most = MOST_PLACES[torch.float64 if x.dtype == torch.float64 else torch.float32]
    if rows > most:
        return f"a thread has no room for more than {most} places"
    if rows * n > MAX_N:
        return "its kernels count the entries of a plan in 32 bits"
    if n > LONE_ROW and x.numel() < FEW_ROWS * n:
        return f"a row has one program, so fewer than {FEW_ROWS} long rows leave the device idle"
    return None if rows > 1 else ONE_PLACE


def _has_few_places(x: Tensor, k: int) -> str | None:
    rows = places(k, x.shape[-1])
    if rows > MOST_PLACES_ON_HOST:
        return f"matrix products are as fast for more than {MOST_PLACES_ON_HOST} places"
    return None if rows > 1 else ONE_PLACE


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
