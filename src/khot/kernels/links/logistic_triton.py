"""The logistic link in Triton: with e = exp(-a), F(-a) = e / (1 + e) and F'(a) = e / (1 + e)^2."""

# mypy: disable-error-code="no-untyped-def"

import triton
import triton.language as tl

from ..gpu.tools import LOG2_E, reciprocal, rough_log
from .base_triton import SmoothLink
from .logistic import Logistic


@triton.jit
def _tails(a, LINK: tl.constexpr):
    e = tl.exp2(-a)
    inverse = reciprocal(1.0 + e)
    tail = e * inverse
    return tail, tail * inverse


@triton.jit
def _log_tail(a, tail, LINK: tl.constexpr):
    return tl.log(1.0 - tail) - a


@triton.jit
def _hazard(a, tail, LINK: tl.constexpr):
    return 1.0 - tail


@triton.jit
def _quantile(p, complement, q, LINK: tl.constexpr):
    return rough_log(p) - rough_log(complement)


LOGISTIC = SmoothLink(
    name="logistic",
    of=Logistic,
    unit=LOG2_E.value,
    quantile=_quantile,
    tails=_tails,
    log_tail=_log_tail,
    hazard=_hazard,
)
KERNELS = {LOGISTIC.name: LOGISTIC}
