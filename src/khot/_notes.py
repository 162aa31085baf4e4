"""What several docstrings have to say in the same words."""

import inspect
from typing import Any, TypeVar

Member = TypeVar("Member", bound=Any)

BETWEEN_VERTICES = """\
Pathwise gradients feel f between the k-hot vectors: two losses that agree on every one of them can have gradients of
opposite worth. Write f linear in x where it can be, such as ``X diag(x) Xᵀ`` in place of ``(X * x)(X * x)ᵀ``, in
which x is squared and units that are out get no signal; :func:`~khot.finite_difference` and
:func:`~khot.score_function` do not depend on it."""


def feels_between_vertices(member: Member) -> Member:
    """Puts :data:`BETWEEN_VERTICES` into a docstring, before its list of arguments."""
    if member.__doc__:  # python -OO leaves none
        member.__doc__ = inspect.cleandoc(member.__doc__).replace("\nArgs:\n", f"\n{BETWEEN_VERTICES}\n\nArgs:\n", 1)
    return member
