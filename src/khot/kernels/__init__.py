"""Hot loops behind khot: the mathematics, a plain-torch reference and the dispatch of each operation.

Reachable, not promised: the public names are those of ``khot`` and its other subpackages. :func:`backend` chooses
between torch, numba and Triton by hand, as ``KHOT_BACKEND`` in the environment does. :func:`explain` tells which of
them a call takes, and why not the others.
"""

from .operators.explanation import Explanation, explain
from .registry import backend

__all__ = ["Explanation", "backend", "explain"]
