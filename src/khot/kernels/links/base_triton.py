"""Links in Triton: what a kernel needs from a link, and the formulas that all links share.

A kernel takes a link as a constexpr, one of the records below: functions and numbers of one link. The functions take
the record itself as their last argument, like methods: ``LINK.tails(a, LINK)``. Triton compiles a kernel once for each
record, and a record cannot be made without the functions that kernels call.

A smooth link computes everything from its shorter tail, F(-a) with a = abs(z), so that neither side loses digits. A
compact link provides the part below its cap. ``q`` is the parameter of a link, a number at run time.

The functions of the loop take z in the link's ``unit``, in which its exponential is a power of two: exp2(-a) costs one
instruction, exp(-a) two. All others take z itself.

No library of device functions is used, because Triton's interpreter has none.
"""

# mypy: disable-error-code="no-untyped-def"

import functools
import hashlib
from dataclasses import dataclass, fields
from importlib import import_module
from typing import Any

import triton
import triton.language as tl

from ..gpu.tools import quotient
from .base import Link

SMALL_TAIL = tl.constexpr(1e-4)  # below this, three terms of the series of log(1 - tail) are exact in float32
SMALL_TAIL_64 = tl.constexpr(1e-6)  # the same in float64

Device = Any  # a function with @triton.jit, to be compiled or interpreted


@triton.jit
def constant_hazard(a, tail, LINK: tl.constexpr):
    """The ``hazard`` of an exponential tail."""
    return tl.full(a.shape, 1.0, a.dtype)


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class TritonLink:
    """A link for kernels.

    Attributes:
        name: ``Link.kernel``.
        of: The class of the link, for its constants.
        unit: The functions of the loop take ``unit * z``.
        quantile: ``(p, complement, q, LINK)``: the inverse of F at p = 1 - complement, to a few digits.
        hazard: ``(a, tail, LINK)``: F'(-a) / F(-a), without underflow of either; may use F(-a).
    """

    name: str
    of: type[Link]
    unit: float = 1.0
    quantile: Device
    hazard: Device = constant_hazard

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
        """The name by which Triton distinguishes its kernels from those of other links: in memory, on disk and in code.

        It changes with the source of the functions, and with the numbers.
        """
        values = [getattr(self, field.name) for field in fields(self) if field.name != "of"]
        parts = [*(getattr(value, "cache_key", value) for value in values), self.compact, self.reaches_zero, self.reach]
        return f"{self.name}_{hashlib.sha256(repr(parts).encode()).hexdigest()[:16]}"


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class SmoothLink(TritonLink):
    """A link for kernels with a tail on both sides, F(-z) = 1 - F(z).

    Attributes:
        tails: ``(a, LINK)``: F(-z) and F'(z) at a = unit * z >= 0.
        log_tail: ``(a, tail, LINK)``: log F(-a), without underflow of F; may use F(-a).
    """

    tails: Device
    log_tail: Device


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class CompactLink(TritonLink):
    """A link for kernels that is 1 above its cap.

    Attributes:
        cap: The z from which F(z) = 1.
        uncapped: ``(z, q, LINK)``: F and F' below the cap, at unit * z; both are 0 beyond it.
        log_uncapped: ``(z, q, LINK)``: log F(z) below the cap.
        newton_step: ``(residual, excess, total, slope, k, q, LINK)``: as in the torch link.
    """

    cap: float
    uncapped: Device
    log_uncapped: Device
    newton_step: Device


def triton_link(link: Link) -> TritonLink:
    """The record of a link for kernels, from the file beside that of its class."""
    return _kernel_beside(type(link).__module__, link.kernel)


@functools.cache
def _kernel_beside(module: str, name: str | None) -> TritonLink:
    return import_module(f"{module}_triton").KERNELS[name]


@triton.jit
def is_below(z, LINK: tl.constexpr):
    """1 for the entries that count as below the threshold, else 0, at ``unit * z``."""
    if LINK.compact:
        return tl.where(z < LINK.cap * LINK.unit, 1, 0)
    elif z.dtype == tl.float32:
        return (z.to(tl.uint32, bitcast=True) >> 31).to(tl.int32)  # the sign: one instruction when it is added up
    else:
        return tl.where(z < 0.0, 1, 0)


@triton.jit
def against(tail, z):
    """The nonnegative ``tail``, with the sign opposite to that of z."""
    if z.dtype == tl.float32:
        sign = ~z.to(tl.int32, bitcast=True) & -0x80000000
        return (tail.to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True)
    else:
        return tl.where(z < 0.0, tail, -tail)


@triton.jit
def tails_and_slopes(z, q, LINK: tl.constexpr):
    """The short tails in the residual, and F', at ``unit * z``; for a compact link F below the cap."""
    if LINK.compact:
        return LINK.uncapped(z, q, LINK)
    else:
        return LINK.tails(tl.abs(z), LINK)


@triton.jit
def value(z, q, LINK: tl.constexpr, LOG: tl.constexpr):
    """F, or log F, at ``unit * z``."""
    tail, _ = tails_and_slopes(z, q, LINK)
    if LINK.compact:
        tl.static_assert(not LOG, "no logarithm of this link")
        return tl.where(z < LINK.cap * LINK.unit, tail, 1.0)
    elif LOG:
        return tl.where(z > 0, _log_complement(tail), LINK.log_tail(tl.abs(z) * (1.0 / LINK.unit), tail, LINK))
    else:
        return tl.where(z > 0, 1.0 - tail, tail)


@triton.jit
def _log_complement(tail):
    """log(1 - tail), by its series where the subtraction rounds."""
    small = SMALL_TAIL_64 if tail.dtype == tl.float64 else SMALL_TAIL
    series = -tail - 0.5 * tail * tail - tail * tail * tail / 3.0
    return tl.where(tail < small, series, tl.log(1.0 - tail))


@triton.jit
def log_derivative(z, slope, tail, LINK: tl.constexpr):
    """F'(z) / F(z), the derivative of log F, at ``unit * z``, from F' and the short tail there."""
    tl.static_assert(not LINK.compact, "no logarithm of this link")
    return tl.where(z > 0, quotient(slope, 1.0 - tail), LINK.hazard(tl.abs(z) * (1.0 / LINK.unit), tail, LINK))


@triton.jit
def log_short_tail(z, q, LINK: tl.constexpr):
    """log of the short tail at z itself, without underflow; for a compact link log F below the cap."""
    if LINK.compact:
        return LINK.log_uncapped(z, q, LINK)
    else:
        tail, _ = LINK.tails(tl.abs(z) * LINK.unit, LINK)
        return LINK.log_tail(tl.abs(z), tail, LINK)
