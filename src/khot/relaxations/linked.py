"""Tells which link a relaxed mask has, for code that needs the slope of the mask at given probabilities."""

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from torch import Tensor

from khot.kernels.links.base import Link

_Map = TypeVar("_Map", bound=Callable[..., Any])


def with_link(link: Link | Callable[..., Link], factor: float = 1.0) -> Callable[[_Map], _Map]:
    """Records that a relaxed mask is the capped simplex map of this link, or of the link that its settings give.

    The scale of that map is ``factor`` times the softness of the mask.
    """

    def note(relaxation: _Map) -> _Map:
        relaxation.__dict__["link"] = link
        relaxation.__dict__["scale_factor"] = factor
        return relaxation

    return note


def scale_of(relaxation: Callable[..., Any], softness: float | Tensor) -> float | Tensor:
    """The scale s of a relaxed mask F((x - t) / s) at this softness."""
    function = relaxation.func if isinstance(relaxation, partial) else relaxation
    factor: float = getattr(function, "scale_factor", 1.0)
    return softness if factor == 1.0 else factor * softness


def logarithm_of(relaxation: Callable[..., Any]) -> Callable[[_Map], _Map]:
    """Records that the function is the logarithm of a relaxed mask, as the attribute ``logarithm`` of that mask."""

    def note(logarithm: _Map) -> _Map:
        relaxation.__dict__["logarithm"] = logarithm
        return logarithm

    return note


def link_of(relaxation: Callable[..., Any]) -> Link | None:
    """The link of a relaxed mask: its attribute ``link``, or the link that the settings in a partial give."""
    settings = relaxation.keywords if isinstance(relaxation, partial) else {}
    function = relaxation.func if isinstance(relaxation, partial) else relaxation
    link = settings.get("link") or getattr(relaxation, "link", None) or getattr(function, "link", None)
    if callable(link):
        link = link(**settings)
    return link if isinstance(link, Link) else None


def has_link(arguments: dict[str, Any]) -> bool:
    """Whether the argument ``relaxation`` of a call is a relaxed mask with a link."""
    return link_of(arguments["relaxation"]) is not None
