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

from khot._shapes import broadcast_shapes
from khot._torch_internals import no_view, version_of
from khot.kernels.call import is_first_derivative, is_plain
from khot.kernels.count import (
    TABLE,
    bernoulli_count,
    bernoulli_count_derivative,
    bernoulli_count_draw,
    bernoulli_count_log_prob,
    bernoulli_count_log_prob_derivative,
)
from khot.kernels.exact.rows import number_on
from khot.kernels.exact.small_numbers import TINY
from khot.kernels.operators.autograd import has_derivative
from khot.kernels.random_numbers.philox import draw_seed

from .once import Once
from .size_range import SizeRange
from .tilted_tree import Size, tilt

ByTree = Callable[..., Tensor]

LARGEST = torch.finfo(torch.float64).max


class Solved(NamedTuple):
    """Results for rows of logits, numbers without a gradient; see :mod:`khot.kernels.count`."""

    batch_shape: torch.Size
    logits: Tensor  # (R, n) float64
    low: Tensor  # (R,), the ends of the range of sizes
    high: Tensor
    tilt: Tensor  # (R,)
    log_total: Tensor  # (R,)
    complement: Tensor  # (R, n)
    inclusion: Tensor  # (R, n)

    @property
    def shape(self) -> tuple[int, ...]:
        return *self.batch_shape, self.logits.shape[-1]

    def for_values(self, shape: torch.Size) -> "Solved":
        """These rows, repeated if a batch of values of shape ``(..., n)`` has several values for each row."""
        return Solved(*_repeated(self.batch_shape, shape, *self[1:]))


def _repeated(batch_shape: torch.Size, value: torch.Size, *rows: Tensor) -> tuple[Any, ...]:
    """The batch of values of shape ``(..., n)`` for rows of a batch, and tensors ``(R, ...)`` repeated accordingly."""
    batch = broadcast_shapes(value, (*batch_shape, value[-1]))[-len(batch_shape) - 1 : -1]
    if batch == batch_shape:
        return batch, *rows
    expanded = (x.view(*batch_shape, *x.shape[1:]).expand(*batch, *x.shape[1:]) for x in rows)
    return batch, *(x.reshape(-1, *x.shape[len(batch) :]) for x in expanded)


def takes(logits: Tensor, k: Size, *others: Any) -> bool:
    """Whether functions of these logits, with these other arguments, are computed here."""
    tensors = [logits, *(x for x in (*_ends(k), *others) if isinstance(x, Tensor))]
    if not (is_plain(*tensors) and all(x.numel() for x in tensors)):
        return False
    return bernoulli_count.is_fused(logits) and _has_table(logits, k)


def _has_table(logits: Tensor, k: Size) -> bool:
    """Whether loops take these sizes: in long rows only single ones."""
    n = logits.shape[-1]
    return not isinstance(k, SizeRange) or n * k.bound(n) <= TABLE


def _ends(k: Size) -> tuple[int | Tensor, int | Tensor]:
    return k if isinstance(k, SizeRange) else (k, k)


def solve(logits: Tensor, k: Size, kept: Once | None) -> Solved:
    """The part that all results for these logits share."""
    if kept is not None:
        return kept.made("solved", _solve, logits, *_ends(k))
    return _solve(logits.detach(), *_ends(k))


def _rows_of(x: Tensor, low: int | Tensor, high: int | Tensor) -> tuple[torch.Size, Tensor, Tensor, Tensor]:
    """The shape of the batch, and parameters and the ends of the sizes as ``(R, n)`` float64 and ``(R,)``."""
    batch_shape = _shape_of(x, low, high)[:-1]

    def of_rows(end: "int | Tensor") -> Tensor:
        if isinstance(end, Tensor):
            return end.long().expand(batch_shape).reshape(-1).contiguous()
        return torch.full((batch_shape.numel(),), end, device=x.device)

    first = of_rows(low)
    rows = x.double().expand(*batch_shape, x.shape[-1]).reshape(len(first), -1)
    return batch_shape, rows.contiguous(), first, first if high is low else of_rows(high)


def _without_repeats(x: Tensor, dims: int) -> Tensor:
    """The tensor without the repetitions along its first dimensions that an ``expand``, as of a plate, has made."""
    for dim, stride in enumerate(x.stride()[:dims]):
        if stride == 0 and x.shape[dim] > 1:
            x = x.narrow(dim, 0, 1)
    return x


def _shape_of(x: Tensor, *ends: int | Tensor) -> torch.Size:
    return broadcast_shapes(x.shape, *((*end.shape, 1) for end in ends if isinstance(end, Tensor)))


def _rows_once(x: Tensor, low: int | Tensor, high: int | Tensor) -> tuple[torch.Size, Tensor, Tensor, Tensor]:
    """Like :func:`_rows_of`, but repeated rows occur only once."""
    first = _without_repeats(low, low.ndim) if isinstance(low, Tensor) else low
    last = first if high is low else _without_repeats(high, high.ndim) if isinstance(high, Tensor) else high
    return _rows_of(_without_repeats(x, x.ndim - 1), first, last)


