r"""Masks of rows of which each process holds a part: what is found of the items here, and what of whole rows.

Between two reductions a process looks once at its items. In plain torch that is the code for whole rows; a backend may
have a loop for each step, :class:`khot.kernels.threshold.local_loops.LocalLoops`.

Derivatives. With slopes :math:`w_i = F'(z_i)` and their sum W, :math:`d_i = w_i g_i`, or
:math:`d_i = g_i F'(z_i) / F(z_i)` of the logarithm, cotangents g of the values and h of the threshold's offset c,

.. math:: b = \frac{\sum d - h}W, \qquad \frac{\partial L}{\partial x_i} = \frac{d_i - b w_i}s, \qquad
    \frac{\partial L}{\partial k} = b, \qquad
    \frac{\partial L}{\partial s} = -\frac1s \Big(\sum_i z_i d_i - b \sum_i z_i w_i + c h\Big),

which needs the sums of w, d, wz and dz: one collective, in float64.
"""

from typing import NamedTuple, cast

import torch
from torch import Tensor
from torch.nn.functional import pad

from khot._distributed.differentiable import seen_by_parts, sum_of_parts
from khot._distributed.shards import Shards

from ..links.base import Link
from ..links.logistic import LOGISTIC
from ..rows import Threshold
from .derivative import bounded_distances, far_logits, mask_values, per_share, rate_of_slopes
from .local_loops import LocalLoops
from .torch_backend import threshold_of_parts

Gradients = tuple[Tensor, Tensor, Tensor]


