"""The logits of a conditional Poisson design, or of one of another family, with given inclusion probabilities.

Differentiable by the implicit function theorem: the Jacobian of the inclusion probabilities is the covariance C of the
k-hot vector, so the change of the logits is the pseudo-inverse of C times the change of the probabilities. The code
that solves for the logits, and systems in C, is in :mod:`.inverse_newton`, or in a kernel.

C is not singular if the size varies. At a single size, only differences of the logits and of the solutions matter. Rows
of a range may also have a single size, ``low == high``.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd import Function

from khot._contents import is_dry_run
from khot._torch_internals import no_view
from khot.kernels.call import is_first_derivative
from khot.kernels.count import (
    bernoulli_count_derivative,
    covariance_inverse,
    inclusion_inverse,
)
from khot.kernels.exact.row_slabs import by_rows
from khot.kernels.exact.rows import number_on
from khot.kernels.exact.small_numbers import sigmoid
from khot.kernels.operators.autograd import SavingFunction, move_batch_first, with_forward_mode
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
    """Logits ``(*batch, n)`` float64 of the design of size k, conditional Poisson by default, with these probabilities.

    Differentiable once in ``probs``, in either mode. If their sum differs from k, a common shift of their log-odds
    compensates it, and derivatives take this into account: weighted by pi (1 - pi), the derivatives in ``probs`` have
    mean 0, so that units of small probability, whose derivatives are large, do not cost the others digits.

    Args:
        probs: ``(*batch, n)`` in [0, 1] with sum k, up to rounding, or with a sum in the range k. Logits are ``-inf``
            where they are 0 (or below 1e-250, or 1e-30 if the size varies) and ``inf`` where they are 1, both without
            gradient; the others have mean 0 if the size does not vary.
        k: An int or integer tensor that broadcasts with the batch shape; or a range of such tensors, as
            :func:`.size_range.sizes_around` returns it.
        family: The family of designs; for a range the conditional Poisson designs.
        log_odds: Float64 log-odds of the unrounded ``probs``, if known. Derivatives are then with respect to them.

    Raises:
        RuntimeError: If the iteration does not converge.

    References:
        [1] Chen, Dempster, Liu (1994), "Weighted finite population sampling to maximize entropy", Biometrika 81(3):
            proof of existence and uniqueness.
    """
    ends = k if isinstance(k, SizeRange) else (k, None)
    low, high = [end.expand(probs.shape[:-1]) if isinstance(end, Tensor) else end for end in ends]
    given = (probs.double(), None) if log_odds is None else (sigmoid(log_odds), log_odds.detach())
    return cast(Tensor, _apply_solve(given[0], low, high, family, _goal(family, probs), given[1]))


def times_covariance_at(probs: Tensor, k: Tensor | SizeRange, g: Tensor) -> Tensor:
    """C g of the conditional Poisson design with inclusion probabilities ``probs``, ``(*batch, n)`` float64.

    If it is not differentiated again and the size is single, kernels find the law and multiply.
    """

    def of_rows(_: Family, k: Size, probs: Tensor, g: Tensor) -> Tensor:
        return times_covariance(g.double(), solve_logits(probs, k), k)

    def of_loop(k: Tensor, probs: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        goal, rows = _goal(CONDITIONAL_POISSON, probs), probs.double()
        logits, tilt, error = inclusion_inverse.loop(_log_odds(rows), k, goal)
        product = bernoulli_count_derivative.loop(logits, k, k, tilt, 1 - rows, rows, g.double())
        return product, ~(error <= max(ACCEPTED, goal)) | product.isnan().any(-1)

    if isinstance(k, SizeRange) or not is_first_derivative(probs, k, g):
        return of_rows(CONDITIONAL_POISSON, k, probs, g)
    return _of_all_rows(of_rows, of_loop, k.expand(probs.shape[:-1]), None, CONDITIONAL_POISSON, probs, g)


def _goal(family: Family, probs: Tensor) -> float:
    return max(family.goal, ROUNDING * torch.finfo(probs.dtype).eps)


def _log_odds(probs: Tensor) -> Tensor:
    return probs.log() - torch.log1p(-probs)  # not `logit`, which wakes torch's threads even for a few numbers


class _SolveLogits(Function):
    @staticmethod
    def forward(
        probs: Tensor, low: int | Tensor, high: Tensor | None, family: Family, goal: float, log_odds: Tensor | None
    ) -> Tensor:
        def of_rows(family: Family, k: Size, given: Tensor) -> Tensor:
            if isinstance(k, SizeRange):
                target = given.masked_fill(given < math.log(NO_VARIANCE), -torch.inf)
            else:
                target = _target(given, k)
            return solve_scores(target, k, family._replace(goal=goal))

        def of_loop(k: Tensor, given: Tensor) -> tuple[Tensor, Tensor]:
            logits, _, error = inclusion_inverse.loop(given, k, goal)
            is_wide = given.masked_fill(given.isinf(), 0.0).abs().amax(-1) > WIDE
            return logits, ~(error <= max(ACCEPTED, goal)) | is_wide

        given = _log_odds(probs) if log_odds is None else log_odds
        return no_view(_of_all_rows(of_rows, of_loop, low, high, family, given))

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
        b = without_mean(b, interior, NO_SUM * goal)
    v = _apply_covariance_solve(_DifferentiatedOnce.apply(logits), b, *design)
    return _if_single(design, centred(v, interior, probs * (1 - probs)), v)


def _if_single(design: Sequence[Any], x: Tensor, otherwise: Tensor) -> Tensor:
    """x in rows of a single size."""
    low, high, *_ = design
    return x if high is None else torch.where((low == high)[..., None], x, otherwise)


def _refused(ctx: Any, *_: Any) -> Any:
    raise NotImplementedError(ONCE)


class _DifferentiatedOnce(SavingFunction):
    """The identity. Its derivative, which is asked for only if something depends on the argument, is an error."""

    generate_vmap_rule = True
    backward = jvp = staticmethod(_refused)

    @staticmethod
    def forward(logits: Tensor) -> Tensor:
        return logits.view_as(logits)


class _CovarianceSolve(Function):
    """v with C v = b over the finite logits, for b with sum 0 there if the size is single; v is 0 elsewhere.

    The constant up to which v is then determined is chosen so that sum D v = 0, with D the diagonal of C. A nonzero sum
    of b is removed: in proportion to D if it is rounding, which corresponds to a symmetric matrix times b, else evenly.
    """

    @staticmethod
    def forward(
        logits: Tensor, b: Tensor, low: int | Tensor, high: Tensor | None, family: Family, goal: float
    ) -> Tensor:
        tolerance, rounding = max(CG_TOLERANCE, goal), NO_SUM * goal

        def of_rows(family: Family, k: Size, logits: Tensor, b: Tensor) -> Tensor:
            return solve_system(logits, b, k, family, tolerance, rounding)

        def of_loop(k: Tensor, logits: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
            v = covariance_inverse.loop(logits, b, k, tolerance, rounding)
            return v, v.isnan().any(-1)

        return no_view(_of_all_rows(of_rows, of_loop, low, high, family, logits, b))

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


def _of_all_rows(
    of_rows: Callable[..., Tensor],
    of_loop: Callable[..., tuple[Tensor, Tensor]],
    low: int | Tensor,
    high: Tensor | None,
    family: Family,
    *arguments: Tensor,
) -> Tensor:
    """``of_rows(family, k, *arguments)``, or ``of_loop(k, *arguments)``, which tells the rows that it leaves."""
    x, n = arguments[0], arguments[0].shape[-1]
    if is_dry_run(*arguments):
        return torch.empty_like(x)
    if isinstance(high, Tensor) and isinstance(low, Tensor):
        single, found = low == high, torch.empty_like(x, memory_format=torch.contiguous_format)
        if single.any():
            rows = [v[single] for v in arguments]
            found[single] = _of_all_rows(of_rows, of_loop, low[single], None, family, *rows)
        if not single.all():
            rows = [v[~single] for v in arguments]
            found[~single] = of_rows(RANGE, SizeRange(low[~single], high[~single]), *rows)
        return found
    if family is not CONDITIONAL_POISSON or not x.numel() or not inclusion_inverse.is_fused(x, n):
        return _by_slabs(partial(of_rows, family), low, *arguments)
    rows = [v.reshape(-1, n) for v in arguments]
    sizes = low.reshape(-1) if isinstance(low, Tensor) else x.new_full((len(rows[0]),), low, dtype=torch.long)
    found, lost = of_loop(sizes, *rows)
    if lost.any():
        found[lost] = _by_slabs(partial(of_rows, family), sizes[lost], *(v[lost] for v in rows))
    return found.view(x.shape)


def _by_slabs(function: Callable[..., Tensor], k: int | Tensor, *arguments: Tensor) -> Tensor:
    """``function(k, *arguments)`` by slabs of rows, since product trees take much memory."""
    if isinstance(k, int):
        return by_rows(lambda *rows: (function(k, *rows),), SLAB, *arguments)[0]
    return by_rows(lambda *rows: (function(rows[-1].squeeze(-1), *rows[:-1]),), SLAB, *arguments, k.unsqueeze(-1))[0]
