"""The logits of the conditional Poisson law of several sizes with given inclusion probabilities.

The covariance C is not singular if the size varies. Rows with a single size have a singular C; of their logits and of
the solutions of their systems only differences matter, as in :mod:`.inverse`.
"""

from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd import Function

from khot.kernels.exact.rows import number_on
from khot.kernels.operators.autograd import move_batch_first
from khot.kernels.registry import Operator

from .inverse import CG_TOLERANCE, ROUNDING, solve_covariance, solve_logits, third_order
from .inverse_newton import (
    CONDITIONAL_POISSON,
    RANGE,
    centred,
    interior_of,
    solve_scores,
    solve_system,
    without_mean,
)
from .size_range import SizeRange

SUM_ROUNDING = 1e-12  # of a sum of probabilities
NO_VARIANCE = 1e-30  # a probability below this counts as 0 if the size varies: nothing else depends on its unit


def sizes_around(probs: Tensor, low: Tensor, high: Tensor) -> SizeRange:
    """The range of sizes of a law with these inclusion probabilities; a single end, if their sum rounds to it.

    In a wider range, no finite logits have this mean; with that end alone, they do.
    """
    total = probs.detach().double().sum(-1)
    rounding = SUM_ROUNDING * total.clamp(min=1.0)
    at_low, at_high = total <= low + rounding, total >= high - rounding
    return SizeRange(torch.where(at_high & ~at_low, high, low), torch.where(at_low, low, high))


def solve_range_logits(probs: Tensor, sizes: SizeRange) -> Tensor:
    """Logits of the law of several sizes with inclusion probabilities ``probs``, differentiable in these to any order.

    Args:
        probs: ``(*batch, n)`` in [0, 1], each row a mean of vectors of these sizes.
        sizes: Integer tensors that broadcast with the batch shape, as :func:`sizes_around` returns them.

    Returns:
        ``(*batch, n)`` float64; infinite where a probability is 1 or 0 (or below 1e-30), without gradient.

    Raises:
        RuntimeError: If the iteration does not converge.
    """
    low, high = (number_on(probs.device, end).expand(probs.shape[:-1]) for end in sizes)
    goal = max(RANGE.goal, ROUNDING * torch.finfo(probs.dtype).eps)
    return cast(Tensor, _RangeLogits.apply(probs.double(), low, high, goal))


class _RangeLogits(Function):
    @staticmethod
    def forward(probs: Tensor, low: Tensor, high: Tensor, goal: float) -> Tensor:
        return cast(Tensor, _solve(probs, low, high, goal))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        *tensors, ctx.goal = inputs
        ctx.save_for_backward(output, *tensors)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None, None, None]:
        logits, probs, low, high = ctx.saved_tensors
        single, interior = (low == high)[..., None], logits.isfinite()
        b = interior_of(grad_output, interior)
        b = torch.where(single, without_mean(b, interior, ctx.goal), b)
        v = _RangeSystem.apply(logits, b, low, high, ctx.goal)
        return torch.where(single, centred(v, interior, probs * (1 - probs)), v), None, None, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Tensor, int]:
        return cast(Tensor, _RangeLogits.apply(*move_batch_first(info.batch_size, in_dims, args))), 0


class _RangeSystem(Function):
    """v with C v = b over the finite logits, up to a constant in rows of a single size; v is 0 elsewhere."""

    @staticmethod
    def forward(logits: Tensor, b: Tensor, low: Tensor, high: Tensor, goal: float) -> Tensor:
        return cast(Tensor, _solve_covariance(logits, b, low, high, goal))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        logits, _, low, high, ctx.goal = inputs
        ctx.save_for_backward(logits, output, low, high)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        logits, v, low, high = ctx.saved_tensors
        b = interior_of(grad_output, logits.isfinite())
        u = _RangeSystem.apply(logits, b, low, high, ctx.goal)
        change = third_order(CONDITIONAL_POISSON.name, logits, SizeRange(low, high), v)
        return -change(u), u, None, None, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Tensor, int]:
        return cast(Tensor, _RangeSystem.apply(*move_batch_first(info.batch_size, in_dims, args))), 0


def _solution(probs: Tensor, low: Tensor, high: Tensor, goal: float) -> Tensor:
    """:func:`solve_range_logits`, without derivatives."""
    target = probs.log() - torch.log1p(-probs)
    target = target.masked_fill(probs < NO_VARIANCE, -torch.inf)
    single, logits = low == high, _like_first(probs)
    if single.any():
        logits[single] = solve_logits(probs[single], low[single], CONDITIONAL_POISSON._replace(goal=goal))
    if not single.all():
        sizes = SizeRange(low[~single], high[~single])
        logits[~single] = solve_scores(target[~single], sizes, RANGE._replace(goal=goal))
    return logits


def _covariance_solution(logits: Tensor, b: Tensor, low: Tensor, high: Tensor, goal: float) -> Tensor:
    """The v of :class:`_RangeSystem`."""
    single, v = low == high, _like_first(b)
    if single.any():
        v[single] = solve_covariance(logits[single], b[single], low[single], None, CONDITIONAL_POISSON.name, goal)
    if not single.all():
        sizes = SizeRange(low[~single], high[~single])
        v[~single] = solve_system(logits[~single], b[~single], sizes, RANGE, max(CG_TOLERANCE, goal), None)
    return v


def _like_first(x: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


_solve = Operator("solve_range_logits", _solution, fake=_like_first, batch=False)
_solve_covariance = Operator("range_covariance_solve", _covariance_solution, fake=_like_first, batch=False)