def _solve(logits: Tensor, least: int | Tensor, most: int | Tensor) -> Solved:
    batch_shape, rows, low, high = _rows_once(logits, least, most)
    results = bernoulli_count(rows, low, high)
    lost = results[0].isnan()
    if lost.any():
        for result, of_lost in zip(results, _law_by_tree(rows[lost], low[lost], high[lost]), strict=True):
            result[lost] = of_lost
    return Solved(batch_shape, rows, low, high, *results).for_values(_shape_of(logits, least, most))


def _either(low: Tensor, high: Tensor) -> Size:
    return low if torch.equal(low, high) else SizeRange(low, high)


def _law_by_tree(logits: Tensor, low: Tensor, high: Tensor) -> tuple[Tensor, ...]:
    """The results of :func:`bernoulli_count`, for rows that it leaves."""
    tilted = tilt(logits, _either(low, high))
    (out, included), shift = tilted.masses(), -tilted.shift
    total, log_sure = out + included, F.logsigmoid(tilted.z.abs()).sum(-1)
    excess = tilted.k - torch.where(shift < 0, low, high)  # over the size whose weight is 1 in loops
    log_total = tilted.log_probability() - log_sure + torch.where(excess == 0, 0.0, shift * excess)
    return shift, log_total, out / total, included / total


def _derivative(solved: Solved, g: Tensor, log_odds: bool) -> Tensor:
    """The derivative of ``<g, inclusion>`` with respect to the logits, ``(R, n)``, or that of its log-odds."""
    _, logits, low, high, shift, _, complement, inclusion = solved
    each = g
    if log_odds:
        variance = complement * inclusion
        each = (g / variance).clamp(-LARGEST, LARGEST).masked_fill(variance < TINY, 0.0)
    result = bernoulli_count_derivative(logits, low, high, shift, complement, inclusion, each)
    lost = result.isnan().any(-1) & ~shift.isnan()
    if lost.any():
        with torch.enable_grad():
            rows = logits[lost].requires_grad_()
            tilted = tilt(rows, _either(low[lost], high[lost]))
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
    if not has_derivative(logits, torch.is_grad_enabled()):
        return _inclusion(solved, log_odds)
    result: Tensor = _Inclusion.apply(logits, solved, log_odds, by_tree)
    return result


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
            values = _in_rows(value.detach(), solved.shape)
            weights = g.reshape(values.shape[:2]).contiguous()
            gradient = bernoulli_count_log_prob_derivative(values, weights, solved.complement, solved.inclusion)
            grad_logits = _like(gradient, solved.shape, logits)
        if wanted[1]:
            z = torch.where(solved.low < solved.high, 0.0, solved.tilt).nan_to_num(0.0, 0.0, 0.0)
            z = solved.logits - z.unsqueeze(-1)
            z = z.masked_fill(z.isinf(), 0.0)  # a unit without a choice, whose value is a constant
            grad_value = (g.unsqueeze(-1) * z.view(solved.shape)).sum_to_size(value.shape).to(value.dtype)
        return grad_logits, grad_value, None, None


def _in_rows(value: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Values for rows of this shape as ``(S, R, n)``, in a dtype that kernels support."""
    value = value if value.dtype in (torch.float32, torch.float64) else value.double()
    value = value.expand(broadcast_shapes(value.shape, shape))
    return value.reshape(-1, math.prod(shape[:-1]), shape[-1]).contiguous()


def _log_prob(value: Tensor, solved: Solved) -> Tensor:
    shape = broadcast_shapes(value.shape, solved.shape)
    values = _in_rows(value, solved.shape)
    given = solved.logits, solved.low, solved.high, solved.tilt, solved.log_total
    return bernoulli_count_log_prob(*given, values).view(shape[:-1])


def log_prob(logits: Tensor, k: Size, value: Tensor, kept: Once | None, by_tree: ByTree) -> Tensor:
    """Log-probability of k-hot values."""
    solved, recorded = solve(logits, k, kept).for_values(value.shape), torch.is_grad_enabled()
    if not (has_derivative(logits, recorded) or has_derivative(value, recorded)):
        return _log_prob(value.detach(), solved)
    result: Tensor = _LogProb.apply(logits, value, solved, by_tree)
    return result


def sample(logits: Tensor, k: Size, draws: int, generator: torch.Generator | None) -> Tensor | None:
    """Exact draws, bool ``(draws, *batch, n)``; None if no kernel makes them.

    Also inside a vmap, so that draws with the same seed are the same there; not those of a range of sizes.
    """
    if bernoulli_count_draw.kernel(logits, draws) is None:
        return None
    if isinstance(k, SizeRange) and not takes(logits, k):
        return None
    low, high = (number_on(logits.device, end).long() for end in _ends(k))
    batch_shape = broadcast_shapes(logits.shape[:-1], low.shape, high.shape)
    rows = logits.double().expand(*batch_shape, logits.shape[-1])
    seed = draw_seed(logits.device, generator)
    drawn: Tensor = bernoulli_count_draw(
        rows, low.expand(batch_shape), high.expand(batch_shape), seed, draws, torch.bool
    )
    return drawn
