"""Gradient estimators through k-hot draws: wrappers that are Pyro distributions, and functions for custom loops."""

from .reinmax import ReinMax
from .straight_through import StraightThrough

__all__ = ["ReinMax", "StraightThrough"]
