"""Conditional Poisson by a recursion over the units, of rows that are short enough where there is a fused kernel for it.

Code that runs now, on a CPU, gets here: values, and their first derivatives in reverse mode. Whatever else is asked for
comes from the product tree: the functions are given ``by_tree``, the same function of the logits (and the value)
made of it, and differentiate that.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from khot._torch_internals import in_forward_mode
from khot.kernels.autograd import has_derivative
from khot.kernels.bernoulli_count import (
    bernoulli_count,
    bernoulli_count_derivative,
    bernoulli_count_draw,
    bernoulli_count_log_prob,
    bernoulli_count_log_prob_derivative,
)
from khot.kernels.philox import FIRST, draw_seed
from khot.kernels.small_numbers import TINY

from .kept import Kept, is_plain

ByTree = Callable[..., Tensor]


class Solved(NamedTuple):
    """What is known of rows of logits, numbers without a gradient; see :mod:`khot.kernels.bernoulli_count`."""

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


def takes(logits: Tensor, *others: Any) -> bool:
    """Whether functions of these logits, with other arguments beside them, are made here."""
    tensors = [logits, *(x for x in others if isinstance(x, Tensor))]
    if in_forward_mode() or not (is_plain(*tensors) and all(x.numel() for x in tensors)):
        return False
    return bernoulli_count.is_fused(logits)


def solve(logits: Tensor, k: int | Tensor, kept: Kept | None) -> Solved:
    if kept is not None:
        return kept.result(_solve, logits, k)
    return _solve(logits.detach(), k)


def _solve(logits: Tensor, k: int | Tensor) -> Solved:
    if isinstance(k, Tensor):
        batch_shape = torch.broadcast_shapes(logits.shape[:-1], k.shape)
        size = k.long().expand(batch_shape).reshape(-1)
    else:
        batch_shape = logits.shape[:-1]
        size = torch.full((batch_shape.numel(),), k)
    rows = logits.double().expand(*batch_shape, logits.shape[-1]).reshape(len(size), -1).contiguous()
    return Solved(batch_shape, rows, size.contiguous(), *bernoulli_count(rows, size.contiguous()))


def _like(gradient: Tensor, shape: Sequence[int], logits: Tensor) -> Tensor:
    """A gradient of all rows as one of the logits, which may be fewer."""
    return gradient.view(shape).sum_to_size(logits.shape).to(logits.dtype)


def _needs_tree(g: Tensor) -> bool:
    """Whether a gradient is to be differentiated again, or one of many that are made at once."""
    return torch.is_grad_enabled() or not is_plain(g)


def _pulled_back(by_tree: ByTree, inputs: Sequence[Tensor], wanted: Sequence[bool], g: Tensor) -> list[Tensor | None]:
    """The gradients of ``<g, by_tree(*inputs)>`` in those inputs that are wanted, None for the others."""
    further = torch.is_grad_enabled()
    with torch.enable_grad():
        # Aliases, as one input may be a function of another, which is no part of these derivatives.
        inputs = [x.view_as(x) if further else x.detach().requires_grad_(w) for x, w in zip(inputs, wanted, strict=True)]
        asked = [x for x, w in zip(inputs, wanted, strict=True) if w]
        found = iter(torch.autograd.grad(by_tree(*inputs), asked, g, create_graph=further))
    return [next(found) if w else None for w in wanted]


class _Inclusion(Function):
    @staticmethod
    def forward(logits: Tensor, solved: Solved, log_odds: bool, by_tree: ByTree) -> Tensor:
        return _inclusion(solved, log_odds)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        logits, ctx.solved, ctx.log_odds, ctx.by_tree = inputs
        ctx.save_for_backward(logits)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        (logits,), solved = ctx.saved_tensors, ctx.solved
        if _needs_tree(g):
            return *_pulled_back(ctx.by_tree, [logits], [True], g), None, None, None
        gradient = bernoulli_count_derivative(
            solved.logits, solved.k, solved.tilt, solved.complement, solved.inclusion,
            g.reshape(solved.logits.shape).contiguous(), ctx.log_odds,
        )  # fmt: skip
        return _like(gradient, solved.shape, logits), None, None, None


def _inclusion(solved: Solved, log_odds: bool) -> Tensor:
    included = solved.inclusion.view(solved.shape)
    if not log_odds:
        return included.clone()  # which becomes part of a graph, or the user's
    out = solved.complement.view(solved.shape)
    excluded, certain = included < TINY, out < TINY
    return (included.log() - out.log()).masked_fill(excluded, -torch.inf).masked_fill(certain, torch.inf)


def inclusion(logits: Tensor, k: int | Tensor, kept: Kept | None, log_odds: bool, by_tree: ByTree) -> Tensor:
    """Inclusion probabilities, or their log-odds."""
    solved = solve(logits, k, kept)
    if not has_derivative(logits, torch.is_grad_enabled()):
        return _inclusion(solved, log_odds)
    result: Tensor = _Inclusion.apply(logits, solved, log_odds, by_tree)
    return result


class _LogProb(Function):
    @staticmethod
    def forward(logits: Tensor, value: Tensor, solved: Solved, by_tree: ByTree) -> Tensor:
        return _log_prob(value.detach(), solved)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        logits, value, ctx.solved, ctx.by_tree = inputs
        ctx.save_for_backward(logits, value)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        (logits, value), solved = ctx.saved_tensors, ctx.solved
        wanted = ctx.needs_input_grad[:2]
        if _needs_tree(g):
            return *_pulled_back(ctx.by_tree, [logits, value], wanted, g), None, None
        grad_logits = grad_value = None
        if wanted[0]:
            values = _in_rows(value.detach(), solved)
            weights = g.reshape(values.shape[:2]).contiguous()
            gradient = bernoulli_count_log_prob_derivative(values, weights, solved.complement, solved.inclusion)
            grad_logits = _like(gradient, solved.shape, logits)
        if wanted[1]:
            z = (solved.logits - solved.tilt[:, :1]) + solved.tilt[:, 1:]
            grad_value = (g.unsqueeze(-1) * z.view(solved.shape)).sum_to_size(value.shape).to(value.dtype)
        return grad_logits, grad_value, None, None


def _in_rows(value: Tensor, solved: Solved) -> Tensor:
    """Values as ``(S, R, n)``, in a dtype that kernels know."""
    value = value if value.dtype in (torch.float32, torch.float64) else value.double()
    value = value.expand(torch.broadcast_shapes(value.shape, solved.shape))
    return value.reshape(-1, *solved.logits.shape).contiguous()


def _log_prob(value: Tensor, solved: Solved) -> Tensor:
    shape = torch.broadcast_shapes(value.shape, solved.shape)
    return bernoulli_count_log_prob(solved.logits, solved.tilt, solved.log_count, _in_rows(value, solved)).view(shape[:-1])


def log_prob(logits: Tensor, k: int | Tensor, value: Tensor, kept: Kept | None, by_tree: ByTree) -> Tensor:
    """Log-probability of k-hot values."""
    solved, recorded = solve(logits, k, kept), torch.is_grad_enabled()
    if not (has_derivative(logits, recorded) or has_derivative(value, recorded)):
        return _log_prob(value.detach(), solved)
    result: Tensor = _LogProb.apply(logits, value, solved, by_tree)
    return result


def sample(
    logits: Tensor, k: int | Tensor, draws: int, generator: torch.Generator | None, kept: Kept | None
) -> Tensor:
    """Exact draws, bool ``(draws, *batch, n)``."""
    solved, seed = solve(logits, k, kept), draw_seed(logits.device, generator)
    drawn = bernoulli_count_draw(solved.logits, solved.k, solved.tilt, seed, FIRST, draws, torch.bool)
    return drawn.view(draws, *solved.shape)
