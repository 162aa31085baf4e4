r"""The log-odds of a relaxed mask, from its scores: exact also where the mask itself has rounded to 0 or 1.

With :math:`y_i = F(z_i)`, :math:`z_i = (x_i - t)/s`, they are the log-odds of F at z, for the logistic link z itself.
Derivatives of z are those that follow from :math:`\sum_i F(z_i) = k`: with :math:`\omega_i = F'(z_i) / \sum_j F'(z_j)`

.. math:: dz_i = v_i - \langle \omega, v \rangle + dk / \textstyle\sum_j F'(z_j), \qquad v_i = (dx_i - z_i\, ds) / s .
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from khot.kernels import capped_simplex
from khot.kernels.autograd import move_batch_first, with_forward_mode
from khot.kernels.capped_simplex.derivative import balanced
from khot.kernels.links.base import Link
from khot.kernels.rows import Threshold, distances_of, in_rows_of

from .linked import link_of


def mask_log_odds(
    relaxation: Callable[..., Any], x: Tensor, k: float | Tensor, softness: float | Tensor
) -> Tensor | None:
    """Float64 log-odds of ``relaxation(x, k, softness)`` along the last axis, infinite where x is or all are certain.

    Differentiable in x, k and the softness to any order. None for a relaxation of which no link is known, or one that
    reaches 0 and 1: what that makes of scores beyond has no log-odds.
    """
    link = link_of(relaxation)
    if link is None or link.compact:
        return None
    size, scale = in_rows_of(x, k), in_rows_of(x, softness)
    z = link.log_odds(_apply(x.double(), size, scale, link))
    finite = x.isfinite()
    left = (size - (x == torch.inf).sum(-1)).unsqueeze(-1)
    z = z.masked_fill((left <= 0) & finite, -torch.inf)
    z = z.masked_fill((left >= finite.sum(-1, keepdim=True)) & finite, torch.inf)
    return torch.where(finite, z, x.double().detach())


class _Distances(Function):
    """(x, k, s) -> z of float64 x ``(..., n)``, k and s ``(...)``; 0 for infinite x."""

    @staticmethod
    def forward(x: Tensor, k: Tensor, scale: Tensor, link: Link) -> Tensor:
        at = Threshold(*capped_simplex.threshold(x, k, scale, link.key, "softness", False))
        return distances_of(x.masked_fill(x.isinf(), 0.0), at, scale).masked_fill(x.isinf(), 0.0)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, _, scale, ctx.link = inputs
        ctx.save_for_backward(x, scale, output)
        ctx.save_for_forward(x, scale, output)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        x, scale, z = ctx.saved_tensors
        g = g.masked_fill(x.isinf(), 0.0)
        share, total = _shares(ctx.link, x, z)
        pull = g.sum(-1)
        rest = balanced(g - share * pull.unsqueeze(-1), share) / scale.unsqueeze(-1)
        return rest, pull / total, -(rest * z).sum(-1), None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Tensor, int]:
        return _apply(*move_batch_first(info.batch_size, in_dims, args[:3]), args[3]), 0


def _shares(link: Link, x: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
    """omega, and the sum of the slopes, of the items with finite scores."""
    limit = 0.125 * torch.finfo(z.dtype).max
    z = torch.where(x.isinf(), x.sign() * limit, z)
    return link.normalised_slope(z), link.log_slope(z).logsumexp(-1).exp().clamp(min=torch.finfo(z.dtype).tiny)


def _jvp(ctx: Any, saved: list[Tensor], dx: Tensor | None, dk: Tensor | None, dscale: Tensor | None, *_: Any) -> Tensor:
    x, scale, z = saved
    share, total = _shares(ctx.link, x, z)
    moved = torch.zeros_like(z) if dx is None else dx
    if dscale is not None:
        moved = moved - z * dscale.unsqueeze(-1)
    moved = (moved / scale.unsqueeze(-1)).masked_fill(x.isinf(), 0.0)
    shift = (share * moved).sum(-1)
    shift = shift if dk is None else shift - dk / total
    return (moved - shift.unsqueeze(-1)).masked_fill(x.isinf(), 0.0)


_apply = with_forward_mode(_Distances, _jvp)
