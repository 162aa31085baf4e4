"""Sampling designs: Pyro distributions over k-hot vectors, and classical estimates from their draws.

An argument of a wrong type raises TypeError, and one of a wrong shape or out of range ValueError.
"""

from . import kl as _kl  # noqa: F401  (registers the divergences)
from .brewer import Brewer
from .conditional_poisson import ConditionalPoisson
from .design import SamplingDesign
from .gumbel_topk import GumbelTopK
from .pareto import ParetoSampling
from .phantom_unit import PhantomUnit
from .pivotal import Pivotal
from .plackett_luce import PlackettLuce
from .relaxed_khot import RelaxedKHot, RelaxedKHotStraightThrough
from .sampford import Sampford
from .systematic import Systematic
from .totals import horvitz_thompson

__all__ = [
    "Brewer",
    "ConditionalPoisson",
    "GumbelTopK",
    "ParetoSampling",
    "PhantomUnit",
    "Pivotal",
    "PlackettLuce",
    "RelaxedKHot",
    "RelaxedKHotStraightThrough",
    "Sampford",
    "SamplingDesign",
    "Systematic",
    "horvitz_thompson",
]


def __dir__() -> list[str]:
    return __all__
