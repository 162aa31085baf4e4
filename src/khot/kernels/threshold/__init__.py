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

from typing import Any

import torch
from torch import Tensor

from ..exact.rows import in_rows_of
from ..links.base import Link
from ..links.logistic import LOGISTIC
from ..registry import Choice, Operation, Operator
from . import exact
from .kinds import KINDS, MASK

__all__ = ["mask", "mask_derivative", "recipes", "solve_threshold"]


STEEPEST = 256.0  # powers up to which loops compute; the rounding of their distances is magnified by so much


def _fake(x: Tensor, k: Tensor, scale: Tensor, *options: Any) -> tuple[Tensor, Tensor, Tensor]:
    return _like_x_and_rows(x if options[-1] else x[..., :0])


def _like_x_and_rows(x: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    anchor = x.new_empty(x.shape[:-1], dtype=torch.float64)
    return torch.empty_like(x, memory_format=torch.contiguous_format), anchor, torch.empty_like(anchor)


def _has_loops(x: Tensor, number: int, q: float, name: str, of_offset: bool = False) -> str | None:
    link, kind = Link.find(number, q), KINDS[name]
    if of_offset and kind != MASK:
        return "the loop of the offset's derivative is for masks only"
    if link.compact and link.condition > STEEPEST:
        return f"a power of {link.condition:.3g} needs distances of more digits"
    if link.has_kernel(kind.log):
        return None
    return f"the link {type(link).__name__} has no loops" + (" of logarithms" if kind.log else "")


def _has_kernels(x: Tensor, number: int, q: float, name: str, of_offset: bool = False) -> str | None:
    if of_offset:
        return "there are no kernels for the derivative of an offset"
    return "there are no kernels for odd maps" if KINDS[name].absolute else _has_loops(x, number, q, name)


# Backends are asked about the scores, the key of the link and the name of the kind of map; and about a derivative,
# whether it is that of the offset.
mask = Operator("threshold_mask", exact.mask, fake=_fake, asks=lambda x, k, s, *options: (x, *options[:3]))
mask.backend("triton", module=".triton_forward", takes=_has_kernels)
mask.backend("numba", module=".numba_backend", takes=_has_loops)

mask_derivative = Operator(
    "threshold_mask_derivative",
    exact.mask_derivative,
    fake=_like_x_and_rows,
    asks=lambda x, s, anchor, offset, grad, *options: (x, *options[:3], grad.dim() < x.dim()),
)
mask_derivative.backend("triton", module=".triton_backward", takes=_has_kernels)
mask_derivative.backend("numba", module=".numba_backend", takes=_has_loops)


class _Recipes(Operation):
    """The mask as a function of the scores only, for numbers k and scale, and its gradient, at the least fixed cost.

    Each :class:`Recipe` is made once. Without one, the operator computes a call, and tells so.
    """

    def load(self, name: str, *asked: Any) -> Any:
        x, number, q, kind = asked
        return super().load(name)(Link.find(number, q), KINDS[kind], x.dtype)

    def choose(self, x: Tensor, *facts: Any) -> Choice:
        found = super().choose(x, *facts)
        return found if found.code else Choice(None, "")


recipes = _Recipes(__name__, "recipe")
recipes.name = mask.name
recipes.backend("triton", module=".triton_backward", takes=_has_kernels)
recipes.backend("numba", module=".numba_backend", takes=_has_loops)


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
    _, anchor, offset = mask(x.detach(), k, scale, *link.key, MASK.name, "scale", False, False)
    return anchor + offset * scale
