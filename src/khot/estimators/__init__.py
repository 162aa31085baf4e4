"""Gradient estimators through k-hot draws: wrappers that are Pyro distributions, and functions for custom loops."""

from khot.distributions import RelaxedKHotStraightThrough

from .straight_through import StraightThrough

__all__ = ["RelaxedKHotStraightThrough", "StraightThrough"]
