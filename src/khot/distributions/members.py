"""The wrapping of the members that all designs have, in one place.

A design of a half type leaves a member to its counterpart in float32 (:mod:`.rounding`), so a subclass defines each
member only for tensors in float32 or float64. Its lazy properties follow the parameters.
"""

import functools
from typing import Any, ClassVar

from torch.distributions.utils import lazy_property

from .base import KHotDistribution
from .entry import with_function
from .rounding import rounded

ROUNDED = (  # members that a design of a half type leaves to its counterpart in float32
    "probs",
    "logits",
    "log_odds",
    "size_probs",
    "mean",
    "variance",
    "pairwise_inclusion",
    "covariance_matrix",
    "mode",
    "sample",
    "sample_indices",
    "log_prob",
    "entropy",
)


class DesignMembers(KHotDistribution):
    """Wraps the members of its subclasses."""

    _lazy: ClassVar[frozenset[str]] = frozenset()  # the members that are computed from the parameter on demand

    def __init_subclass__(cls, **kwargs: Any) -> None:
        for name, member in list(vars(cls).items()):
            if isinstance(member, lazy_property):
                member = _Derived(member.wrapped)
                setattr(cls, name, member)
            if name in ROUNDED:
                setattr(cls, name, with_function(member, functools.partial(rounded, name)))
        super().__init_subclass__(**kwargs)
        members = [item for base in cls.__mro__ for item in vars(base).items()]
        cls._lazy = frozenset(name for name, member in members if isinstance(member, lazy_property))


class _Derived(lazy_property):  # type: ignore[type-arg]
    """A lazy property whose value is computed again when the parameters of the design have changed."""

    def __get__(self, instance: Any, obj_type: Any = None) -> Any:
        if instance is None:
            return super().__get__(None, obj_type)
        return instance.derived(self.wrapped.__name__, self.wrapped)
