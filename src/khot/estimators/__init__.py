"""Gradient estimators through k-hot draws: wrappers that are Pyro distributions, and functions for custom loops.

The functions are called as ``surrogate = estimator(design, f, num_samples)``, where f maps values
``(num_samples, *batch_shape, *event_shape)`` to losses ``(num_samples, *batch_shape)``. An event is a vector ``(n,)``,
or several vectors with one loss if ``design.to_event(1)`` makes batch dimensions of the design part of the event. The
surrogate, of shape ``batch_shape``, is differentiated in place of E[f(x)] with respect to the parameters of the design
and of f: its gradient is the estimate. ``score_function_surrogate`` constructs it from given draws and losses. A
``generator`` must be on the device of the parameters. Each function has two attributes: ``unbiased``, whether the
expected gradient is exact for every f and design, and ``min_samples``.

An argument of a wrong type raises TypeError, and one of a wrong shape or out of range ValueError.
"""

from khot.distributions import RelaxedKHotStraightThrough

from ._enumerated import enumerated
from ._pathwise import pathwise, reinmax, straight_through
from ._perturbed_topk import PerturbedTopK, perturbed_topk
from ._reinmax import ReinMax
from ._score_function import MovingAverage, score_function, score_function_surrogate
from ._straight_through import StraightThrough
from ._unordered_set import unordered_set
from .imle import IMLE, AdaptiveStep

__all__ = [  # noqa: RUF022  (ruff takes IMLE for a constant and would put it first)
    "AdaptiveStep",
    "IMLE",
    "MovingAverage",
    "PerturbedTopK",
    "ReinMax",
    "RelaxedKHotStraightThrough",
    "StraightThrough",
    "enumerated",
    "pathwise",
    "perturbed_topk",
    "reinmax",
    "score_function",
    "score_function_surrogate",
    "straight_through",
    "unordered_set",
]


def __dir__() -> list[str]:
    return __all__
