"""Draws by duels of units, which have exactly the given inclusion probabilities.

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

References:
    [1] Deville, Tillé (1998), "Unequal probability sampling without replacement through a splitting method".
    [2] Chauvet (2012), "On a characterization of ordered pivotal sampling", for schedules other than one by one.
"""

from torch import Tensor

from ..registry import DrawOperator, has_draws
from . import exact
from .exact import balance, missing_share, tournament

__all__ = ["balance", "missing_share", "pivotal_draw", "tournament"]

LONGEST_ON_CHIP = 4096  # units of a row that a program on an accelerator holds


def _fits_a_program(probs: Tensor, n: int, rows: int, draws: int) -> str | None:
    if n > LONGEST_ON_CHIP:
        return f"a program has no room for a row of more than {LONGEST_ON_CHIP} units"
    return has_draws(probs, n, rows, draws)


pivotal_draw = DrawOperator("pivotal_draw", exact.pivotal_draw)
pivotal_draw.backend("triton", module=".triton_tournament", takes=_fits_a_program)
pivotal_draw.backend("numba", module=".numba_tournament", takes=has_draws)
