"""Pivotal sampling by a tournament: exactly the given inclusion probabilities, O(n) work in O(log n) steps.

A duel of two units with probabilities a and b decides one of them for good; the other goes on with what is left:

    a + b <  1   the loser is out,     the winner goes on with a + b:      b with probability b / (a + b)
    a + b >= 1   the winner is chosen, the loser goes on with a + b - 1:   b with probability (1 - b) / (2 - a - b)

Each duel keeps both expectations, so any schedule of duels that does not look at the outcomes gives every unit its
probability. Here the order is random and the schedule a tree. What goes on from a node does not depend on who goes on,
so the probabilities go up the tree first and the fates come down: the unit that a duel decides gets the fate of the
duel, the other one the fate of the node. All in float64, since the sum of many probabilities has to end at an integer.

References:
    [1] Deville, Tillé (1998), "Unequal probability sampling without replacement through a splitting method".
    [2] Chauvet (2012), "On a characterization of ordered pivotal sampling", for schedules other than one by one.
"""

from torch import Tensor

from ..registry import DrawOperator
from . import reference
from .reference import balance, missing_share, tournament

__all__ = ["LONGEST_TOURNAMENT", "balance", "missing_share", "pivotal_draw", "tournament"]

LONGEST_TOURNAMENT = 4096  # units; longer rows would take too long to sort


def _sorts_soon(probs: Tensor, draws: int) -> str | None:
    if probs.shape[-1] > LONGEST_TOURNAMENT:
        return f"it takes too long to sort a row of more than {LONGEST_TOURNAMENT} units in a program"
    return DrawOperator.fills_device(probs, draws)


def _counts_in_int32(probs: Tensor, draws: int) -> str | None:
    if probs.shape[-1] >= 2**31:
        return "its loops count units in 32 bits"
    return DrawOperator.has_draws(probs, draws)


pivotal_draw = DrawOperator("pivotal_draw", reference.pivotal_draw)
pivotal_draw.backend(
    "triton",
    module=".triton_backend",
    takes=_sorts_soon,
)
pivotal_draw.backend("numba", module=".numba_backend", takes=_counts_in_int32)
