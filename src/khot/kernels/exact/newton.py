"""Many scalar roots at once: Newton's method inside a bracket, for decreasing residuals of any shape.

The bracket narrows with every evaluation. A step that leaves it, or does not halve the step before last, is replaced by
a cut of the bracket: alternately the secant across it and its middle. A threshold over items many scales apart has a
residual like a staircase, which a secant approaches but only bisection certainly descends. Roots that are not found
after NEWTON_STEPS are bisected among the 2^64 doubles: after HALVINGS more evaluations the bracket contains none. So
every search ends at a root or between two neighbouring doubles.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

NEWTON_STEPS = 36  # 3 to 15 are usual
HALVINGS = 66
NEAR = 2**-18  # distance that separates an entry almost at its cap from others, in float32 too
COARSEST = 2**-36  # in scales: largest spacing of doubles near t at which a piece of a compact link is resolved
MAX_STEPS = NEWTON_STEPS + HALVINGS
CLOSED_FROM = 4  # the evaluation from which on it pays to test whether a bracket has closed
STEPS_PER_SYNC = 8  # how often the host of an accelerator tests whether all rows are done
RESOLUTION = 4e-16  # relative, of a float64 root

Evaluation = tuple[Tensor, Tensor, Tensor]
"""At t: the proposed step, not finite if there is none; the residual; whether t plus the step is the root."""


class Root(NamedTuple):
    """The end of a search; float64 except for the last two.

    Attributes:
        t: The root, rounded.
        rest: The part lost by rounding: the root is t + rest.
        low: Lower end of the bracket, where the residual is positive.
        high: Upper end, where it is negative.
        done: Whether the search has ended.
        found: Whether it ended at a root, rather than between two neighbouring doubles.
    """

    t: Tensor
    rest: Tensor
    low: Tensor
    high: Tensor
    done: Tensor
    found: Tensor


def arithmetic_mean(low: Tensor, high: Tensor) -> Tensor:
    """The middle of the bracket, for roots of known magnitude."""
    return 0.5 * low + 0.5 * high  # their difference may overflow


def _ordinal(t: Tensor) -> Tensor:
    """The number of a double in their order, from its bits, which run backwards for negative numbers."""
    bits = t.contiguous().view(torch.int64)
    return torch.where(bits < 0, torch.iinfo(torch.int64).min - bits, bits)


def ordinal_mean(low: Tensor, high: Tensor) -> Tensor:
    """The double in the middle of all doubles between two doubles."""
    a, b = _ordinal(low), _ordinal(high)
    middle = (a >> 1) + (b >> 1) + (a & b & 1)
    return torch.where(middle < 0, torch.iinfo(torch.int64).min - middle, middle).view(torch.float64)


def guarded_newton(
    evaluate: Callable[[Tensor], Evaluation],
    t: Tensor,
    bracket: tuple[Tensor, Tensor],
    residuals: tuple[Tensor, Tensor],
    done: Tensor,
    tolerance: Tensor | float | None = None,
    middle: Callable[[Tensor, Tensor], Tensor] = arithmetic_mean,
    max_steps: int = MAX_STEPS,
) -> Root:
    """The roots t in float64; rows that are not ``done`` had too few steps, or residuals of NaN.

    Args:
        evaluate: The evaluation at t, for all rows.
        t: Start inside the bracket.
        bracket: Ends with a residual >= 0 and <= 0.
        residuals: Approximate residuals there, for the secant.
        done: Rows to leave unchanged.
        tolerance: A step of this size is the last, and so is a bracket.
        middle: The point that halves a bracket.
        max_steps: Number of evaluations after which to stop in any case.
    """
    (low, high), (r_low, r_high) = bracket, residuals
    last = older = high - low
    found, rest = done, torch.zeros_like(t)
    for i in range(max_steps):
        if (not t.is_cuda or i % STEPS_PER_SYNC == 0) and bool(done.all()):
            break
        step, residual, there = evaluate(t)
        positive, negative = residual > 0, residual < 0
        low, r_low = torch.where(positive, t, low), torch.where(positive, residual, r_low)
        high, r_high = torch.where(negative, t, high), torch.where(negative, residual, r_high)
        proposal, size = t + step, step.abs()
        if i < NEWTON_STEPS:
            share = (r_low / (r_low - r_high)).clamp(0.02, 0.98)
            cut = (1 - share) * low + share * high if i % 2 == 0 else middle(low, high)
            trusted = (proposal > low) & (proposal < high) & (size <= 0.5 * older)
            older, last = last, torch.where(trusted, size, high - low)  # a cut may be short
            proposal = torch.where(trusted, proposal, cut)
        else:
            proposal = ordinal_mean(low, high)
        if tolerance is not None:
            there = there | (size <= tolerance)
        rest, found = torch.where(there, step, rest), found | there  # unchanged in rows that stay where they are
        done = done | there
        if i >= CLOSED_FROM:
            done = done | (torch.nextafter(low if tolerance is None else low + tolerance, high) >= high)
        t = torch.where(done, t, proposal)
    rest = rest.nan_to_num(0.0, 0.0, 0.0)
    root = t + rest
    return Root(root, (t - root) + rest, low, high, done, found)
