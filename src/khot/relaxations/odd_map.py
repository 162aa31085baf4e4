r"""What the sparse maps by absolute value share: odd functions of x whose threshold moves with :math:`a = |x|`.

A map is :math:`y_i = \mathrm{sign}(x_i)\, Y(a_i, t, \lambda)` with one t per row. With
:math:`v_i = da_i - e_i\,d\lambda`,

.. math:: dt = \frac{\langle w, v\rangle - c\,dk}{W}, \qquad d|y_i| = s_i v_i - w_i\,dt ,

where s_i is the slope of Y in a, w_i the same for the entries that follow the threshold and 0 for the others, e_i how
much of a the strength takes, and c / W the shift of t by k. Each map gives these in differentiable operations of a, t
and the strength; t is an output of the function, so derivatives of every order follow as in
:mod:`khot.relaxations.engine`.
"""

from abc import ABC, abstractmethod
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from khot._validation import check_k, check_scores, check_softness, checks_contents
from khot.kernels.capped_simplex import compute_dtype, move_batch_first
from khot.kernels.clipped_power import ClippedPower
from khot.kernels.forward_mode import with_forward_mode
from khot.kernels.odd_threshold import odd_threshold


class LocalShape(NamedTuple):
    """What the derivatives are made of; tensors (..., n) in the computing dtype, or (...) in float64.

    Attributes:
        slope: s, the derivative of abs(y) in a at a fixed threshold.
        following: w, the same for entries that depend on the threshold.
        lever: e, minus the ratio of the derivatives of abs(y) in the strength and in a.
        total: W (...); 0 where the threshold is idle.
        unit: c (...).
    """

    slope: Tensor
    following: Tensor
    lever: Tensor
    total: Tensor
    unit: Tensor


class OddMap(ABC):
    """A map by absolute value, for one link."""

    magnitude: bool  # which of the thresholds of khot.kernels.odd_threshold

    def __init__(self, link: ClippedPower) -> None:
        self.link = link

    @abstractmethod
    def value(self, a: Tensor, threshold: Tensor, strength: Tensor) -> Tensor:
        """abs(y) for a = abs(x) of shape (..., n), threshold and strength of shape (...) in float64."""

    @abstractmethod
    def local_shape(self, a: Tensor, threshold: Tensor, strength: Tensor) -> LocalShape:
        """The parts of the derivatives, in differentiable operations."""


def _solve_linear(shape: LocalShape, numerator: Tensor) -> Tensor:
    """numerator / W, and 0 where W is."""
    return torch.where(shape.total > 0, numerator / torch.where(shape.total > 0, shape.total, 1.0), 0.0)


class _OddFunction(Function):
    """(x, k, strength) -> (y, t) for x of shape (..., n), float64 k and strength of shape (...)."""

    @staticmethod
    def forward(x: Tensor, k: Tensor, strength: Tensor, map: OddMap, check: bool) -> tuple[Tensor, Tensor]:
        threshold = odd_threshold(x, k, strength, map.link.key, map.magnitude, check)
        wide = x.to(compute_dtype(x))
        y = wide.sign() * map.value(wide.abs(), threshold, strength)
        return y.to(x.dtype), threshold

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        x, _, strength, ctx.map, _ = inputs
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, strength, output[1])
        ctx.save_for_forward(x, strength, output[1])

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor | None, grad_t: Tensor | None) -> tuple[Tensor | None, ...]:
        x, strength, threshold = ctx.saved_tensors
        wide = x.to(compute_dtype(x))
        sign, shape = wide.sign(), ctx.map.local_shape(wide.abs(), threshold, strength)
        inward = torch.zeros_like(wide) if grad_y is None else grad_y.to(wide.dtype) * sign
        pull = (inward * shape.following).sum(-1).double()
        push = _solve_linear(shape, pull if grad_t is None else pull - grad_t)
        grad_a = inward * shape.slope - shape.following * push.to(wide.dtype).unsqueeze(-1)
        grad_strength = -(grad_a * shape.lever).sum(-1).double()
        return (grad_a * sign).to(x.dtype), push * shape.unit, grad_strength, None, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Any, Any]:
        x, k, strength = move_batch_first(info.batch_size, in_dims, args[:3])
        return _apply(x, k, strength, args[3], False), (0, 0)


def _jvp(
    ctx: Any, saved: list[Tensor], dx: Tensor | None, dk: Tensor | None, ds: Tensor | None, *_: Any
) -> tuple[Tensor, Tensor]:
    x, strength, threshold = saved
    wide = x.to(compute_dtype(x))
    sign, shape = wide.sign(), ctx.map.local_shape(wide.abs(), threshold, strength)
    moved = torch.zeros_like(wide) if dx is None else dx.to(wide.dtype) * sign
    if ds is not None:
        moved = moved - shape.lever * ds.to(wide.dtype).unsqueeze(-1)
    push = (shape.following * moved).sum(-1).double()
    dt = _solve_linear(shape, push if dk is None else push - shape.unit * dk)
    dy = sign * (shape.slope * moved - shape.following * dt.to(wide.dtype).unsqueeze(-1))
    return dy.to(x.dtype), dt


_apply = with_forward_mode(_OddFunction, _jvp)


def odd_map(x: Tensor, k: float | Tensor, strength: float | Tensor, dim: int, map: OddMap) -> Tensor:
    """Checks the arguments and applies the map along ``dim``."""
    check_scores(x, dim)
    x = x.movedim(dim, -1)
    batch, n = x.shape[:-1], x.shape[-1]
    check_k(k, x, batch, n)
    check_softness("strength", strength, x, batch)
    k, strength = (
        v.to(x.device, torch.float64).expand(batch)
        if isinstance(v, Tensor)
        else torch.full(batch, v, dtype=torch.float64, device=x.device)
        for v in (k, strength)
    )
    y, _ = _apply(x, k, strength, map, checks_contents(x))
    return y.movedim(-1, dim)
