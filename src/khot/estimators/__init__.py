"""Gradient estimators through k-hot draws: wrappers that are Pyro distributions, and functions for custom loops.

The functions are called as ``surrogate = estimator(design, f, num_samples)``, where f maps values ``(num_samples,
*batch_shape, *event_shape)`` to losses ``(num_samples, *batch_shape)``. An event is a vector ``(n,)``, or several under
one loss where the design is made independent over dimensions of its batch, by ``design.to_event(1)``. The surrogate, of
shape ``batch_shape``, is differentiated in place of E[f(x)], with respect to the parameters of the design and of f: its
gradient is the estimate. ``score_function_surrogate`` makes it of draws and losses that are there already. A
``generator`` is on the device of the parameters. Each function has the attributes ``unbiased``, whether the expected
gradient is exact for every f and design, and ``min_samples``.
"""

from khot.distributions import RelaxedKHotStraightThrough

from ._enumerated import enumerated
from ._finite_difference import finite_difference
from ._pathwise import pathwise, reinmax, straight_through
from ._perturbed_topk import PerturbedTopK, perturbed_topk
from ._reinmax import ReinMax
from ._score_function import MovingAverage, score_function, score_function_surrogate
from ._straight_through import StraightThrough
from ._unordered_set import unordered_set
from .imle import IMLE, AdaptiveStep
from .rao_blackwell import RaoBlackwellStraightThrough

__all__ = [  # noqa: RUF022  (ruff takes IMLE for a constant, which it would put first)
    "AdaptiveStep",
    "IMLE",
    "MovingAverage",
    "PerturbedTopK",
    "RaoBlackwellStraightThrough",
    "ReinMax",
    "RelaxedKHotStraightThrough",
    "StraightThrough",
    "enumerated",
    "finite_difference",
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
