"""Hot loops behind khot: for each operation the mathematics, a plain-torch reference and the dispatch to backends.

This package is reachable but not promised: the public names are those of ``khot`` and its other subpackages.
:func:`backend` selects torch, numba or Triton by hand, like ``KHOT_BACKEND`` in the environment. :func:`explain` shows
which of them a call uses, and why it does not use the others.
"""

from .operators.explanation import Explanation, explain
from .registry import backend

__all__ = ["Explanation", "backend", "explain"]
