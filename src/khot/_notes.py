"""Text that several docstrings share."""

import inspect
from typing import Any, TypeVar

Member = TypeVar("Member", bound=Any)

BETWEEN_VERTICES = """\
Pathwise gradients depend on f between k-hot vectors: of two losses that agree on every k-hot vector, one can give good
gradients and the other useless ones. Make f linear in x if possible: write ``X diag(x) Xᵀ`` rather than
``(X * x)(X * x)ᵀ``, in which x is squared and units that are out get no gradient. :func:`~khot.score_function` does
not depend on how f is written."""


def feels_between_vertices(member: Member) -> Member:
    """Inserts :data:`BETWEEN_VERTICES` into a docstring, before its list of arguments."""
    if member.__doc__:  # python -OO removes docstrings
        member.__doc__ = inspect.cleandoc(member.__doc__).replace("\nArgs:\n", f"\n{BETWEEN_VERTICES}\n\nArgs:\n", 1)
    return member
