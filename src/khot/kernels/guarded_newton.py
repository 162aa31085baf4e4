"""Many scalar roots at once: Newton's method inside a bracket, for decreasing residuals of any shape.

The bracket narrows with every evaluation. A step that leaves it, or does not halve the step before last, gives way to a
cut of the bracket: the secant across it and its middle in turns, because a threshold over items many scales apart has a
staircase for a residual, which a secant gets near and only bisection is sure to descend.
"""

from collections.abc import Callable

import torch
from torch import Tensor

MAX_STEPS = 100  # bisection alone needs log2(range / accuracy) steps; with Newton 3 to 15 are usual
STEPS_PER_SYNC = 8  # how often an accelerator's host looks whether all rows are done
RESOLUTION = 4e-16  # relative, of a float64 root

Evaluation = tuple[Tensor, Tensor, Tensor]
"""At t: the step proposed, not finite where there is none; the residual; whether t is the root already."""


def arithmetic_mean(low: Tensor, high: Tensor) -> Tensor:
    """The middle of the bracket for roots whose size is known."""
    return low + 0.5 * (high - low)


def guarded_newton(
    evaluate: Callable[[Tensor], Evaluation],
    t: Tensor,
    bracket: tuple[Tensor, Tensor],
    residuals: tuple[Tensor, Tensor],
    done: Tensor,
    tolerance: Tensor | float = 0.0,
    middle: Callable[[Tensor, Tensor], Tensor] = arithmetic_mean,
    max_steps: int = MAX_STEPS,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The roots t in float64, what the ends of the bracket have become, and which rows are done.

    Args:
        evaluate: What to do at t, for all rows.
        t: Where to start, inside the bracket.
        bracket: Ends with a residual >= 0 and <= 0.
        residuals: About the residuals there, for the secant.
        done: Rows to leave as they are.
        tolerance: A step as small as this is the last.
        middle: The point that halves a bracket.
        max_steps: After how many evaluations to stop, whatever the rows.
    """
    (low, high), (r_low, r_high) = bracket, residuals
    last = older = high - low
    for i in range(max_steps):
        if (not t.is_cuda or i % STEPS_PER_SYNC == 0) and bool(done.all()):
            break
        newton, residual, found = evaluate(t)
        positive, negative = residual > 0, residual < 0
        low, r_low = torch.where(positive, t, low), torch.where(positive, residual, r_low)
        high, r_high = torch.where(negative, t, high), torch.where(negative, residual, r_high)
        secant = low + (r_low / (r_low - r_high)).clamp(0.02, 0.98) * (high - low)
        cut = secant if i % 2 == 0 else middle(low, high)
        proposal, size = t + newton, newton.abs()
        # A step below the resolution of t is no progress, unless it is the last.
        progress = (proposal != t) | (size <= tolerance)
        trusted = progress & (proposal >= low) & (proposal <= high) & (size <= 0.5 * older)
        proposal = torch.where(trusted, proposal, torch.where(found, t, cut))
        step = (proposal - t).abs()
        t = torch.where(done, t, proposal)
        done = done | found | (step <= tolerance + RESOLUTION * proposal.abs())
        older, last = last, torch.where(trusted, step, high - low)  # a cut may be short, and what follows a long step
    return t, low, high, done
