"""Conditional Poisson by passes over the units, for rows that are not long, where kernels exist.

Eager code on a CPU gets values and first derivatives in reverse mode from here. Everything else comes from the product
tree: the functions receive ``by_tree``, the same function of the logits (and the value) computed by the tree, and
differentiate that.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from khot._contents import is_finite
from khot._shapes import broadcast_shapes
from khot._torch_internals import apply_untransformed, no_view, version_of
from khot.kernels.call import call_of, is_first_derivative
from khot.kernels.count import (
    TABLE,
    bernoulli_count,
    bernoulli_count_derivative,
    bernoulli_count_log_prob,
    bernoulli_count_log_prob_derivative,
    short_rows,
)
from khot.kernels.exact.rows import number_on
from khot.kernels.exact.small_numbers import TINY
from khot.kernels.random_numbers.philox import draw_seed
from khot.kernels.registry import DrawOperator

from . import tilted_tree
from .once import Once
from .size_range import SizeRange
from .tilted_tree import Size, single_or_range, tilt

ByTree = Callable[..., Tensor]

LARGEST = torch.finfo(torch.float64).max


class Solved(NamedTuple):
    """Results for rows of logits, numbers without a gradient; see :mod:`khot.kernels.count`."""

    shape: tuple[int, ...]  # (*batch, n), R rows in all
    logits: Tensor  # (R, n) float64
    low: Tensor  # (R,), the ends of the range of sizes
    high: Tensor
    tilt: Tensor  # (R,)
    log_total: Tensor  # (R,)
    complement: Tensor  # (R, n)
    inclusion: Tensor  # (R, n)


def _for_values(results: Solved, value: torch.Size) -> Solved:
    """Results for rows, repeated if a batch of values of shape ``(..., n)`` has several values for each row."""
    batch = results.shape[:-1]
    shape = broadcast_shapes(value, results.shape)[-len(results.shape) :]
    if shape == results.shape:
        return results
    expanded = (x.view(*batch, *x.shape[1:]).expand(*shape[:-1], *x.shape[1:]) for x in results[1:])
    return Solved(shape, *(x.reshape(-1, *x.shape[len(batch) :]) for x in expanded))


def takes(logits: Tensor, k: Size, *others: Any) -> bool:
    """Whether functions of these logits, with these other arguments, are computed here."""
    arguments, n = (logits, *(k if isinstance(k, SizeRange) else (k,)), *others), logits.shape[-1]
    for x in arguments:
        if isinstance(x, Tensor) and x.numel() == 0:
            return False
    if not call_of(*arguments).is_plain or bernoulli_count.find(logits, n) is None:
        return False
    return not isinstance(k, SizeRange) or n * k.bound(n) <= TABLE  # in long rows, loops take only single sizes


def solve(logits: Tensor, k: Size, kept: Once | None) -> Solved:
    """The part that all results for these logits share."""
    ends = k if isinstance(k, SizeRange) else (k,)
    return _solve(logits.detach(), *ends) if kept is None else kept.made("solved", _solve, logits, *ends)


def _without_repeats(x: Tensor, dims: int) -> Tensor:
    """The tensor without the repetitions along its first dimensions that an ``expand`` has made."""
    for dim, stride in enumerate(x.stride()[:dims]):
        if stride == 0 and x.shape[dim] > 1:
            x = x.narrow(dim, 0, 1)
    return x


def _solve(logits: Tensor, *ends: int | Tensor) -> Solved:
    """Rows that an ``expand`` has repeated, as that of a plate, are solved once."""
    distinct, whole = _without_repeats(logits, logits.ndim - 1) if 0 in logits.stride() else logits, logits.shape
    n, shape, sizes = whole[-1], distinct.shape, ends
    if type(ends[0]) is not int or type(ends[-1]) is not int:
        sizes = tuple([_without_repeats(end, end.ndim) if isinstance(end, Tensor) else end for end in ends])
        shape, whole = _shape_of(distinct, sizes), _shape_of(logits, ends)
    # A copy, because a storage that is shown to NumPy cannot be resized any more, as FSDP does with a parameter's.
    rows = distinct.clone() if distinct.dtype == torch.float64 else distinct.double()
    if len(shape) != 2 or rows.shape != shape or not rows.is_contiguous():
        rows = rows.expand(shape).reshape(-1, n).contiguous()
    each = []
    for size in sizes:
        if isinstance(size, Tensor):
            each.append(size.long().expand(shape[:-1]).reshape(-1).contiguous())
        else:
            each.append(torch.full((rows.shape[0],), size, device=rows.device))
    low, high = each[0], each[-1]
    *results, left = bernoulli_count.loop(rows, low, high, SizeRange(sizes[0], sizes[-1]).bound(n))
    if left:
        lost = results[0].isnan()
        for result, of_lost in zip(results, _law_by_tree(rows[lost], low[lost], high[lost]), strict=True):
            result[lost] = of_lost
    solved = Solved(shape, rows, low, high, *results)
    return solved if shape == whole else _for_values(solved, whole)


def _shape_of(x: Tensor, ends: Sequence[int | Tensor]) -> torch.Size:
    return broadcast_shapes(x.shape, *[(*end.shape, 1) for end in ends if isinstance(end, Tensor)])


def _law_by_tree(logits: Tensor, low: Tensor, high: Tensor) -> tuple[Tensor, ...]:
    """The results of :func:`bernoulli_count`, for rows that it leaves."""
    tilted = tilt(logits, single_or_range(low, high))
    (out, included), shift = tilted.masses(), -tilted.shift
    total, log_sure = out + included, F.logsigmoid(tilted.z.abs()).sum(-1)
    excess = tilted.k - torch.where(shift < 0, low, high)  # over the size whose weight is 1 in loops
    log_total = tilted.log_probability() - log_sure + torch.where(excess == 0, 0.0, shift * excess)
    return shift, log_total, out / total, included / total


def _derivative(solved: Solved, g: Tensor, log_odds: bool) -> Tensor:
    """The derivative of ``<g, inclusion>``, or of g times the log-odds of inclusion, in the logits, ``(R, n)``."""
    _, logits, low, high, shift, _, complement, inclusion = solved
    each = g
    if log_odds:
        variance = complement * inclusion
        each = (g / variance).clamp(-LARGEST, LARGEST).masked_fill(variance < TINY, 0.0)
    result = bernoulli_count_derivative.loop(logits, low, high, shift, complement, inclusion, each)
    lost = None if is_finite(result) else result.isnan().any(-1) & ~shift.isnan()
    if lost is not None and lost.any():
        with torch.enable_grad():
            rows = logits[lost].requires_grad_()
            tilted = tilt(rows, single_or_range(low[lost], high[lost]))
            found = tilted.log_odds() if log_odds else tilted.inclusion()
        result[lost] = torch.autograd.grad(found, rows, g[lost])[0]
    return result


def _like(gradient: Tensor, shape: Sequence[int], logits: Tensor) -> Tensor:
    """A gradient of all rows as one of the logits, which may be fewer."""
    return gradient.view(shape).sum_to_size(logits.shape).to(logits.dtype)


def _pulled_back(by_tree: ByTree, inputs: Sequence[Tensor], wanted: Sequence[bool], g: Tensor) -> list[Tensor | None]:
    """The gradients of ``<g, by_tree(*inputs)>`` in those inputs that are wanted, None for the others."""
    further = torch.is_grad_enabled()
    with torch.enable_grad():
        # Aliases, because one input may be a function of another, which does not belong to these derivatives.
        pairs = zip(inputs, wanted, strict=True)
        inputs = [x.view_as(x) if further else x.detach().requires_grad_(is_wanted) for x, is_wanted in pairs]
        asked = list(itertools.compress(inputs, wanted))
        found = iter(torch.autograd.grad(by_tree(*inputs), asked, g, create_graph=further))
    return [next(found) if is_wanted else None for is_wanted in wanted]


# These Functions have no `setup_context`: no transform of torch.func gets here, and binding its arguments takes longer
# than a row of ten units.


class _Inclusion(Function):
    """Its node may be shared by several results, so it saves nothing that the backward pass of one of them frees.

    The kept tensor is not copied into the result either, so the result must not be written to.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, solved: Solved, log_odds: bool, by_tree: ByTree) -> Tensor:
        ctx.solved, ctx.log_odds, ctx.by_tree = solved, log_odds, by_tree
        ctx.logits, ctx.version = logits, version_of(logits)
        return _inclusion(solved, log_odds)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        logits, solved = ctx.logits, ctx.solved
        if version_of(logits) != ctx.version:
            raise RuntimeError("`logits` have been modified in place since inclusion probabilities were computed")
        if not is_first_derivative(g):
            return *_pulled_back(ctx.by_tree, [logits], [True], g), None, None, None
        g = g.reshape(solved.logits.shape)
        gradient = _derivative(solved, g, ctx.log_odds)
        return _like(gradient, solved.shape, logits), None, None, None


