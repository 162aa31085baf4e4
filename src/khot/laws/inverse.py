"""The logits of the conditional Poisson design with given inclusion probabilities, and those of other families.

Differentiable by the implicit function theorem: the Jacobian of the inclusion probabilities is the covariance C of the
k-hot vector, so the change of the logits is the pseudo-inverse of C times the change of the probabilities. The code
that solves for the logits, and systems in C, is in :mod:`.inverse_newton`, or in a kernel.
"""

import math
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd import Function

from khot.kernels.call import is_first_derivative
from khot.kernels.count import (
    bernoulli_count,
    bernoulli_count_derivative,
    covariance_inverse,
    inclusion_inverse,
)
from khot.kernels.exact.row_slabs import by_rows
from khot.kernels.exact.rows import number_on
from khot.kernels.exact.small_numbers import sigmoid
from khot.kernels.operators.autograd import move_batch_first, with_forward_mode
from khot.kernels.registry import Operator
from khot.kernels.threshold import solve_threshold

from .conditional_poisson import pull_back, times_covariance
from .inverse_newton import (
    ACCEPTED,
    CONDITIONAL_POISSON,
    FAMILIES,
    NO_SUM,
    Family,
    centred,
    solve_scores,
    solve_system,
    without_mean,
)
from .tilted_tree import SLAB, Size

NEGLIGIBLE = 1e-250  # a probability below this counts as 0, before its variance underflows
CERTAIN = 1e-150  # a probability this close to 1 counts as 1, before its products with the remainder underflow
WIDE = 30.0  # log-odds beyond which loops leave a row, since its small probabilities would have fewer digits there
CG_TOLERANCE = 1e-13  # accuracy of derivatives
ROUNDING = 0.01  # of the precision of the given probabilities: digits that they do not have need not be solved for


def solve_logits(
    probs: Tensor, k: int | Tensor, family: Family = CONDITIONAL_POISSON, log_odds: Tensor | None = None
) -> Tensor:
    """Logits of the design of size k, conditional Poisson by default, whose inclusion probabilities are ``probs``.

    Differentiable in ``probs`` to any order by the implicit function theorem. If their sum differs from k, a common
    shift of their log-odds compensates it, and derivatives take this into account: weighted by pi (1 - pi), the
    derivatives in ``probs`` have mean 0, so that units of small probability, whose derivatives are large, do not cost
    the others digits.

    Args:
        probs: ``(*batch, n)`` in [0, 1] with sum k, up to rounding.
        k: Size of the subsets, int or integer tensor that broadcasts with the batch shape.
        family: The family of designs.
        log_odds: Float64 log-odds of the unrounded ``probs``, if they are known. Derivatives are then with respect to
            them.

    Returns:
        ``(*batch, n)`` float64. ``-inf`` where a probability is 0 (or below 1e-250) and ``+inf`` where it is 1, both
        without gradient; the others have mean 0.

    Raises:
        RuntimeError: If the iteration does not converge.

    References:
        [1] Chen, Dempster, Liu (1994), "Weighted finite population sampling to maximize entropy", Biometrika 81(3):
            proof of existence and uniqueness.
    """
    if isinstance(k, Tensor):
        k = k.expand(probs.shape[:-1])
    goal = max(family.goal, ROUNDING * torch.finfo(probs.dtype).eps)
    if log_odds is None:
        return cast(Tensor, _apply_solve(probs.double(), k, family.name, goal, None))
    return cast(Tensor, _apply_solve(sigmoid(log_odds), k, family.name, goal, log_odds.detach()))


def times_covariance_at(probs: Tensor, k: Tensor, g: Tensor) -> Tensor:
    """C g of the conditional Poisson design with inclusion probabilities ``probs``, ``(*batch, n)`` float64.

    If it is not differentiated again, kernels find the law and multiply.
    """
    if not (is_first_derivative(probs, k, g) and g.numel() and bernoulli_count.is_fused(probs)):
        return times_covariance(g.double(), solve_logits(probs, k), k)
    goal = max(CONDITIONAL_POISSON.goal, ROUNDING * torch.finfo(probs.dtype).eps)
    rows, right, sizes = _flat(probs.double()), _flat(g.double()), k.expand(probs.shape[:-1]).reshape(-1)
    logits, tilt, error = inclusion_inverse(rows.log() - torch.log1p(-rows), sizes, goal)
    product = bernoulli_count_derivative(logits, sizes, tilt, right)
    lost = ~(error <= max(ACCEPTED, goal))
    if lost.any():
        product[lost] = times_covariance(right[lost], solve_logits(_flat(probs)[lost], sizes[lost]), sizes[lost])
    return product.view(g.shape)


