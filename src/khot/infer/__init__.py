"""Inference in Pyro models with k-hot sites.

An argument of a wrong type raises TypeError, and one of a wrong shape or out of range ValueError.
"""

from .autoguide import AutoKHot
from .khot_swap import KHotSwap
from .reparam import KHotReparam
from .subsets import subset_categorical, subset_index, subset_vector

__all__ = ["AutoKHot", "KHotReparam", "KHotSwap", "subset_categorical", "subset_index", "subset_vector"]


def __dir__() -> list[str]:
    return __all__
