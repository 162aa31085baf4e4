"""The Laplace link in Triton: F(-a) = F'(a) = exp(-a) / 2."""

# mypy: disable-error-code="no-untyped-def"

import triton
import triton.language as tl

from .base import LOG_2
from .base_triton import SmoothLink, exponential_decay
from .laplace import Laplace

LN_2 = tl.constexpr(LOG_2)


@triton.jit
def _tails(a, LINK: tl.constexpr):
    tail = 0.5 * tl.exp(-a)
    return tail, tail


@triton.jit
def _shifted_tails(a, nearest, LINK: tl.constexpr):
    tail = 0.5 * tl.exp(nearest - a)
    return tail, tail


@triton.jit
def _log_tail(a, tail, LINK: tl.constexpr):
    return -a - LN_2


@triton.jit
def _log_derivative(z, LINK: tl.constexpr):
    tail, _ = LINK.tails(tl.abs(z), LINK)
    return tl.where(z > 0, tail / (1.0 - tail), 1.0)


@triton.jit
def _quantile(p, complement, q, LINK: tl.constexpr):
    return tl.where(p < complement, tl.log(2.0 * p), -tl.log(2.0 * complement))


LAPLACE = SmoothLink(
    name="laplace",
    of=Laplace,
    quantile=_quantile,
    decay=exponential_decay,
    tails=_tails,
    shifted_tails=_shifted_tails,
    slope_is_tail=True,
    log_tail=_log_tail,
    log_derivative=_log_derivative,
)
KERNELS = {LAPLACE.name: LAPLACE}