class _SolveLogits(Function):
    @staticmethod
    def forward(probs: Tensor, k: int | Tensor, family: str, goal: float, log_odds: Tensor | None) -> Tensor:
        return cast(Tensor, _solve(probs, *_tensor_or_int(k), family, goal, log_odds))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        probs, ctx.k, ctx.family, ctx.goal, _ = inputs
        ctx.save_for_backward(output, probs)
        ctx.save_for_forward(output, probs)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None, None, None, None]:
        logits, probs = ctx.saved_tensors
        return _pull_back(logits, probs, ctx.k, ctx.family, ctx.goal, grad_output), None, None, None, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Tensor, int]:
        return _apply_solve(*move_batch_first(info.batch_size, in_dims, args)), 0


def _pull_back(logits: Tensor, probs: Tensor, k: int | Tensor, family: str, goal: float, grad_logits: Tensor) -> Tensor:
    """The gradient in ``probs`` for a given gradient in the logits, which has mean 0.

    The gradient is a solution of the system as it stands where D is pi (1 - pi); only its derivatives need the system.
    """
    if family == CONDITIONAL_POISSON.name and not torch.is_grad_enabled():
        return cast(Tensor, _apply_covariance_solve(logits, grad_logits, k, family, goal))
    interior = logits.isfinite()
    b = without_mean(grad_logits.masked_fill(~interior, 0.0), interior, goal)
    return centred(_apply_covariance_solve(logits, b, k, family, goal), interior, probs * (1 - probs))


class _CovarianceSolve(Function):
    """v with C v = b over the finite logits, for b with sum 0 there; v is 0 elsewhere.

    The constant up to which v is determined is chosen so that sum D v = 0, with D the diagonal of C. A nonzero sum of
    b is removed: in proportion to D if it is rounding, which corresponds to a symmetric matrix times b, else evenly.
    """

    @staticmethod
    def forward(logits: Tensor, b: Tensor, k: int | Tensor, family: str, goal: float) -> Tensor:
        return cast(Tensor, solve_covariance(logits, b, *_tensor_or_int(k), family, goal))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        logits, _, ctx.k, ctx.family, ctx.goal = inputs
        ctx.save_for_backward(logits, output)
        ctx.save_for_forward(logits, output)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        logits, v = ctx.saved_tensors
        u = _apply_covariance_solve(logits, grad_output, ctx.k, ctx.family, ctx.goal)
        change = third_order(ctx.family, logits, ctx.k, v)
        return -change(u), u, None, None, None  # dv = C^-1 (db - dC v), up to a constant

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Tensor, int]:
        return _apply_covariance_solve(*move_batch_first(info.batch_size, in_dims, args)), 0


def third_order(family: str, logits: Tensor, k: Size, v: Tensor) -> Callable[[Tensor], Tensor]:
    """The derivative of C v in the logits, a symmetric matrix, as a map."""
    mean = FAMILIES[family].mean
    return pull_back(lambda t, k: pull_back(mean, t, k)[1](v), logits, k)[1]


def _solve_jvp(ctx: Any, saved: list[Tensor], dprobs: Tensor, *_: Any) -> Tensor:
    logits, probs = saved
    interior = logits.isfinite()
    weight = (probs * (1 - probs)).masked_fill(~interior, 0.0)
    total = weight.sum(-1, keepdim=True).clamp(min=torch.finfo(probs.dtype).tiny)
    b = dprobs.masked_fill(~interior, 0.0)
    b = b - weight * (b.sum(-1, keepdim=True) / total)  # by the shift that keeps the sum
    return centred(_apply_covariance_solve(logits, b, ctx.k, ctx.family, ctx.goal), interior)


def _covariance_solve_jvp(ctx: Any, saved: list[Tensor], dlogits: Tensor | None, db: Tensor | None, *_: Any) -> Tensor:
    logits, v = saved
    change = torch.zeros_like(v) if db is None else db
    if dlogits is not None:
        change = change - third_order(ctx.family, logits, ctx.k, v)(dlogits)
    return cast(Tensor, _apply_covariance_solve(logits, change, ctx.k, ctx.family, ctx.goal))


_apply_solve = with_forward_mode(_SolveLogits, _solve_jvp)
_apply_covariance_solve = with_forward_mode(_CovarianceSolve, _covariance_solve_jvp)


