"""Gradient estimators through k-hot draws: wrappers that are Pyro distributions, and functions for custom loops."""

from .pathwise import pathwise, straight_through
from .straight_through import StraightThrough

__all__ = ["StraightThrough", "pathwise", "straight_through"]
