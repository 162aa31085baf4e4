r"""Masks of rows of which each process holds a part of the items: thresholds and derivatives by sums over all parts.

The root finder is that of :mod:`khot.kernels.capped_simplex.search` in plain torch, whatever the backend: one
collective finds the range of the rows, one their counts and moments, and each step adds four float64 numbers a row.

With slopes :math:`w_i = F'(z_i)`, their sum W, and :math:`d_i = w_i g_i`, or :math:`d_i = g_i F'(z_i) / F(z_i)` of the
logarithm, cotangents g of the values and h of the threshold,

.. math:: \frac{\partial L}{\partial x_i} = \frac1s \Big(d_i - \frac{w_i}{W} \sum_j d_j\Big) + \frac{w_i}{W} h, \qquad
    \frac{\partial L}{\partial k} = \frac{\sum d - s h}{W}, \qquad
    \frac{\partial L}{\partial s} = -\frac1s \sum_i z_i \Big(d_i - \frac{w_i}{W} \sum_j d_j\Big)
    - \frac h W \sum_i w_i z_i,

which needs the sums of w, d, wz and dz: one collective, in float64. These derivatives are of the first order.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad

from khot._distributed.shards import Shards
from khot._validation import checks_contents
from khot.kernels import capped_simplex, magnitude
from khot.kernels.capped_simplex.derivative import mask_values
from khot.kernels.links.base import Link
from khot.kernels.links.clipped_power import ClippedPower
from khot.kernels.rows import Threshold, compute_dtype, distances_of


def _row_numbers(value: float | Tensor, x: Tensor) -> Tensor:
    """In float64, one for each row."""
    if isinstance(value, Tensor):
        return value.to(x.device, torch.float64).expand(x.shape[:-1])
    return torch.full(x.shape[:-1], value, dtype=torch.float64, device=x.device)


def _with_items(x: Tensor, masked: float) -> Tensor:
    """x (..., n), where there are no items with one that is masked: nothing takes the maximum of nothing."""
    return x if x.shape[-1] else pad(x, (0, 1), value=masked)


class _MaskOfParts(Function):
    """(x, k, s) -> (y or log y, t) for parts x (..., m) of rows, float64 k and s (...), the same on all processes."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, k: Tensor, scale: Tensor, link: Link, log: bool, softness: str, shards: Shards
    ) -> tuple[Tensor, Tensor]:
        check = checks_contents(x)
        at = Threshold(*capped_simplex.threshold_of_parts(x, k, scale, link, softness, check, shards))
        ctx.save_for_backward(x, scale, *at)
        ctx.set_materialize_grads(False)
        ctx.link, ctx.log, ctx.shards = link, log, shards
        return mask_values(x, scale, at, link, log).contiguous(), at.anchor + at.offset * scale

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y: Tensor | None, grad_t: Tensor | None) -> tuple[Tensor | None, ...]:
        x, scale, anchor, offset = ctx.saved_tensors
        limit = 0.125 * torch.finfo(torch.float64).max  # of infinite scores: 0 * z stays 0

        def distances() -> Tensor:
            return distances_of(x.double(), Threshold(anchor, offset), scale).clamp_(-limit, limit)

        grad = torch.zeros_like(x, dtype=torch.float64) if grad_y is None else grad_y.double()
        if ctx.log:
            grad = grad.masked_fill(x == -torch.inf, 0)
        with_levers = grad_t is not None or ctx.needs_input_grad[2]
        here = _Slopes.of(distances, grad, ctx.link, ctx.log, with_levers, ctx.shards)
        pulled, column = here.pulled.unsqueeze(-1), scale.reciprocal().unsqueeze(-1)
        grad_z = here.direct - here.share * pulled if ctx.log else here.slope * (grad - pulled)
        grad_x, grad_k = grad_z.mul_(column), here.pulled / here.density if ctx.log else here.pulled
        grad_scale = -here.lever / scale
        if grad_t is not None:
            grad_x = grad_x + here.share * grad_t.unsqueeze(-1)
            grad_k = grad_k - grad_t * scale / here.density
            grad_scale = grad_scale - grad_t * here.centre
        return grad_x.to(x.dtype), grad_k, grad_scale, *(None,) * 4


