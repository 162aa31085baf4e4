"""Inference in Pyro with k-hot sites."""

from .reparam import KHotReparam
from .subsets import subset_categorical, subset_index, subset_vector

__all__ = ["KHotReparam", "subset_categorical", "subset_index", "subset_vector"]


def __dir__() -> list[str]:
    return __all__
