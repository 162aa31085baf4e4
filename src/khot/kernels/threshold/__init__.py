r"""The maps that are defined by a threshold per row: masks, their logarithms, signed masks and magnitudes.

.. math:: y_i = Y(x_i, z_i), \qquad z_i = (a_i - t)/\sigma, \qquad \sum_i F(z_i) = k

t is the threshold, F the link, and :math:`\sigma` the scale, which is the softness s.
:mod:`khot.kernels.threshold.kinds` describes how the kinds of maps differ, and
:mod:`khot.kernels.threshold.derivatives` their derivatives. For a mask, with the slopes :math:`w_i = F'(z_i)/s`, their
shares :math:`\omega_i = w_i / \sum w` and cotangents g of y,

.. math:: \frac{\partial L}{\partial x_i} = w_i (g_i - \langle\omega, g\rangle), \qquad
    \frac{\partial L}{\partial k} = \langle\omega, g\rangle, \qquad
    \frac{\partial L}{\partial s} = -\sum_i z_i \frac{\partial L}{\partial x_i} .

The threshold is stored as t = anchor + offset * sigma in two float64 numbers per row. The anchor is a number of x's
computing dtype next to t, so that z = (x - anchor) / sigma - offset keeps its digits.

The exact path, plain torch in float64, takes every row. The fast paths, numba on a CPU and Triton on a GPU, process
ordinary rows and leave the others to it.
"""

import logging
from typing import Any

import torch
from torch import Tensor

from ..exact.rows import in_rows_of
from ..links.base import Link
from ..links.logistic import LOGISTIC
from ..registry import Backends, Operator, log
from . import exact
from .kinds import KINDS, MASK, Kind, Recipe

__all__ = ["mask", "mask_derivative", "recipe", "solve_threshold", "threshold", "threshold_derivative"]


STEEPEST = 256.0  # powers up to which loops compute; the rounding of their distances is magnified by so much


def _like_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    anchor = x.new_empty(x.shape[:-1], dtype=torch.float64)
    return anchor, torch.empty_like(anchor)


def _like_x_and_rows(x: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(x, memory_format=torch.contiguous_format), *_like_rows(x)


def _has_loops(x: Tensor, link: Link, kind: Kind) -> str | None:
    if link.compact and link.condition > STEEPEST:
        return f"a power of {link.condition:.3g} needs distances of more digits"
    if link.has_kernel(kind.log):
        return None
    return f"the link {type(link).__name__} has no loops" + (" of logarithms" if kind.log else "")


def _has_kernels(x: Tensor, link: Link, kind: Kind) -> str | None:
    return "there are no kernels for odd maps" if kind.absolute else _has_loops(x, link, kind)


def _asks(x: Tensor, k: Tensor, scale: Tensor, link: int, q: float, kind: str, *_: Any) -> tuple[Tensor, Link, Kind]:
    return x, Link.find(link, q), KINDS[kind]


def _derivative_asks(
    x: Tensor, scale: Tensor, anchor: Tensor, offset: Tensor, grad: Tensor, link: int, q: float, kind: str, *_: Any
) -> tuple[Tensor, Link, Kind]:
    return x, Link.find(link, q), KINDS[kind]


def _has_offset_loop(x: Tensor, link: Link, kind: Kind) -> str | None:
    return _has_loops(x, link, kind) if kind == MASK else "the loop of the offset's derivative is for masks only"


# Backends are asked about the scores, the link and the kind of map.
threshold = Operator("threshold", exact.threshold, fake=lambda x, *_: _like_rows(x), asks=_asks)
mask = Operator("threshold_mask", exact.mask, fake=_like_x_and_rows, asks=_asks)
for _operator in (threshold, mask):
    _operator.backend("triton", module=".triton_forward", takes=_has_kernels)
    _operator.backend("numba", module=".numba_backend", takes=_has_loops)

mask_derivative = Operator(
    "threshold_mask_derivative", exact.mask_derivative, fake=_like_x_and_rows, asks=_derivative_asks
)
mask_derivative.backend("triton", module=".triton_backward", takes=_has_kernels)
mask_derivative.backend("numba", module=".numba_backend", takes=_has_loops)

threshold_derivative = Operator(
    "threshold_derivative", exact.threshold_derivative, fake=_like_x_and_rows, asks=_derivative_asks
)
threshold_derivative.backend("numba", module=".numba_backend", takes=_has_offset_loop)

MOST_RECIPES = 64  # that are kept
# The mask as a function of the scores only, for numbers k and scale, and its gradient, both at the least fixed cost.
_recipes = Backends(__name__, "recipe")
_recipes.name = mask.name
_recipes.backend("triton", module=".triton_plain", takes=_has_kernels)
_recipes.backend("numba", module=".numba_backend", takes=_has_loops)


def recipe(x: Tensor, link: Link, kind: Kind) -> Recipe | None:
    """How a plain call with these scores is computed, found once for each device, dtype, link and kind."""
    asked = x.device, x.dtype, link.key, kind.name
    if asked not in _recipes.known:
        if len(_recipes.known) >= MOST_RECIPES:  # of exponents that change from step to step
            _recipes.known.clear()
        make = _recipes.look_up(x, link, kind)
        _recipes.known[asked] = make and make(link, kind, x.dtype)
    found: Recipe | None = _recipes.known[asked]
    if found and log.isEnabledFor(logging.DEBUG):
        _recipes.tell(x, link, kind)
    return found


def solve_threshold(x: Tensor, k: Tensor | float, scale: Tensor | float = 1.0, link: Link = LOGISTIC) -> Tensor:
    """The t with ``sum(F((x - t) / scale)) = k`` along the last axis; not differentiable (the maps are).

    Args:
        x: Scores (..., n); ``-inf`` excludes an item, ``+inf`` selects it.
        k: Sum, between the numbers of ``+inf`` and of entries above ``-inf``; broadcasts to (...). At either limit,
            where every sufficiently distant t is a solution, the result lies ``link.reach`` scales beyond the scores.
        scale: Positive; broadcasts to (...).
        link: The link function F.

    Returns:
        float64 tensor (...).
    """
    k, scale = (in_rows_of(x, v).detach() for v in (k, scale))
    anchor, offset = threshold(x.detach(), k, scale, *link.key, "mask", "scale", False)
    return anchor + offset * scale
