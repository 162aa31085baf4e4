"""The logistic link in Triton: with u = 1 / (1 + e^a), F(-a) = u and F'(a) = u - u^2."""

# mypy: disable-error-code="no-untyped-def"

import triton
import triton.language as tl

from .base_triton import SmoothLink, exponential_decay
from .logistic import Logistic


@triton.jit
def _tails(a, LINK: tl.constexpr):
    tail = 1.0 / (1.0 + tl.exp(a))
    return tail, tail - tail * tail


@triton.jit
def _shifted_tails(a, nearest, LINK: tl.constexpr):
    e = tl.exp(nearest - a)
    d = 1.0 + e * tl.exp(-nearest)
    tail = e / d
    return tail, tail / d


@triton.jit
def _log_tail(a, tail, LINK: tl.constexpr):
    return tl.log(1.0 - tail) - a


@triton.jit
def _log_derivative(z, LINK: tl.constexpr):
    tail, _ = LINK.tails(tl.abs(z), LINK)
    return tl.where(z > 0, tail, 1.0 - tail)


@triton.jit
def _quantile(p, complement, q, LINK: tl.constexpr):
    return tl.log(p / complement)


LOGISTIC = SmoothLink(
    name="logistic",
    of=Logistic,
    quantile=_quantile,
    decay=exponential_decay,
    tails=_tails,
    shifted_tails=_shifted_tails,
    log_tail=_log_tail,
    log_derivative=_log_derivative,
)
KERNELS = {LOGISTIC.name: LOGISTIC}
