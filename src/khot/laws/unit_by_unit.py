"""Conditional Poisson and Sampford by passes over the units, for rows that are not long, where kernels exist.

Eager code on a CPU gets values and first derivatives in reverse mode from here. Everything else comes from the product
tree: the functions receive ``by_tree``, the same function of the logits (and the value) computed by the tree, and
differentiate that.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from khot._shapes import broadcast_shapes
from khot._torch_internals import no_view, version_of
from khot.kernels.call import is_first_derivative, is_plain
from khot.kernels.count import (
    bernoulli_count,
    bernoulli_count_derivative,
    bernoulli_count_log_prob,
    bernoulli_count_log_prob_derivative,
    marked_count,
    marked_count_log_prob,
    marked_count_log_prob_derivative,
)
from khot.kernels.exact.rows import number_on
from khot.kernels.exact.small_numbers import TINY
from khot.kernels.operators.autograd import by_formula, has_derivative
from khot.kernels.random_numbers.philox import draw_seed
from khot.kernels.registry import DrawOperator

from .once import Once

ByTree = Callable[..., Tensor]

LARGEST = torch.finfo(torch.float64).max


class Solved(NamedTuple):
    """Results for rows of logits, numbers without a gradient; see :mod:`khot.kernels.count`."""

    batch_shape: torch.Size
    logits: Tensor  # (R, n) float64
    k: Tensor  # (R,)
    tilt: Tensor  # (R, 2)
    log_count: Tensor  # (R, 2)
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


def takes(logits: Tensor, *others: Any) -> bool:
    """Whether functions of these logits, with these other arguments, are computed here."""
    tensors = [logits, *(x for x in others if isinstance(x, Tensor))]
    if not (is_plain(*tensors) and all(x.numel() for x in tensors)):
        return False
    return bernoulli_count.is_fused(logits)


def solve(logits: Tensor, k: int | Tensor, kept: Once | None) -> Solved:
    """The part that all results for these logits share."""
    if kept is not None:
        return kept.made("solved", _solve, logits, k)
    return _solve(logits.detach(), k)


def _rows_of(x: Tensor, k: int | Tensor) -> tuple[torch.Size, Tensor, Tensor]:
    """The shape of the batch, and parameters and sizes as ``(R, n)`` float64 and ``(R,)``."""
    if isinstance(k, Tensor):
        batch_shape = broadcast_shapes(x.shape[:-1], k.shape)
        size = k.long().expand(batch_shape).reshape(-1)
    else:
        batch_shape = x.shape[:-1]
        size = torch.full((batch_shape.numel(),), k, device=x.device)
    rows = x.double().expand(*batch_shape, x.shape[-1]).reshape(len(size), -1)
    return batch_shape, rows.contiguous(), size.contiguous()


def _without_repeats(x: Tensor, dims: int) -> Tensor:
    """The tensor without the repetitions along its first dimensions that an ``expand``, as of a plate, has made."""
    for dim, stride in enumerate(x.stride()[:dims]):
        if stride == 0 and x.shape[dim] > 1:
            x = x.narrow(dim, 0, 1)
    return x


def _shape_of(x: Tensor, k: int | Tensor) -> torch.Size:
    return broadcast_shapes(x.shape, (*k.shape, 1)) if isinstance(k, Tensor) else x.shape


def _rows_once(x: Tensor, k: int | Tensor) -> tuple[torch.Size, Tensor, Tensor]:
    """Like :func:`_rows_of`, but repeated rows occur only once."""
    size = _without_repeats(k, k.ndim) if isinstance(k, Tensor) else k
    return _rows_of(_without_repeats(x, x.ndim - 1), size)


def _solve(logits: Tensor, k: int | Tensor) -> Solved:
    batch_shape, rows, size = _rows_once(logits, k)
    return Solved(batch_shape, rows, size, *bernoulli_count(rows, size)).for_values(_shape_of(logits, k))


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
        if ctx.log_odds:
            variance = solved.complement * solved.inclusion
            g = (g / variance).clamp(-LARGEST, LARGEST).masked_fill(variance < TINY, 0.0)
        gradient = bernoulli_count_derivative(solved.logits, solved.k, solved.tilt, g.contiguous())
        return _like(gradient, solved.shape, logits), None, None, None


def _inclusion(solved: Solved, log_odds: bool) -> Tensor:
    included = solved.inclusion.view(solved.shape)
    if not log_odds:
        return included
    out = solved.complement.view(solved.shape)
    excluded, certain = included < TINY, out < TINY
    return (included.log() - out.log()).masked_fill(excluded, -torch.inf).masked_fill(certain, torch.inf)


def inclusion(logits: Tensor, k: int | Tensor, kept: Once | None, log_odds: bool, by_tree: ByTree) -> Tensor:
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
            z = (solved.logits - solved.tilt[:, :1]) + solved.tilt[:, 1:]
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
    return bernoulli_count_log_prob(solved.logits, solved.tilt, solved.log_count, values).view(shape[:-1])


def log_prob(logits: Tensor, k: int | Tensor, value: Tensor, kept: Once | None, by_tree: ByTree) -> Tensor:
    """Log-probability of k-hot values."""
    solved, recorded = solve(logits, k, kept).for_values(value.shape), torch.is_grad_enabled()
    if not (has_derivative(logits, recorded) or has_derivative(value, recorded)):
        return _log_prob(value.detach(), solved)
    result: Tensor = _LogProb.apply(logits, value, solved, by_tree)
    return result


def sample(
    draw: DrawOperator, x: Tensor, k: int | Tensor, draws: int, generator: torch.Generator | None
) -> Tensor | None:
    """Exact draws by an operator of parameters and sizes, bool ``(draws, *batch, n)``; None if no kernel makes them.

    Also inside a vmap, so that draws with the same seed are the same there.
    """
    if draw.kernel(x, draws) is None:
        return None
    size = number_on(x.device, k).long()
    batch_shape = broadcast_shapes(x.shape[:-1], size.shape)
    rows, size = x.double().expand(*batch_shape, x.shape[-1]), size.expand(batch_shape)
    drawn: Tensor = draw(rows, size, draw_seed(x.device, generator), draws, torch.bool)
    return drawn


class Marked(NamedTuple):
    """Results for rows of inclusion probabilities of Sampford's design, numbers without a gradient."""

    batch_shape: torch.Size
    probs: Tensor  # (R, n) float64
    k: Tensor  # (R,)
    balanced: Tensor  # (R, n)
    log_total: Tensor  # (R,)
    slope: Tensor  # (R, n), if it was requested

    @property
    def shape(self) -> tuple[int, ...]:
        return *self.batch_shape, self.probs.shape[-1]

    def for_values(self, shape: torch.Size) -> "Marked":
        """See :meth:`Solved.for_values`."""
        return Marked(*_repeated(self.batch_shape, shape, *self[1:]))


