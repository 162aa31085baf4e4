r"""The relaxed top-k mask, its threshold and its first derivative.

Forward: y_i = F(z_i), z_i = (x_i - t) / s, with the t at which sum_i y_i = k. Derivatives, with slopes
w_i = F'(z_i) / s and their shares omega_i = w_i / sum w: of y,

    dL/dx_i = w_i (g_i - <omega, g>),  dL/dk = <omega, g>,  dL/ds = -sum_i z_i dL/dx_i

and of log y, with d_i = g_i F'(z_i) / (s F(z_i)): dL/dx_i = d_i - omega_i sum d,  dL/dk = sum d / sum w.

The threshold is t = anchor + offset * s in two float64 numbers a row, see :mod:`khot.kernels.threshold.search`.
"""

from typing import Any

import torch
from torch import Tensor

from khot._torch_internals import count_as_constant

from ..links.base import Link
from ..links.logistic import LOGISTIC
from ..registry import Backends, Operator
from ..rows import in_rows_of
from . import reference
from .search import solve_rows
from .torch_backend import threshold_of_parts

__all__ = [
    "mask",
    "mask_derivative",
    "plain",
    "shard_loops",
    "solve_rows",
    "solve_threshold",
    "threshold",
    "threshold_derivative",
    "threshold_of_parts",
]


def _like_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    anchor = x.new_empty(x.shape[:-1], dtype=torch.float64)
    return anchor, torch.empty_like(anchor)


def _like_x_and_rows(x: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(x, memory_format=torch.contiguous_format), *_like_rows(x)


@count_as_constant  # which Dynamo shall call, not look into: it warns of what keeps links
def _has_kernel(link: str, log: bool) -> bool:
    return Link.find(link).has_kernel(log)


threshold = Operator("threshold", reference.threshold, fake=lambda x, *_: _like_rows(x))
threshold.backend(
    "triton", module=".triton_forward", takes=lambda x, k, scale, link, softness, check: _has_kernel(link, False)
)
threshold.backend(
    "numba", module=".numba_operators", takes=lambda x, k, scale, link, softness, check: _has_kernel(link, False)
)
threshold.backend("torch", module=".torch_backend")

mask = Operator("threshold_mask", reference.mask, fake=_like_x_and_rows)
mask.backend(
    "triton", module=".triton_forward", takes=lambda x, k, scale, link, log, softness, check: _has_kernel(link, log)
)
mask.backend(
    "numba", module=".numba_operators", takes=lambda x, k, scale, link, log, softness, check: _has_kernel(link, log)
)
mask.backend("torch", module=".torch_backend")

mask_derivative = Operator("threshold_mask_derivative", reference.mask_derivative, fake=_like_x_and_rows)
mask_derivative.backend(
    "triton",
    module=".triton_backward",
    takes=lambda x, scale, anchor, offset, grad, link, log, with_scale: _has_kernel(link, log),
)
mask_derivative.backend(
    "numba",
    module=".numba_operators",
    takes=lambda x, scale, anchor, offset, grad, link, log, with_scale: _has_kernel(link, log),
)
mask_derivative.backend("torch", module=".torch_backend")

# In graphs of DTensors, which hand over what they know how to place; elsewhere its operations are differentiable ones.
threshold_derivative = Operator("threshold_derivative", reference.threshold_derivative, fake=_like_x_and_rows)
threshold_derivative.backend("torch", module=".torch_backend")


# The mask of scores alone, k and scale being numbers, and its gradient at the least fixed cost, where a backend has it.
plain = Backends(__name__, "PLAIN")
plain.backend("numba", module=".numba_operators", takes=lambda x, link, log: link.has_kernel(log))

# What a process does with its parts of rows between two reductions, where a backend has loops for that.
shard_loops = Backends(__name__, "LOOPS")


def solve_threshold(x: Tensor, k: Tensor | float, scale: Tensor | float = 1.0, link: Link = LOGISTIC) -> Tensor:
    """The t with ``sum(F((x - t) / scale)) = k`` along the last axis; not differentiable (the maps are).

    Args:
        x: Scores (..., n); ``-inf`` excludes an item, ``+inf`` selects it.
        k: Sum, between the numbers of ``+inf`` and of entries above ``-inf``; broadcasts to (...). At either limit,
            where every far enough t will do, the result lies ``link.reach`` scales beyond the scores.
        scale: Positive; broadcasts to (...).
        link: The link function F.

    Returns:
        float64 tensor (...).
    """
    k, scale = (in_rows_of(x, v).detach() for v in (k, scale))
    anchor, offset = threshold(x.detach(), k, scale, link.key, "scale", False)
    return anchor + offset * scale