def _inclusion(solved: Solved, log_odds: bool) -> Tensor:
    included = solved.inclusion.view(solved.shape)
    if not log_odds:
        return included
    out = solved.complement.view(solved.shape)
    excluded, certain = included < TINY, out < TINY
    return (included.log() - out.log()).masked_fill(excluded, -torch.inf).masked_fill(certain, torch.inf)


def inclusion(logits: Tensor, k: Size, kept: Once | None, log_odds: bool, by_tree: ByTree) -> Tensor:
    """Inclusion probabilities, or their log-odds; must not be written to."""
    solved = solve(logits, k, kept)
    if not (torch.is_grad_enabled() and logits.requires_grad):
        return _inclusion(solved, log_odds)
    result: Tensor = apply_untransformed(_Inclusion, logits, solved, log_odds, by_tree)
    return result


def chances(logits: Tensor, k: Size, kept: Once | None) -> tuple[Tensor, Tensor]:
    """The probabilities of a zero and of a one of each unit, without a graph; must not be written to."""
    solved = solve(logits, k, kept)
    return solved.complement.view(solved.shape), solved.inclusion.view(solved.shape)


class _LogProb(Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, value: Tensor, solved: Solved, by_tree: ByTree) -> Tensor:
        ctx.solved, ctx.by_tree = solved, by_tree
        ctx.save_for_backward(logits, value)
        return no_view(_log_prob(value.detach(), solved))

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        (logits, value), solved = ctx.saved_tensors, ctx.solved
        wanted = ctx.needs_input_grad[:2]
        if not is_first_derivative(g):
            return *_pulled_back(ctx.by_tree, [logits, value], wanted, g), None, None
        grad_logits = grad_value = None
        if wanted[0]:
            _, values = _in_rows(value.detach(), solved.shape)
            weights = g.reshape(values.shape[:2]).contiguous()
            gradient = bernoulli_count_log_prob_derivative.loop(values, weights, solved.complement, solved.inclusion)
            grad_logits = _like(gradient, solved.shape, logits)
        if wanted[1]:
            z = torch.where(solved.low < solved.high, 0.0, solved.tilt).nan_to_num(0.0, 0.0, 0.0)
            z = solved.logits - z.unsqueeze(-1)
            z = z.masked_fill(z.isinf(), 0.0)  # a unit without a choice, whose value is a constant
            grad_value = (g.unsqueeze(-1) * z.view(solved.shape)).sum_to_size(value.shape).to(value.dtype)
        return grad_logits, grad_value, None, None


