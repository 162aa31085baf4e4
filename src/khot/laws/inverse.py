"""The logits of a conditional Poisson design, or of one of another family, with given inclusion probabilities.

Differentiable by the implicit function theorem: the Jacobian of the inclusion probabilities is the covariance C of the
k-hot vector, so the change of the logits is the pseudo-inverse of C times the change of the probabilities. The code
that solves for the logits, and systems in C, is in :mod:`.inverse_newton`, or in a kernel.

C is not singular if the size varies. At a single size, only differences of the logits and of the solutions matter. Rows
of a range may also have a single size, ``low == high``.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd import Function

from khot._contents import is_dry_run
from khot._torch_internals import no_view
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
from khot.kernels.threshold import solve_threshold

from .conditional_poisson import times_covariance
from .inverse_newton import (
    ACCEPTED,
    CONDITIONAL_POISSON,
    NO_SUM,
    RANGE,
    Family,
    centred,
    solve_scores,
    solve_system,
    without_mean,
)
from .size_range import SizeRange
from .tilted_tree import SLAB, Size

NEGLIGIBLE = 1e-250  # a probability below this counts as 0, before its variance underflows
NO_VARIANCE = 1e-30  # a probability below this counts as 0 if the size varies: nothing else depends on its unit
CERTAIN = 1e-150  # a probability this close to 1 counts as 1, before its products with the remainder underflow
WIDE = 30.0  # log-odds beyond which loops leave a row, since its small probabilities would have fewer digits there
ONCE = (
    "second derivatives through logits that are found for given inclusion probabilities are not implemented. Give "
    "ConditionalPoisson and GumbelTopK `logits=` instead of `probs=`, and ParetoSampling another `adjust` than "
    "'exact'; write ConditionalPoisson(logits=logits, k=(low, high)) in place of PhantomUnit(ConditionalPoisson); "
    "or differentiate once"
)
CG_TOLERANCE = 1e-13  # accuracy of derivatives
ROUNDING = 0.01  # share of the precision of the given probabilities to which logits are solved


def solve_logits(
    probs: Tensor, k: Size, family: Family = CONDITIONAL_POISSON, log_odds: Tensor | None = None
) -> Tensor:
    """Logits of the design of size k, conditional Poisson by default, whose inclusion probabilities are ``probs``.

    Differentiable once in ``probs``, in either mode, by the implicit function theorem. If their sum differs from k, a
    common shift of their log-odds compensates it, and derivatives take this into account: weighted by pi (1 - pi), the
    derivatives in ``probs`` have mean 0, so that units of small probability, whose derivatives are large, do not cost
    the others digits.

    Args:
        probs: ``(*batch, n)`` in [0, 1] with sum k, up to rounding, or with a sum in the range k.
        k: Size of the subsets, int or integer tensor that broadcasts with the batch shape; or a range of such
            tensors, as :func:`.size_range.sizes_around` returns it.
        family: The family of designs; for a range the conditional Poisson designs.
        log_odds: Float64 log-odds of the unrounded ``probs``, if they are known. Derivatives are then with respect to
            them.

    Returns:
        ``(*batch, n)`` float64. ``-inf`` where a probability is 0 (or below 1e-250, or 1e-30 if the size varies) and
        ``+inf`` where it is 1, both without gradient; the others have mean 0 if the size does not vary.

    Raises:
        RuntimeError: If the iteration does not converge.

    References:
        [1] Chen, Dempster, Liu (1994), "Weighted finite population sampling to maximize entropy", Biometrika 81(3):
            proof of existence and uniqueness.
    """
    ends = k if isinstance(k, SizeRange) else (k, None)
    low, high = [end.expand(probs.shape[:-1]) if isinstance(end, Tensor) else end for end in ends]
    goal = max(family.goal, ROUNDING * torch.finfo(probs.dtype).eps)
    if log_odds is None:
        return cast(Tensor, _apply_solve(probs.double(), low, high, family, goal, None))
    return cast(Tensor, _apply_solve(sigmoid(log_odds), low, high, family, goal, log_odds.detach()))


def times_covariance_at(probs: Tensor, k: Tensor | SizeRange, g: Tensor) -> Tensor:
    """C g of the conditional Poisson design with inclusion probabilities ``probs``, ``(*batch, n)`` float64.

    If it is not differentiated again and the size is single, kernels find the law and multiply.
    """
    is_plain = not isinstance(k, SizeRange) and g.numel() and is_first_derivative(probs, k, g)
    if isinstance(k, SizeRange) or not (is_plain and bernoulli_count.is_fused(probs, probs.shape[-1])):
        return times_covariance(g.double(), solve_logits(probs, k), k)
    goal = max(CONDITIONAL_POISSON.goal, ROUNDING * torch.finfo(probs.dtype).eps)
    rows, right, sizes = _flat(probs.double()), _flat(g.double()), k.expand(probs.shape[:-1]).reshape(-1)
    logits, tilt, error = inclusion_inverse.loop(rows.log() - torch.log1p(-rows), sizes, goal)
    lost = ~(error <= max(ACCEPTED, goal))
    if lost.all():
        product = torch.empty_like(right)
    else:
        product = bernoulli_count_derivative.loop(logits, sizes, sizes, tilt, 1 - rows, rows, right)
        lost |= product.isnan().any(-1)
    if lost.any():
        product[lost] = times_covariance(right[lost], solve_logits(_flat(probs)[lost], sizes[lost]), sizes[lost])
    return product.view(g.shape)


class _SolveLogits(Function):
    @staticmethod
    def forward(
        probs: Tensor, low: int | Tensor, high: Tensor | None, family: Family, goal: float, log_odds: Tensor | None
    ) -> Tensor:
        return no_view(_solution(probs, low, high, family, goal, log_odds))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        probs, *ctx.design, _ = inputs
        ctx.set_materialize_grads(False)  # a gradient that does not use the logits can be differentiated again
        ctx.save_for_backward(output, probs)
        ctx.save_for_forward(output, probs)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor | None) -> tuple[Tensor | None, None, None, None, None, None]:
        logits, probs = ctx.saved_tensors
        grad = None if grad_output is None else _pull_back(logits, probs, ctx.design, grad_output)
        return grad, None, None, None, None, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Tensor, int]:
        return _apply_solve(*move_batch_first(info.batch_size, in_dims, args)), 0


def _pull_back(logits: Tensor, probs: Tensor, design: Sequence[Any], grad_logits: Tensor) -> Tensor:
    """The gradient in ``probs`` for a given gradient in the logits, which has mean 0 in rows of a single size."""
    _, _, family, goal = design
    if not torch.is_grad_enabled() and family is CONDITIONAL_POISSON:  # a solution as it stands, as D is pi (1 - pi)
        return cast(Tensor, _apply_covariance_solve(logits, grad_logits, *design))
    interior, b = logits.isfinite(), grad_logits
    if family is not CONDITIONAL_POISSON:
        b = without_mean(grad_logits.masked_fill(~interior, 0.0), interior, goal)
    v = _apply_covariance_solve(_DifferentiatedOnce.apply(logits), b, *design)
    return _if_single(design, centred(v, interior, probs * (1 - probs)), v)


def _if_single(design: Sequence[Any], x: Tensor, otherwise: Tensor) -> Tensor:
    """x in rows of a single size."""
    low, high, *_ = design
    return x if high is None else torch.where((low == high)[..., None], x, otherwise)


class _DifferentiatedOnce(Function):
    """The identity. Its derivative, which is asked for only if something depends on the argument, is an error."""

    generate_vmap_rule = True

    @staticmethod
    def forward(logits: Tensor) -> Tensor:
        return logits.view_as(logits)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        raise NotImplementedError(ONCE)

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor) -> Any:
        raise NotImplementedError(ONCE)


class _CovarianceSolve(Function):
    """v with C v = b over the finite logits, for b with sum 0 there if the size is single; v is 0 elsewhere.

    The constant up to which v is then determined is chosen so that sum D v = 0, with D the diagonal of C. A nonzero sum
    of b is removed: in proportion to D if it is rounding, which corresponds to a symmetric matrix times b, else evenly.
    """

    @staticmethod
    def forward(
        logits: Tensor, b: Tensor, low: int | Tensor, high: Tensor | None, family: Family, goal: float
    ) -> Tensor:
        return no_view(_covariance_solution(logits, b, low, high, family, goal))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        logits, _, *ctx.design = inputs
        ctx.save_for_backward(logits)
        ctx.save_for_forward(logits)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        """Solves again, as C is symmetric; :class:`_DifferentiatedOnce` refuses the gradient in the logits."""
        (logits,) = ctx.saved_tensors
        return None, _apply_covariance_solve(logits, grad_output, *ctx.design), None, None, None, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Tensor, int]:
        return _apply_covariance_solve(*move_batch_first(info.batch_size, in_dims, args)), 0


def _solve_jvp(ctx: Any, saved: list[Tensor], dprobs: Tensor, *_: Any) -> Tensor:
    logits, probs = saved
    interior = logits.isfinite()
    weight = (probs * (1 - probs)).masked_fill(~interior, 0.0)
    total = weight.sum(-1, keepdim=True).clamp(min=torch.finfo(probs.dtype).tiny)
    b = dprobs.masked_fill(~interior, 0.0)
    b = _if_single(ctx.design, b - weight * (b.sum(-1, keepdim=True) / total), b)  # by the shift that keeps the sum
    v = _apply_covariance_solve(logits, b, *ctx.design)
    return _if_single(ctx.design, centred(v, interior), v)


def _refused(*_: Any) -> Tensor:
    raise NotImplementedError(ONCE)


_apply_solve = with_forward_mode(_SolveLogits, _solve_jvp)
_apply_covariance_solve = with_forward_mode(_CovarianceSolve, _refused)


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


def _covariance_solution(
    logits: Tensor, b: Tensor, low: int | Tensor, high: Tensor | None, family: Family, goal: float
) -> Tensor:
    """The v of :class:`_CovarianceSolve`."""
    if is_dry_run(logits, b):
        return torch.empty_like(logits)
    tolerance = max(CG_TOLERANCE, goal)
    if high is not None:
        return _by_kind(
            lambda k, logits, b: _covariance_solution(logits, b, k, None, family, goal),
            lambda sizes, logits, b: solve_system(logits, b, sizes, RANGE, tolerance),
            SizeRange(low, high),
            logits,
            b,
        )

    def of_rows(k: "int | Tensor", logits: Tensor, b: Tensor) -> Tensor:
        interior = logits.isfinite()
        b = without_mean(b.masked_fill(~interior, 0.0), interior, goal)
        return solve_system(logits, b, k, family, tolerance)

    if not _has_kernel(logits, family):
        return _by_rows(of_rows, low, logits, b)
    rows, right, sizes = _flat(logits), _flat(b), _sizes(logits, low)
    v = covariance_inverse.loop(rows, right, sizes, tolerance, NO_SUM * goal)
    lost = v.isnan().any(-1)
    if lost.any():
        v[lost] = _by_rows(of_rows, sizes[lost], rows[lost], right[lost])
    return v.view(logits.shape)


def _solution(
    probs: Tensor, low: int | Tensor, high: Tensor | None, family: Family, goal: float, log_odds: Tensor | None
) -> Tensor:
    """:func:`solve_logits`, without derivatives."""
    if is_dry_run(probs):
        return torch.empty_like(probs)
    # Not `logit`, which wakes torch's threads even for a few numbers.
    given = probs.log() - torch.log1p(-probs) if log_odds is None else log_odds
    if high is not None:
        least, solved_for = math.log(NO_VARIANCE), RANGE._replace(goal=goal)
        return _by_kind(
            lambda k, given: _solution(given, k, None, family, goal, given),
            lambda sizes, given: solve_scores(given.masked_fill(given < least, -torch.inf), sizes, solved_for),
            SizeRange(low, high),
            given,
        )
    solved_for = family._replace(goal=goal)

    def of_rows(k: "int | Tensor", given: Tensor) -> Tensor:
        return solve_scores(_target(given, k), k, solved_for)

    if not _has_kernel(given, family):
        return _by_rows(of_rows, low, given)
    rows, sizes = _flat(given), _sizes(given, low)
    logits, _, error = inclusion_inverse.loop(rows, sizes, goal)
    lost = ~(error <= max(ACCEPTED, goal)) | (rows.masked_fill(rows.isinf(), 0.0).abs().amax(-1) > WIDE)
    if lost.any():
        logits[lost] = _by_rows(of_rows, sizes[lost], rows[lost])
    return logits.view(given.shape)


def _has_kernel(x: Tensor, family: Family) -> bool:
    """Whether a kernel solves these rows one by one."""
    return family is CONDITIONAL_POISSON and x.numel() > 0 and inclusion_inverse.is_fused(x, x.shape[-1])


def _flat(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


def _sizes(x: Tensor, k: int | Tensor) -> Tensor:
    """k of each row."""
    if isinstance(k, Tensor):
        return k.reshape(-1)
    return x.new_full((x.numel() // x.shape[-1],), k, dtype=torch.long)


def _by_kind(
    of_size: Callable[..., Tensor], of_range: Callable[..., Tensor], sizes: SizeRange, *arguments: Tensor
) -> Tensor:
    """``of_size(k, *arguments)`` in the rows of a single size, and ``of_range(sizes, *arguments)`` in the others."""
    low, high = (cast(Tensor, end) for end in sizes)
    single, found = low == high, torch.empty_like(arguments[0], memory_format=torch.contiguous_format)
    if single.any():
        found[single] = of_size(low[single], *(x[single] for x in arguments))
    if not single.all():
        found[~single] = of_range(SizeRange(low[~single], high[~single]), *(x[~single] for x in arguments))
    return found


def _by_rows(function: Callable[..., Tensor], k: int | Tensor, *arguments: Tensor) -> Tensor:
    """``function(k, *arguments)`` by slabs of rows, since product trees take much memory."""
    if isinstance(k, int):
        return by_rows(lambda *rows: (function(k, *rows),), SLAB, *arguments)[0]
    return by_rows(lambda *rows: (function(rows[-1].squeeze(-1), *rows[:-1]),), SLAB, *arguments, k.unsqueeze(-1))[0]
