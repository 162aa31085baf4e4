"""Which link a relaxed mask has, for those who need more than its values: its slope at any probabilities."""

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from khot.kernels.links.base import Link

_Map = TypeVar("_Map", bound=Callable[..., Any])


def with_link(link: Link) -> Callable[[_Map], _Map]:
    """Notes on a relaxed mask that it is the capped simplex map of this link."""

    def note(relaxation: _Map) -> _Map:
        relaxation.__dict__["link"] = link
        return relaxation

    return note


def link_of(relaxation: Callable[..., Any]) -> Link | None:
    """The link of a relaxed mask: its attribute ``link``, or the argument of a partial ``capped_simplex_map``."""
    link = getattr(relaxation, "link", None)
    if link is None and isinstance(relaxation, partial):
        link = relaxation.keywords.get("link") or link_of(relaxation.func)
    return link if isinstance(link, Link) else None
