"""Inference in Pyro with k-hot sites."""

from .reparam import KHotReparam

__all__ = ["KHotReparam"]


def __dir__() -> list[str]:
    return __all__
