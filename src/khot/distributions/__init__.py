"""Sampling designs: Pyro distributions over k-hot vectors."""

from khot.distributions.design import SamplingDesign
from khot.distributions.pivotal import Pivotal

__all__ = ["Pivotal", "SamplingDesign"]
