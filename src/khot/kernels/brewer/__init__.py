"""Brewer's draws, unit by unit; :mod:`khot.laws.brewer` has the formulas and their law."""

from ..registry import DrawOperator
from . import reference
from .reference import draw_by_draw, drawing_ratio

__all__ = ["brewer_draw", "draw_by_draw", "drawing_ratio"]

brewer_draw = DrawOperator("brewer_draw", reference.brewer_draw)
brewer_draw.backend("numba", module=".numba_backend")
