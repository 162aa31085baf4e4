"""Draws of the pivotal method in the given order, see :mod:`khot.distributions.pivotal`, from weights of its duels.

Unit by unit: it takes the seat from the carrier with probability take / total, or at once where the seat is empty. In a
duel that crosses an integer the one of the two that does not sit there afterwards is chosen.
"""

from ..registry import DrawOperator
from . import reference
from .reference import CERTAIN, CROSSING, EMPTY, draw_in_order, kinds

__all__ = ["CERTAIN", "CROSSING", "EMPTY", "draw_in_order", "kinds", "ordered_duels_draw"]

ordered_duels_draw = DrawOperator("ordered_duels_draw", reference.ordered_duels_draw)
ordered_duels_draw.backend("triton", module=".triton_backend", takes=DrawOperator.fills_device)
ordered_duels_draw.backend("numba", module=".numba_backend", takes=DrawOperator.has_draws)
