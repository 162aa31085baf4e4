"""Inference in Pyro with k-hot sites."""

from .khot_swap import KHotSwap
from .reparam import KHotReparam

__all__ = ["KHotReparam", "KHotSwap"]


def __dir__() -> list[str]:
    return __all__
