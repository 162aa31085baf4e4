"""Draws by duels of units and by Brewer's method, which have exactly the given inclusion probabilities.

In the pivotal method, a duel of two units with probabilities a and b decides one of them for good, and the other goes
on with the rest:

    a + b <  1   the loser is out,     the winner goes on with a + b:      b with probability b / (a + b)
    a + b >= 1   the winner is chosen, the loser goes on with a + b - 1:   b with probability (1 - b) / (2 - a - b)

Each duel keeps both expectations, so any schedule of duels that does not depend on the outcomes gives every unit its
probability.

A tournament (``pivotal_draw``) has a random order and a tree as its schedule: O(n) work in O(log n) steps. The
probability that leaves a node does not depend on which unit goes on. So the probabilities go up the tree first, and the
fates come down: the unit that a duel decides gets the fate of the duel, and the other one the fate of the node. All of
this is in float64, since the sum of many probabilities must end at an integer.

Duels in the given order (``ordered_duels_draw``) go unit by unit, with weights from :mod:`khot.laws.pivotal`. A unit
takes the seat from the carrier with probability take / total, or at once if the seat is empty. A duel that crosses an
integer chooses the one of the two that does not hold the seat afterwards.

Brewer's method (``brewer_draw``) chooses unit by unit; :mod:`khot.laws.brewer` has its formulas and its law.

References:
    [1] Deville, Tillé (1998), "Unequal probability sampling without replacement through a splitting method".
    [2] Chauvet (2012), "On a characterization of ordered pivotal sampling", for schedules other than one by one.
"""

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from ..registry import Backends, DrawOperator
from . import reference_brewer, reference_duels, reference_tournament
from .reference_brewer import draw_by_draw
from .reference_duels import CERTAIN, CROSSING, EMPTY, draw_in_order, kinds
from .reference_tournament import balance, missing_share, tournament

__all__ = [
    "CERTAIN",
    "CROSSING",
    "EMPTY",
    "Scores",
    "balance",
    "brewer_draw",
    "draw_by_draw",
    "draw_in_order",
    "kinds",
    "missing_share",
    "ordered_duels_draw",
    "pivotal_draw",
    "scores",
    "tournament",
]

LONGEST_ON_CHIP = 4096  # units of a row that a program on an accelerator holds


def _fits_a_program(probs: Tensor, draws: int) -> str | None:
    if probs.shape[-1] > LONGEST_ON_CHIP:
        return f"a program has no room for a row of more than {LONGEST_ON_CHIP} units"
    return DrawOperator.has_draws(probs, draws)


def _counts_in_int32(probs: Tensor, draws: int) -> str | None:
    if probs.shape[-1] >= 2**31:
        return "its loops count units in 32 bits"
    return DrawOperator.has_draws(probs, draws)


pivotal_draw = DrawOperator("pivotal_draw", reference_tournament.pivotal_draw)
pivotal_draw.backend("triton", module=".triton_tournament", takes=_fits_a_program)
pivotal_draw.backend("numba", module=".numba_tournament", takes=_counts_in_int32)

ordered_duels_draw = DrawOperator("ordered_duels_draw", reference_duels.ordered_duels_draw)
ordered_duels_draw.backend("triton", module=".triton_duels", takes=DrawOperator.fills_device)
ordered_duels_draw.backend("numba", module=".numba_duels", takes=DrawOperator.has_draws)

brewer_draw = DrawOperator("brewer_draw", reference_brewer.brewer_draw)
brewer_draw.backend("triton", module=".triton_brewer", takes=_fits_a_program)
brewer_draw.backend("numba", module=".numba_brewer")


class Scores(NamedTuple):
    """Log-probabilities of k-hot values, and their derivative.

    Attributes:
        log_prob: ``(probs, values, size)``: the log-probabilities of values ``(draws, rows, n)``, bool, given balanced
            probabilities ``(rows, n)``, float64, and the largest number of ones; ``(draws, rows)``, ``-inf`` if
            impossible.
        derivative: ``(probs, values, g, size)``: dL/dprobs from dL/dlog_prob.
    """

    log_prob: Callable[[Tensor, Tensor, int], Tensor]
    derivative: Callable[[Tensor, Tensor, Tensor, int], Tensor]


# Calls that no backend takes are composed of torch operations in the law.
scores = Backends(__name__, "SCORES")
scores.backend("numba", module=".numba_brewer_scores")
