"""The Laplace link in Triton: F(-a) = F'(a) = exp(-a) / 2."""

# mypy: disable-error-code="no-untyped-def"

import triton
import triton.language as tl

from ..gpu.tools import LOG2_E, rough_log
from .base import LOG_2
from .base_triton import SmoothLink
from .laplace import Laplace

LN_2 = tl.constexpr(LOG_2)


@triton.jit
def _tails(a, LINK: tl.constexpr):
    tail = 0.5 * tl.exp2(-a)
    return tail, tail


@triton.jit
def _log_tail(a, tail, LINK: tl.constexpr):
    return -a - LN_2


@triton.jit
def _quantile(p, complement, q, LINK: tl.constexpr):
    size = rough_log(2.0 * tl.minimum(p, complement))
    return tl.where(p < complement, size, -size)


LAPLACE = SmoothLink(
    name="laplace", of=Laplace, unit=LOG2_E.value, quantile=_quantile, tails=_tails, log_tail=_log_tail
)
KERNELS = {LAPLACE.name: LAPLACE}
