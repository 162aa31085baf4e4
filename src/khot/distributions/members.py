"""What the members of all designs have in common, wrapped around each in one place.

A design of a DTensor calls the design of the rows that this process has (:mod:`.spread`), one of a half type its twin
in float32 (:mod:`.rounding`), and a trace of ``torch.jit`` holds a member that looks at contents as one operation. So a
subclass defines each member for plain tensors in float32 or float64 alone. Its lazy properties follow the parameters.
"""

import functools
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple, TypeVar, cast

from torch.distributions.utils import lazy_property

from khot._tracing import one_operation

from .base import KHotDistribution
from .rounding import rounded
from .spread import by_rows_here

F = TypeVar("F", bound=Callable[..., Any])


class Member(NamedTuple):
    """How a member of a design is wrapped.

    Attributes:
        axes: The dimensions of its result after those of the batch, in a design that is spread over processes; None if
            it needs no care there, as it calls members that have it.
        is_rounded: Whether a design of a half type leaves it to its twin in float32.
    """

    axes: int | None
    is_rounded: bool = True


MEMBERS = {
    "probs": Member(1),
    "logits": Member(1),
    "log_odds": Member(None),
    "size_probs": Member(None),
    "mean": Member(1),
    "variance": Member(None),
    "pairwise_inclusion": Member(2),
    "covariance_matrix": Member(2),
    "mode": Member(1),
    "sample": Member(1),
    "sample_indices": Member(1),
    "log_prob": Member(0),
    "log_prob_of_parts": Member(None),
    "entropy": Member(0),
    "enumerate_support": Member(1, is_rounded=False),  # of zeros and ones
}


class DesignMembers(KHotDistribution):
    """Wraps the members of its subclasses as :data:`MEMBERS` says."""

    _lazy: ClassVar[frozenset[str]] = frozenset()  # what is computed from the parameter when it is asked for

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for name, member in list(vars(cls).items()):
            if isinstance(member, lazy_property):
                member = _Derived(member.wrapped)
                setattr(cls, name, member)
            if name in MEMBERS:
                setattr(cls, name, _changed(member, functools.partial(_wrapped, name)))
        members = [item for base in cls.__mro__ for item in vars(base).items()]
        cls._lazy = frozenset(name for name, member in members if isinstance(member, lazy_property))


def traced_through(function: F) -> F:
    """Marks a member whose operations a trace records one by one, as those of a user's own relaxation."""
    function.is_traced_through = True  # type: ignore[attr-defined]
    return function


class _Derived(lazy_property):  # type: ignore[type-arg]
    """A lazy property whose value is computed anew when the parameters of the design have changed."""

    def __get__(self, instance: Any, obj_type: Any = None) -> Any:
        if instance is None:
            return super().__get__(None, obj_type)
        return instance.derived(self.wrapped.__name__, self.wrapped)


def _changed(member: Any, change: Callable[..., Any]) -> Any:
    """A method or property, changed."""
    if isinstance(member, lazy_property):
        return type(member)(change(member.wrapped))
    if isinstance(member, property):
        return property(change(cast(Any, member.fget)), doc=member.__doc__)
    return change(member)


def _wrapped(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    axes, is_rounded = MEMBERS[name]
    if axes is not None:
        whole = function if getattr(function, "is_traced_through", False) else one_operation(function)
        function = by_rows_here(name, axes, whole)
    return rounded(name, function) if is_rounded else function