class _Slopes(NamedTuple):
    """What the derivatives are made of: of the items here (..., m), and of whole rows (...)."""

    slope: Tensor  # w
    direct: Tensor  # d
    density: Tensor  # W
    pulled: Tensor  # sum d, divided by W if that is not of the logarithm
    lever: Tensor  # sum z dL/dz, 0 if it is not wanted
    centre: Tensor  # sum w z / W, the same
    scaled: tuple[Tensor, Tensor]  # w and W, up to one factor of a row

    @property
    def share(self) -> Tensor:
        """w / W."""
        slope, density = self.scaled
        return slope / density.unsqueeze(-1)

    @classmethod
    def of(
        cls, distances: Callable[[], Tensor], grad: Tensor, link: Link, log: bool, with_levers: bool, shards: Shards
    ) -> "_Slopes":
        z, limits, top = distances(), torch.finfo(torch.float64), torch.zeros_like(grad[..., 0])
        direct = grad * link.log_derivative(z) if log else grad
        slope = link.slope(z) if with_levers else link.slope_(z)  # which leaves nothing of z
        direct = direct if log else grad * slope
        density, pull, first, lever = cls._sums(z, slope, direct, with_levers, shards)
        underflow = density < limits.tiny / limits.eps
        if not (link.compact and link.reaches_zero) and bool(underflow.any()):  # on all processes: they know one W
            z = distances()
            exponent = link.log_slope(z)
            (top,) = shards.max(exponent.amax(-1))
            slope = (exponent - top.unsqueeze(-1)).exp()
            direct = direct if log else grad * slope
            density, pull, first, lever = cls._sums(z, slope, direct, with_levers, shards)
        density = density.clamp(min=limits.tiny)
        size, pulled, scaled = top.exp(), pull if log else pull / density, (slope, density)
        centre = first / density
        lever = lever - centre * pull if log else size * (lever - pulled * first)
        density = (density * size).clamp(min=limits.tiny)
        if bool(underflow.any()):
            slope = slope * size.unsqueeze(-1)
        return cls(slope, direct, density, pulled, lever, centre, scaled)

    @staticmethod
    def _sums(z: Tensor, slope: Tensor, direct: Tensor, with_levers: bool, shards: Shards) -> list[Tensor]:
        sums = [slope.sum(-1), direct.sum(-1)]
        if with_levers:
            return shards.sum(*sums, (slope * z).sum(-1), (direct * z).sum(-1))
        return [*shards.sum(*sums), torch.zeros_like(sums[0]), torch.zeros_like(sums[0])]


def mask_of_parts(
    x: Tensor, k: float | Tensor, softness: float | Tensor, link: Link, name: str, log: bool, shards: Shards
) -> tuple[Tensor, Tensor]:
    """The mask of the items x (..., m) that this process holds, or its logarithm, and the threshold in float64."""
    items = _with_items(x, -torch.inf)
    numbers = (_row_numbers(value, x) for value in (k, softness))
    y, t = _MaskOfParts.apply(items, *numbers, link, log, name, shards)
    return y[..., : x.shape[-1]], t


class _OddMapOfParts(Function):
    """(x, k, strength) -> y for parts x (..., m) of rows; see :mod:`khot.kernels.magnitude`."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, k: Tensor, strength: Tensor, link: ClippedPower, magnitudes: bool, shards: Shards
    ) -> Tensor:
        check = checks_contents(x)
        y, *at = magnitude.odd_map_of_parts(x, k, strength, link, magnitudes, check, shards)
        ctx.save_for_backward(x, strength, *at)
        ctx.link, ctx.magnitudes, ctx.shards = link, magnitudes, shards
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, strength, anchor, offset = ctx.saved_tensors
        with_strength = ctx.needs_input_grad[2]
        grads = magnitude.odd_map_of_parts_derivative(
            x, strength, anchor, offset, grad, ctx.link, ctx.magnitudes, with_strength, ctx.shards
        )
        return *grads, *(None,) * 3


def odd_map_of_parts(
    x: Tensor, k: float | Tensor, strength: float | Tensor, link: ClippedPower, magnitudes: bool, shards: Shards
) -> Tensor:
    """The map by absolute value of the items x (..., m) that this process holds."""
    numbers = (_row_numbers(value, x) for value in (k, strength))
    y: Tensor = _OddMapOfParts.apply(_with_items(x, 0.0), *numbers, link, magnitudes, shards)
    return y[..., : x.shape[-1]]


def topk_mask_of_parts(x: Tensor, k: int | Tensor, shards: Shards) -> Tensor:
    """The hard mask of the items x (..., m) that this process holds; of tied items those of the first processes.

    Every process sends its k largest items, or all if it has less: one collective.
    """
    size = _row_numbers(k, x).long()
    if size.numel() == 0:  # no rows, on any of these processes
        return torch.zeros_like(x)
    items = _with_items(x.detach().to(compute_dtype(x)), -torch.inf)
    sent = max(1, min(int(size.amax()), max(shards.lengths)))
    best = items.topk(min(sent, items.shape[-1]), -1).values
    candidates = shards.gather(pad(best, (0, sent - best.shape[-1]), value=-torch.inf))
    ordered = candidates.movedim(0, -1).flatten(-2)
    if checks_contents(x) and bool(ordered.isnan().any()):  # which counts as the largest
        raise ValueError("`x` must not contain NaN")
    ordered = ordered.sort(-1, descending=True).values
    last = ordered.gather(-1, (size - 1).clamp(0, ordered.shape[-1] - 1).unsqueeze(-1))
    real = torch.arange(sent, device=x.device) < torch.tensor(shards.lengths, device=x.device).unsqueeze(-1)
    real = real.view(-1, *(1,) * size.dim(), sent)  # and no padding
    tied = ((candidates == last) & real).sum(-1)
    left = size - (ordered > last).sum(-1) - tied[: shards.own].sum(0)  # for the ties here and on later processes
    ties = items == last
    mask = (items > last) | (ties & (ties.cumsum(-1) <= left.unsqueeze(-1)))
    mask &= (size > 0).unsqueeze(-1)
    return mask[..., : x.shape[-1]].to(x.dtype)
