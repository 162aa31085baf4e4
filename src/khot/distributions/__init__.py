"""Sampling designs: Pyro distributions over k-hot vectors."""

from . import kl as _kl  # noqa: F401  (registers the divergences)
from .brewer import Brewer
from .conditional_poisson import ConditionalPoisson
from .design import SamplingDesign
from .phantom_unit import PhantomUnit
from .pivotal import Pivotal
from .relaxed_khot import RelaxedKHot, RelaxedKHotStraightThrough
from .sampford import Sampford
from .systematic import Systematic

__all__ = [
    "Brewer",
    "ConditionalPoisson",
    "PhantomUnit",
    "Pivotal",
    "RelaxedKHot",
    "RelaxedKHotStraightThrough",
    "Sampford",
    "SamplingDesign",
    "Systematic",
]
