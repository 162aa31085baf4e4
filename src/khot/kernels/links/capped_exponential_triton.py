"""The link of capped softmax in Triton: F(z) = F'(z) = exp(z) below the cap, 0."""

# mypy: disable-error-code="no-untyped-def"

import triton
import triton.language as tl

from ..gpu.tools import LOG2_E, rough_log
from .base_triton import CompactLink
from .capped_exponential import CappedExponential


@triton.jit
def _uncapped(z, q, LINK: tl.constexpr):
    tail = tl.where(z < 0.0, tl.exp2(tl.minimum(z, 0.0)), 0.0)
    return tail, tail


@triton.jit
def _log_uncapped(z, q, LINK: tl.constexpr):
    return z


@triton.jit
def _newton_step(residual, excess, total, slope, k, q, LINK: tl.constexpr):
    return tl.where(excess < 0, tl.log(total / -excess), tl.log(1.0 + residual / k))


@triton.jit
def _quantile(p, complement, q, LINK: tl.constexpr):
    return rough_log(p)


CAPPED_EXPONENTIAL = CompactLink(
    name="exp",
    of=CappedExponential,
    unit=LOG2_E.value,
    quantile=_quantile,
    cap=0.0,
    uncapped=_uncapped,
    log_uncapped=_log_uncapped,
    newton_step=_newton_step,
)
KERNELS = {CAPPED_EXPONENTIAL.name: CAPPED_EXPONENTIAL}
