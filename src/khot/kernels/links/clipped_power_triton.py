"""The links of the sparse maps in Triton: F(z) = z^q between 0 and the cap, 1; ``clip`` for q = 1, else ``clip_power``.

Powers are computed with exp2 and log2; those of 0 are 0, since all exponents are positive.
"""

# mypy: disable-error-code="no-untyped-def"

import triton
import triton.language as tl

from ..gpu.tools import fast_log2, quotient
from .base_triton import CompactLink
from .clipped_power import ClippedPower


@triton.jit
def _base(z):
    """z below the cap, 0 elsewhere."""
    return tl.where(z < 1.0, tl.maximum(z, 0.0), 0.0)


@triton.jit
def _clipped(z, q, LINK: tl.constexpr):
    return _base(z), tl.where((z > 0) & (z < 1.0), 1.0, 0.0).to(z.dtype)


@triton.jit
def _clipped_power(z, q, LINK: tl.constexpr):
    base = _base(z)
    power = tl.exp2((q - 1.0) * fast_log2(base))  # 0 where the base is: q > 1
    return base * power, q * power


@triton.jit
def _log_clipped(z, q, LINK: tl.constexpr):
    return q * tl.log(_base(z))


@triton.jit
def _step(residual, excess, total, slope, k, q, LINK: tl.constexpr):
    return residual / tl.maximum(slope, 1.0)


@triton.jit
def _step_of_power(residual, excess, total, slope, k, q, LINK: tl.constexpr):
    ratio = tl.maximum(-excess, 0.0) / total
    root = tl.exp2(tl.log2(ratio) / q)
    step = tl.where(excess <= 0, q * total * (1.0 - root), residual) / slope
    return tl.where(slope > 0, step, residual)


@triton.jit
def _quantile(p, complement, q, LINK: tl.constexpr):
    return p


@triton.jit
def _quantile_of_power(p, complement, q, LINK: tl.constexpr):
    return tl.exp2(quotient(fast_log2(p), q))


CLIP = CompactLink(
    name="clip",
    of=ClippedPower,
    quantile=_quantile,
    cap=1.0,
    uncapped=_clipped,
    log_uncapped=_log_clipped,
    newton_step=_step,
)
CLIP_POWER = CompactLink(
    name="clip_power",
    of=ClippedPower,
    quantile=_quantile_of_power,
    cap=1.0,
    uncapped=_clipped_power,
    log_uncapped=_log_clipped,
    newton_step=_step_of_power,
)
KERNELS = {link.name: link for link in (CLIP, CLIP_POWER)}