def _in_rows(value: Tensor, shape: tuple[int, ...]) -> tuple[torch.Size, Tensor]:
    """The batch of values for rows of this shape, and the values as ``(S, R, n)``, in a dtype that kernels support."""
    value = value if value.dtype in (torch.float32, torch.float64) else value.double()
    if value.shape != shape:
        value = value.expand(broadcast_shapes(value.shape, shape))
    return value.shape[:-1], value.reshape(-1, math.prod(shape[:-1]), shape[-1]).contiguous()


def _log_prob(value: Tensor, solved: Solved) -> Tensor:
    batch, values = _in_rows(value, solved.shape)
    given = solved.logits, solved.low, solved.high, solved.tilt, solved.log_total
    return bernoulli_count_log_prob.loop(*given, values).view(batch)


def log_prob(logits: Tensor, k: Size, value: Tensor, kept: Once | None, by_tree: ByTree) -> Tensor:
    """Log-probability of k-hot values."""
    solved = solve(logits, k, kept)
    if value.shape != solved.shape:
        solved = _for_values(solved, value.shape)
    if not (torch.is_grad_enabled() and (logits.requires_grad or value.requires_grad)):
        return _log_prob(value.detach(), solved)
    result: Tensor = apply_untransformed(_LogProb, logits, value, solved, by_tree)
    return result


bernoulli_count_draw = DrawOperator("bernoulli_count_draw", tilted_tree.bernoulli_count_draw)
bernoulli_count_draw.backend("numba", module="khot.kernels.count.numba_backend", takes=short_rows)


def sample(logits: Tensor, k: Size, draws: int, generator: torch.Generator | None) -> Tensor | None:
    """Exact draws, bool ``(draws, *batch, n)``; None if no kernel makes them.

    It makes them inside a vmap, too, so that draws with the same seed are the same there, except for a range of sizes.
    """
    kernel = bernoulli_count_draw.kernel(logits, draws)
    if kernel is None or (isinstance(k, SizeRange) and not takes(logits, k)):
        return None
    ends = [number_on(logits.device, end).long() for end in (k if isinstance(k, SizeRange) else (k,))]
    batch_shape = broadcast_shapes(logits.shape[:-1], *[end.shape for end in ends])
    rows, ends = logits.to(torch.float64, copy=True), [end.expand(batch_shape) for end in ends]
    rows = rows.expand(*batch_shape, logits.shape[-1])
    return kernel(rows, ends[0], ends[-1], draw_seed(logits.device, generator), draws, torch.bool)
