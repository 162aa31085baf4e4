"""Sampling designs: Pyro distributions over k-hot vectors."""

from . import kl as _kl  # noqa: F401  (registers the divergences)
from .conditional_poisson import ConditionalPoisson
from .design import SamplingDesign
from .pivotal import Pivotal

__all__ = ["ConditionalPoisson", "Pivotal", "SamplingDesign"]
