"""The wrapping of the members that all designs have, in one place.

The design of a DTensor calls the design of the local rows (:mod:`.spread`), and a design of a half type calls its
counterpart in float32 (:mod:`.rounding`). A trace of ``torch.jit`` contains a member that reads contents as one
operation. Thus a subclass defines each member only for plain tensors in float32 or float64. Its lazy properties follow
the parameters.
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
        axes: The number of dimensions of its result after the batch, in a design that is spread over processes; None if
            the member calls other members that are wrapped.
        is_rounded: Whether a design of a half type leaves this member to its counterpart in float32.
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
    "enumerate_support": Member(1, is_rounded=False),  # its entries are zeros and ones, or indices
    "to_khot": Member(1, is_rounded=False),
}


class DesignMembers(KHotDistribution):
    """Wraps the members of its subclasses as :data:`MEMBERS` specifies."""

    _lazy: ClassVar[frozenset[str]] = frozenset()  # the members that are computed from the parameter on demand

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
    """Marks a member whose operations a trace records one by one, such as those of a user's own relaxation."""
    function.is_traced_through = True  # type: ignore[attr-defined]
    return function


class _Derived(lazy_property):  # type: ignore[type-arg]
    """A lazy property whose value is computed again when the parameters of the design have changed."""

    def __get__(self, instance: Any, obj_type: Any = None) -> Any:
        if instance is None:
            return super().__get__(None, obj_type)
        return instance.derived(self.wrapped.__name__, self.wrapped)


def _changed(member: Any, change: Callable[..., Any]) -> Any:
    """A method or property with its function replaced by ``change(function)``."""
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
