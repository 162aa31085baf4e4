"""Brewer's draws, unit by unit, and their chances; :mod:`khot.laws.brewer` has the formulas and their law."""

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from ..registry import Backends, DrawOperator
from . import reference
from .reference import draw_by_draw, drawing_ratio

__all__ = ["Scores", "brewer_draw", "draw_by_draw", "drawing_ratio", "scores"]

LONGEST = 4096  # units of a row that a program on an accelerator holds on chip


def _fits_a_program(probs: Tensor, draws: int) -> str | None:
    if probs.shape[-1] > LONGEST:
        return f"a program holds rows of at most {LONGEST} units"
    return DrawOperator.has_draws(probs, draws)


brewer_draw = DrawOperator("brewer_draw", reference.brewer_draw)
brewer_draw.backend("triton", module=".triton_backend", takes=_fits_a_program)
brewer_draw.backend("numba", module=".numba_backend")


class Scores(NamedTuple):
    """Log-probabilities of k-hot values, and their derivative.

    Attributes:
        log_prob: ``(probs, values, size)``: those of values ``(draws, rows, n)``, bool, given balanced probabilities
            ``(rows, n)``, float64, and the largest number of ones; ``(draws, rows)``, ``-inf`` of impossible values.
        derivative: ``(probs, values, g, size)``: dL/dprobs from dL/dlog_prob.
    """

    log_prob: Callable[[Tensor, Tensor, int], Tensor]
    derivative: Callable[[Tensor, Tensor, Tensor, int], Tensor]


# What no backend takes, the law composes of torch operations.
scores = Backends(__name__, "SCORES")
scores.backend("numba", module=".numba_scores")
