"""Gradient estimators through k-hot draws: wrappers that are Pyro distributions, and functions for custom loops."""

from .straight_through import StraightThrough

__all__ = ["StraightThrough"]