def _solve_marked(probs: Tensor, k: int | Tensor, with_slope: bool) -> Marked:
    batch_shape, rows, size = _rows_once(probs, k)
    return Marked(batch_shape, rows, size, *marked_count(rows, size, with_slope)).for_values(_shape_of(probs, k))


def _sampford_log_prob(value: Tensor, marked: Marked) -> Tensor:
    shape, values = broadcast_shapes(value.shape, marked.shape), _in_rows(value, marked.shape)
    return marked_count_log_prob(marked.balanced, marked.log_total, values).view(shape[:-1])


def sampford_log_prob(probs: Tensor, k: int | Tensor, value: Tensor, kept: Once, by_tree: ByTree) -> Tensor:
    """Log-probability of k-hot values, which get no gradient."""
    differentiable = has_derivative(probs, torch.is_grad_enabled())
    name = "marked, with slope" if differentiable else "marked"
    marked = kept.made(name, _solve_marked, probs, k, differentiable).for_values(value.shape)
    if not differentiable:
        return _sampford_log_prob(value, marked)

    def scored(probs: Tensor, value: Tensor) -> tuple[Tensor, ...]:
        return (no_view(_sampford_log_prob(value, marked)),)

    def slope(g: Tensor, probs: Tensor, value: Tensor) -> Tensor:
        values = _in_rows(value, marked.shape)
        weights = g.reshape(values.shape[:2]).contiguous()
        gradient = marked_count_log_prob_derivative(
            marked.probs, marked.k, marked.balanced, marked.slope, values, weights
        )
        return _like(gradient, marked.shape, probs)

    return by_formula(by_tree, scored, slope, probs, value)
