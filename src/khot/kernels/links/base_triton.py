"""Links in Triton: what a kernel needs of a link, and the formulas that all links share.

A kernel takes a link as a constexpr, one of the records below: functions and numbers of one link. The functions take
the record itself as their last argument, as methods do: ``LINK.tails(a, LINK)``. Triton compiles a kernel once for each
record, and a record cannot be made without the functions that kernels call.

A smooth link gives everything through its shorter tail, F(-a) with a = abs(z), so that neither side loses digits.
``nearest`` = min a over a row keeps its tails from underflowing all together: with it they and the slopes are divided
by about what they are there. A compact link gives what lies below its cap. ``q`` is the parameter of a link, a number
at run time.

No library of device functions is used: Triton's interpreter has none.
"""

# mypy: disable-error-code="no-untyped-def"

import hashlib
from dataclasses import dataclass, fields
from importlib import import_module
from typing import Any

import triton
import triton.language as tl

from ..triton_tools import add2, add3, add4, farthest
from .base import Link

FAR = tl.constexpr(1e18)  # as good as infinite for z, but 0 * FAR is 0, and its square is finite in float32
CAPPED = tl.constexpr(3e18)  # farther than that
SMALL_TAIL = tl.constexpr(1e-4)  # below which three terms of the series of log(1 - tail) are exact in float32

Device = Any  # a function with @triton.jit: one to compile, or one to interpret


@triton.jit
def exponential_decay(a, b, LINK: tl.constexpr):
    """The ``decay`` of a link with slopes like exp(-a)."""
    return tl.exp(b - a)


@triton.jit
def exponential_decay_beyond(start, beyond, LINK: tl.constexpr):
    """The ``decay_beyond`` of such a link, which is the same at every start."""
    return LINK.decay(beyond, 0.0 * beyond, LINK)


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class TritonLink:
    """What the kernels know of a link.

    Attributes:
        name: ``Link.kernel``.
        of: The class of the link, for its ``reach`` and ``reaches_zero``.
        quantile: ``(p, complement, q, LINK)``: the inverse of F at p = 1 - complement, to a few digits.
        decay: ``(a, b, LINK)``: about F'(-a) / F'(-b) for a >= b >= 0, without underflow of either; 1 if slopes do not
            underflow. Their common factor is ``decay(nearest, 0)``.
    """

    name: str
    of: type[Link]
    quantile: Device
    decay: Device

    @property
    def compact(self) -> bool:
        return self.of.compact

    @property
    def reaches_zero(self) -> bool:
        return self.of.reaches_zero

    @property
    def reach(self) -> float:
        return self.of.reach

    def __repr__(self) -> str:
        """The name by which Triton tells its kernels from those of other links: in memory, on disk and in the code.

        It changes with the source of the functions, and with the numbers.
        """
        values = [getattr(self, field.name) for field in fields(self) if field.name != "of"]
        parts = [*(getattr(value, "cache_key", value) for value in values), self.compact, self.reaches_zero, self.reach]
        return f"{self.name}_{hashlib.sha256(repr(parts).encode()).hexdigest()[:16]}"


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class SmoothLink(TritonLink):
    """The same of a link with a tail on both sides, F(-z) = 1 - F(z).

    Attributes:
        tails: ``(a, LINK)``: F(-a) and F'(a) for a >= 0.
        shifted_tails: ``(a, nearest, LINK)``: the same divided by ``decay(nearest, 0)``; arguments up to
            :func:`limit_of`.
        decay_beyond: ``(start, beyond, LINK)``: F'(start + beyond) / F'(start), also where both underflow.
        slope_is_tail: Whether F'(a) = F(-a), which saves a sum.
        log_tail: ``(a, tail, LINK)``: log F(-a), from a and F(-a); None if the link has no logarithms.
        log_derivative: ``(z, LINK)``: F'(z) / F(z), likewise.
        heavy: Whether the tails fall like powers; then the functions take every finite z.
    """

    tails: Device
    shifted_tails: Device
    decay_beyond: Device = exponential_decay_beyond
    slope_is_tail: bool = False
    log_tail: Device | None = None
    log_derivative: Device | None = None
    heavy: bool = False


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class CompactLink(TritonLink):
    """The same of a link that is 1 above its cap.

    Attributes:
        cap: The z from which F(z) = 1.
        uncapped: ``(z, q, LINK)``: F(z) and F'(z) below the cap; both 0 from there on.
        newton_step: ``(residual, excess, total, slope, k, q, LINK)``: as of the torch link.
    """

    cap: float
    uncapped: Device
    newton_step: Device
    heavy: bool = False


