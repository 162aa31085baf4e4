"""Hot loops behind khot: for each operation the mathematics, a plain-torch reference and the dispatch to backends.

This package can be imported, but it is not part of the public interface, which consists of the names of ``khot`` and
its other subpackages. :func:`backend` selects torch, numba or Triton by hand, like ``KHOT_BACKEND`` in the environment.
At the level ``DEBUG`` the logger ``khot`` says which of them computes each operation, and why not a faster one.
"""

from .registry import backend

__all__ = ["backend"]
