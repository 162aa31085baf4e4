"""Gradient estimators through k-hot draws: wrappers that are Pyro distributions, and functions for custom loops."""

from .imle import IMLE, AdaptiveStep
from .pathwise import pathwise, reinmax, straight_through
from .perturbed_topk import PerturbedTopK, perturbed_topk
from .rao_blackwell import RaoBlackwellStraightThrough
from .reinmax import ReinMax
from .straight_through import StraightThrough

__all__ = [  # noqa: RUF022  (ruff takes IMLE for a constant, which it would put first)
    "AdaptiveStep",
    "IMLE",
    "PerturbedTopK",
    "RaoBlackwellStraightThrough",
    "ReinMax",
    "StraightThrough",
    "pathwise",
    "perturbed_topk",
    "reinmax",
    "straight_through",
]
