"""Gradient estimators through k-hot draws: wrappers that are Pyro distributions, and functions for custom loops."""

from .enumerated import enumerated
from .pathwise import pathwise, straight_through
from .score_function import MovingAverage, score_function
from .straight_through import StraightThrough
from .unordered_set import unordered_set

__all__ = [
    "MovingAverage",
    "StraightThrough",
    "enumerated",
    "pathwise",
    "score_function",
    "straight_through",
    "unordered_set",
]