def mask_of_parts(
    x: Tensor,
    k: Tensor,
    scale: Tensor,
    link: Link,
    log: bool,
    softness: str,
    check: bool,
    shards: Shards,
    loops: LocalLoops | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """y or log y of the items x (..., m) here, and the threshold's anchor and offset, the same on all processes."""
    if loops is not None and not loops.take(scale):
        loops = None
    at = Threshold(*threshold_of_parts(x, k, scale, link, softness, check, shards, loops))
    y = (mask_values if loops is None else loops.values)(x, scale, at, link, log)
    return y.contiguous(), *at


def solve_threshold_of_parts(x: Tensor, k: Tensor, shards: Shards) -> Tensor:
    """The float64 t with ``sum(sigmoid(x - t)) = k`` over the items x (..., m) of all processes; not differentiable."""
    x = x.detach() if x.shape[-1] else pad(x.detach(), (0, 1), value=-torch.inf)
    k = k.to(torch.float64).expand(x.shape[:-1])
    anchor, offset = threshold_of_parts(x, k, torch.ones_like(k), LOGISTIC, "scale", False, shards)
    return anchor + offset


class _RowNumbers(NamedTuple):
    """Of rows (...): sums over all items, of slopes and what is made of them in units of ``unit``.

    The unit is 1 but where slopes underflow; there it is the largest slope, which may be 0 to the eye.
    """

    density: Tensor  # W
    pull: Tensor  # sum d
    first: Tensor  # sum w z
    lever: Tensor  # sum d z
    unit: Tensor | float = 1.0
    on_k: tuple[Tensor, ...] = ()  # of a logarithm whose slopes underflow: sum w g / F above the threshold, sum d below

    def gradients(self, grad_offset: Tensor | None, scale: Tensor, offset: Tensor, log: bool) -> Gradients:
        """b in the unit of items, dL/dk and dL/ds."""
        pushed = torch.zeros_like(offset) if grad_offset is None else grad_offset
        of_items = 1.0 if log else self.unit  # d of the mask has the unit of its slopes, d of the logarithm its own
        b = (of_items * self.pull - pushed) / self.density
        tiny = torch.finfo(offset.dtype).tiny
        true_density = (self.density * self.unit).clamp(min=tiny)
        held = self.density > tiny  # else no slope holds the threshold, which may lie anywhere
        of_offset = torch.where(held, pushed / torch.where(held, true_density, 1.0), 0.0)
        grad_k = self.pull / (true_density if log else self.density)
        if self.on_k:
            above, below = self.on_k
            grad_k = above / self.density + below / true_density
        levers = of_items * self.lever - b * self.first
        return b, grad_k - of_offset, -(levers + offset * pushed) / scale


def short_derivative(
    x: Tensor,
    scale: Tensor,
    at: Threshold,
    grad_y: Tensor,
    grad_offset: Tensor | None,
    link: Link,
    log: bool,
    with_scale: bool,
    shards: Shards,
    loops: LocalLoops,
) -> Gradients | None:
    """:func:`derivative_of_parts` by loops; None where slopes underflow, which all processes see alike."""
    sums = loops.slopes(x, scale, at, grad_y, link, log)
    numbers = shards.sum(*sums[: 4 if with_scale else 2])
    density, pull = numbers[:2]
    if _underflow(density, link):
        return None
    first, lever = numbers[2:] or (torch.zeros_like(pull),) * 2
    rows = _RowNumbers(density.clamp(min=torch.finfo(density.dtype).tiny), pull, first, lever)
    b, grad_k, grad_scale = rows.gradients(grad_offset, scale, at.offset, log)
    return loops.gradient(x, scale, at, grad_y, b, link, log), grad_k, grad_scale


def derivative_of_parts(
    x: Tensor,
    scale: Tensor,
    at: Threshold,
    grad_y: Tensor | None,
    grad_offset: Tensor | None,
    link: Link,
    log: bool,
    with_scale: bool,
    shards: Shards,
) -> Gradients:
    """dL/dx of the items here, dL/dk and dL/ds, the same on all processes; differentiable, as often as the link is.

    One collective; where slopes underflow up to eight.
    """
    here, offset = seen_by_parts(shards, scale, at.offset)
    z = bounded_distances(x.double(), Threshold(at.anchor, offset), here)
    grad = torch.zeros_like(z) if grad_y is None else grad_y.double()
    direct = grad.masked_fill(x == -torch.inf, 0) * link.log_derivative(z) if log else None
    slope, unit, on_k = link.slope(z), torch.ones_like(scale), cast(tuple[Tensor, ...], ())
    numbers = _sums(z, slope, slope * grad if direct is None else direct, with_scale, shards)
    if _underflow(numbers[0], link):
        exponent = link.log_slope(z)
        (top,) = shards.max(exponent.detach().amax(-1))
        far, unit = _underflows(numbers[0]).unsqueeze(-1), top.exp()
        place = Threshold(at.anchor.detach(), at.offset.detach())
        logits = far_logits(x.detach(), scale.detach(), place, link, shards)
        (highest,) = shards.max(logits.amax(-1))
        exact = logits - highest.nan_to_num(neginf=0.0).unsqueeze(-1) + rate_of_slopes(z, link)
        slope = torch.where(far, exact, torch.where(far, 0.0, exponent - top.unsqueeze(-1))).exp()
        numbers = _sums(z, slope, slope * grad if direct is None else direct, with_scale, shards)
        if direct is not None:  # as in :func:`khot.kernels.threshold.derivative.pull_on_k`
            below = direct.masked_fill(z > 0, 0.0).sum(-1)
            on_k = sum_of_parts(shards, per_share(z, slope * grad, link).sum(-1), below)
    density, pull, first, lever = numbers
    rows = _RowNumbers(density.clamp(min=torch.finfo(density.dtype).tiny), pull, first, lever, unit, on_k)
    b, grad_k, grad_scale = rows.gradients(grad_offset, scale, at.offset, log)
    (b,) = seen_by_parts(shards, b)
    pulled = (
        slope * (grad * unit.unsqueeze(-1) - b.unsqueeze(-1)) if direct is None else direct - slope * b.unsqueeze(-1)
    )
    return (pulled * here.reciprocal().unsqueeze(-1)).to(x.dtype), grad_k, grad_scale


def _sums(z: Tensor, slope: Tensor, direct: Tensor, with_scale: bool, shards: Shards) -> tuple[Tensor, ...]:
    """Of w and d, and if the scale has a gradient of w z and d z, else zeros."""
    sums = [slope.sum(-1), direct.sum(-1)]
    if with_scale:
        return sum_of_parts(shards, *sums, (slope * z).sum(-1), (direct * z).sum(-1))
    return *sum_of_parts(shards, *sums), *(torch.zeros_like(sums[0]),) * 2


def _underflow(density: Tensor, link: Link) -> bool:
    """Whether the slopes of some row make sense relative to each other only."""
    return not (link.compact and link.reaches_zero) and bool(_underflows(density).any())


def _underflows(density: Tensor) -> Tensor:
    limits = torch.finfo(density.dtype)
    return density < limits.tiny / limits.eps
