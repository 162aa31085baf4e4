r"""The kinds of maps that are defined by a threshold, as records of their differences.

    mask        y_i = F(z_i),                      z_i = (x_i - t) / s
    log_mask    y_i = log F(z_i),                  the same z
    signed      y_i = sign(x_i) F(z_i),            z_i = (|x_i| - t) / s,  t >= 0
    magnitude   y_i = sign(x_i) Y(|x_i|, z_i),     z_i = (|x_i| - t) / (s t^(p-1)),  t >= 0

A threshold is stored as t = anchor + offset * sigma. The scale sigma is the softness s, or s t^(p-1) for magnitudes,
for which it grows with t. The last two kinds have clipped powers as links, F(z) = clip(z, 0, 1)^q, q = 1 / (p - 1). A
magnitude is t z^q while it is pooled, 0 < z < 1. From its cap on, z >= 1, it no longer depends on t: then Y + s Y^(p-1)
= |x|.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..exact.rows import Threshold, distances
from ..links.base import Link

SHRINK_STEPS, DIFFERENTIABLE_STEPS = 7, 3
Solved = tuple[Tensor, Any]  # y, and anchors and offsets


class Kind(NamedTuple):
    """The properties of a kind of map.

    Attributes:
        name: Its name in operators.
        log: Whether it is the logarithm of a mask.
        absolute: Whether it is an odd map: a function of abs(x) that keeps the signs.
        grows: Whether the scale grows with the threshold.
    """

    name: str
    log: bool = False
    absolute: bool = False
    grows: bool = False

    def scores(self, x: Tensor) -> Tensor:
        """The numbers that are compared with the threshold."""
        return x.abs() if self.absolute else x

    def threshold(self, at: Threshold, softness: Tensor, link: Link) -> Tensor:
        """The number t, differentiable in the offset and the softness."""
        if not self.grows:
            return at.anchor + at.offset * softness
        positive, pull = at.anchor > 0, (0 - at.offset) * softness  # not -0, for which 1 / pull would be -inf
        return torch.where(positive, shrink(torch.where(positive, at.anchor, 1.0), pull, link.q)[0], 0.0)

    def scale(self, t: Tensor, softness: Tensor, link: Link) -> Tensor:
        """The scale sigma at a threshold t."""
        return softness * root_of(t, link.q) if self.grows else softness

    def distances(self, x: Tensor, at: Threshold, softness: Tensor, link: Link) -> Tensor:
        """z of scores x (..., n), differentiable to any order in x, the offset and the softness."""
        if not self.grows:
            return distances(x, at, softness)
        return ratios(x, at, root_of(self.threshold(at, softness, link), link.q), softness)


class Recipe(NamedTuple):
    """A backend's functions for the map with numbers k and scale, and for its gradient in x, at least fixed cost.

    Attributes:
        mask: ``(x, k, scale)``: y like x, and the anchors and offsets of all rows, two arrays or tensors; None if
            contents are invalid, and on a CPU unless all rows are ordinary.
        gradient: ``(x, scale, thresholds, grad)``: dL/dx, or None likewise.
    """

    mask: Callable[[Tensor, Any, Any], Solved | None]
    gradient: Callable[[Tensor, Any, Any, Tensor], Tensor | None]


KINDS = {
    kind.name: kind
    for kind in (
        Kind("mask"),
        Kind("log_mask", log=True),
        Kind("signed", absolute=True),
        Kind("magnitude", absolute=True, grows=True),
    )
}
MASK, LOG_MASK, SIGNED, MAGNITUDE = KINDS.values()


def shrink(a: Tensor, softness: Tensor, q: float) -> tuple[Tensor, Tensor]:
    """The y >= 0 with y + softness y^(1/q) = a >= 0, and y^(1/q); differentiable where a > 0, up to seven times.

    u = y^(1/q) solves u^q + softness u = a, in which one term is at least a / 2: Newton's method for this convex
    function starts above the root by at most a factor of 2. Derivatives go only through its last three steps, each of
    which, taken from the root, doubles the number of derivatives that are exact.
    """
    if q == 1:
        y = a / (1 + softness)
        return y, y
    room = 4.0 ** (1 / q)  # for rounding, next to the largest numbers: u / room, from a / 4
    quarter, lighter = a / 4, softness * (room / 4)
    constant, weight = quarter.detach(), lighter.detach()
    u = torch.minimum(constant / weight, constant ** (1 / q))
    for i in range(SHRINK_STEPS):
        if i == SHRINK_STEPS - DIFFERENTIABLE_STEPS:
            u, constant, weight = u.detach(), quarter, lighter
        u = ((1 - 1 / q) * u**q + constant / q) / (u ** (q - 1) + weight / q)
    u = room * u
    return torch.where(softness * u < 0.5 * a, a - softness * u, u**q), u  # whichever has the smaller rounding error


def root_of(t: Tensor, q: float) -> Tensor:
    """t^(1/q), with a last step that makes its q-th power t to all digits, despite the rounding of 1 / q."""
    if q == 1:
        return t
    root = t ** (1 / q)
    better = root * (1 + ((t.sqrt() / root ** (q / 2)).square() - 1) / q)
    return torch.where(root > 0, better, root)


def ratios(a: Tensor, at: Threshold, root: Tensor, softness: Tensor) -> Tensor:
    """z of magnitudes, for the root t^(1/q) > 0; differentiable.

    1 / scale might overflow; its factors do not, nor do their products, up to the cap.
    """
    first, second = (v.unsqueeze(-1) for v in (1 / softness, inverse_of(root)))
    return (a - at.anchor.unsqueeze(-1)) * first * second - at.offset.unsqueeze(-1)


def inverse_of(root: Tensor) -> Tensor:
    """1 / root, finite."""
    return root.reciprocal().clamp(max=torch.finfo(root.dtype).max)