def triton_link(link: Link) -> TritonLink:
    """What the kernels know of a link that has a Triton piece, from the file beside that of its class."""
    return import_module(f"{type(link).__module__}_triton").KERNELS[link.kernel]


@triton.jit
def limit_of(LINK: tl.constexpr, DTYPE: tl.constexpr):
    """A z as good as infinite, whose slope is nothing beside those of the others."""
    if LINK.heavy:
        return farthest(DTYPE)
    else:
        return FAR


@triton.jit
def bounded(z, LINK: tl.constexpr):
    """z between numbers as good as infinite: 0 * z stays 0."""
    limit = limit_of(LINK, z.dtype)
    return tl.minimum(tl.maximum(z, -limit), limit)


@triton.jit
def value(z, q, LINK: tl.constexpr, LOG: tl.constexpr):
    """F(z), or log F(z)."""
    if LINK.compact:
        tl.static_assert(not LOG, "no logarithm of this link")
        below, _ = LINK.uncapped(z, q, LINK)
        return tl.where(z < LINK.cap, below, 1.0)
    else:
        a = tl.abs(z)
        tail, _ = LINK.tails(a, LINK)
        if LOG:
            tl.static_assert(LINK.log_tail is not None, "no logarithm of this link")
            # log(1 - u) by its series where the subtraction rounds; below, log u without underflow.
            series = -tail - 0.5 * tail * tail - tail * tail * tail / 3.0
            high = tl.where(tail < SMALL_TAIL, series, tl.log(1.0 - tail))
            return tl.where(z > 0, high, LINK.log_tail(a, tail, LINK))
        else:
            return tl.where(z > 0, 1.0 - tail, tail)


@triton.jit
def nearest_of(z, LINK: tl.constexpr):
    """The smallest abs(z) of a tile, among those with a slope; 0 where slopes do not underflow."""
    if not LINK.compact:
        return tl.min(tl.abs(z), 0)
    elif LINK.reaches_zero:
        return tl.zeros((), z.dtype)
    else:
        return tl.min(tl.where(z < LINK.cap, -z, FAR), 0)


@triton.jit
def slopes(z, nearest, q, LINK: tl.constexpr):
    """F'(z) divided by ``decay(nearest, 0)``."""
    if not LINK.compact:
        _, slope = LINK.shifted_tails(tl.abs(z), nearest, LINK)
    elif LINK.reaches_zero:
        _, slope = LINK.uncapped(z, q, LINK)
    else:
        slope = LINK.decay(tl.where(z < LINK.cap, -z, CAPPED), nearest, LINK)  # 0 where capped, also if all are
    return slope


@triton.jit
def log_derivative(z, LINK: tl.constexpr):
    """F'(z) / F(z), the derivative of log F."""
    tl.static_assert(not LINK.compact, "no logarithm of this link")
    tl.static_assert(LINK.log_derivative is not None, "no logarithm of this link")
    return LINK.log_derivative(z, LINK)


@triton.jit
def tail_sums(z, q, LINK: tl.constexpr):
    """The four sums of :class:`khot.kernels.links.base.TailSums` over a tile, in one reduction; -inf adds nothing."""
    if LINK.compact:
        # One after the other where all together take more registers than there are.
        above = tl.sum(tl.where(z < LINK.cap, 0, 1), 0)
        tail, slope = LINK.uncapped(z, q, LINK)
        total, slope = tl.reduce((tail, slope), 0, add2)
        return above, total, total, slope
    else:
        tail, slope = LINK.tails(tl.abs(z), LINK)
        positive = z > 0
        signed = tl.where(positive, -tail, tail)
        count = tl.where(positive, 1, 0)
        if LINK.slope_is_tail:
            above, signed, total = tl.reduce((count, signed, tail), 0, add3)
            return above, signed, total, total
        else:
            return tl.reduce((count, signed, tail, slope), 0, add4)