def _target(log_odds: Tensor, k: int | Tensor) -> Tensor:
    """The target log-odds, shifted so that the probabilities sum to k."""
    if log_odds.isnan().any():
        raise RuntimeError("no logits found for these probabilities, which contain NaN")
    target = log_odds.masked_fill(log_odds < math.log(NEGLIGIBLE), -torch.inf)
    target = target.masked_fill(log_odds > -math.log(CERTAIN), torch.inf)
    interior = target.isfinite()
    target = target - solve_threshold(target, k)[..., None]
    certain = (target == torch.inf).sum(-1)
    # If a probability rounds to 1, the small remainder for the others may vanish.
    left = (number_on(target.device, k) - certain)[..., None]
    target = target.masked_fill(interior & (left <= 0), -torch.inf)
    return target.masked_fill(interior & (left >= interior.sum(-1, keepdim=True)), torch.inf)


def _tensor_or_int(k: int | Tensor) -> tuple[Tensor | None, int | None]:
    """k as two arguments of an operator, one of which is None."""
    return (k, None) if isinstance(k, Tensor) else (None, k)


def _covariance_solution(
    logits: Tensor,
    b: Tensor,
    k: Tensor | None,
    size: int | None,
    family: str,
    goal: float,
) -> Tensor:
    """The v of :class:`_CovarianceSolve`."""

    def of_rows(k: "int | Tensor", logits: Tensor, b: Tensor) -> Tensor:
        solved_for = FAMILIES[family]
        scores = solved_for.scores(logits, k) if solved_for.factors else None
        interior = logits.isfinite()
        b = without_mean(b.masked_fill(~interior, 0.0), interior, goal)
        return solve_system(logits, b, k, solved_for, tolerance, scores)

    tolerance = max(CG_TOLERANCE, goal)
    if not _has_kernel(logits, family):
        return _by_rows(of_rows, _either(k, size), logits, b)
    rows, right, sizes = _flat(logits), _flat(b), _sizes(logits, k, size)
    v = covariance_inverse(rows, right, sizes, tolerance, NO_SUM * goal)
    lost = v.isnan().any(-1)
    if lost.any():
        v[lost] = _by_rows(of_rows, sizes[lost], rows[lost], right[lost])
    return v.view(logits.shape)


def _like_right_side(logits: Tensor, b: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(b, memory_format=torch.contiguous_format)


solve_covariance = Operator("covariance_solve", _covariance_solution, fake=_like_right_side, batch=False)


def _solution(
    probs: Tensor,
    k: Tensor | None,
    size: int | None,
    family: str,
    goal: float,
    log_odds: Tensor | None,
) -> Tensor:
    """:func:`solve_logits`, without derivatives."""
    solved_for = FAMILIES[family]._replace(goal=goal)

    def of_rows(k: "int | Tensor", given: Tensor) -> Tensor:
        return solve_scores(_target(given, k), k, solved_for)

    # Not `logit`, which wakes torch's threads even for a few numbers.
    given = probs.log() - torch.log1p(-probs) if log_odds is None else log_odds
    if not _has_kernel(given, family):
        return _by_rows(of_rows, _either(k, size), given)
    rows, sizes = _flat(given), _sizes(given, k, size)
    logits, _, error = inclusion_inverse(rows, sizes, goal)
    lost = ~(error <= max(ACCEPTED, goal)) | (rows.masked_fill(rows.isinf(), 0.0).abs().amax(-1) > WIDE)
    if lost.any():
        logits[lost] = _by_rows(of_rows, sizes[lost], rows[lost])
    return logits.view(given.shape)


def _has_kernel(x: Tensor, family: str) -> bool:
    """Whether a kernel solves these rows one by one."""
    return family == CONDITIONAL_POISSON.name and x.numel() > 0 and inclusion_inverse.is_fused(x)


def _flat(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


def _sizes(x: Tensor, k: Tensor | None, size: int | None) -> Tensor:
    """k of each row."""
    return x.new_full((x.numel() // x.shape[-1],), cast(int, size), dtype=torch.long) if k is None else k.reshape(-1)


def _like_probs(probs: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(probs, memory_format=torch.contiguous_format)


_solve = Operator("solve_logits", _solution, fake=_like_probs, batch=False)


def _by_rows(function: Callable[..., Tensor], k: int | Tensor, *arguments: Tensor) -> Tensor:
    """``function(k, *arguments)`` by slabs of rows, since product trees take much memory."""
    if isinstance(k, int):
        return by_rows(lambda *rows: (function(k, *rows),), SLAB, *arguments)[0]
    return by_rows(lambda *rows: (function(rows[-1].squeeze(-1), *rows[:-1]),), SLAB, *arguments, k.unsqueeze(-1))[0]


def _either(k: Tensor | None, size: int | None) -> int | Tensor:
    return cast(int, size) if k is None else k
