"""The normal link in numba: F(-a) = exp(-a^2 / 2) times Mills' ratio, F'(a) = exp(-a^2 / 2) / sqrt(2 pi)."""

# mypy: disable-error-code="no-untyped-def"

import numpy as np

from ..cpu.loops import inlined, per_row
from ..cpu.maths import FLUSHED_EXP, Real
from .base_numba import FarTail, NumbaLink, normal_quantile, smooth_link
from .normal import INV_SQRT_2PI

LAST = {np.float32: 12.9, np.float64: 37.5}  # beyond this F(-a) is subnormal, which is slow
FAR = 1e9  # its square fits into float32; exp(-FAR^2) is 0

SCALE_32, SCALE_64 = np.float32(3.5), 5.0
# Mills' ratio over sqrt(2 pi), exp(a^2 / 2) F(-a) for a >= 0, is s times a polynomial in u = 2 s - 1, s = c / (c + a),
# interpolated at Chebyshev points, highest power first. The relative error is 1.3e-8 in float32 and 7e-17 in float64.
_M32 = tuple(
    map(
        np.float32,
        (
            -1.42191112e-5, -9.89577166e-6, 0.00012934112, 0.000119362457, -0.000908281686, -0.00184720974,
            0.00497315964, 0.0331568701, 0.0901214451, 0.161589117, 0.212690307,
        ),
    )
)  # fmt: skip
_M64 = (
    -1.6332385249361177e-10, -1.0074604252267033e-10, 1.8893655039595838e-9, 1.0031299879479652e-9,
    -1.3565110626631534e-8, -7.1636801030382531e-9, 8.6805251896651399e-8, 6.6213961430482516e-8,
    -5.5386757420880948e-7, -7.9558252811861061e-7, 3.3362198231727101e-6, 9.9523542379584201e-6,
    -1.1875134657297736e-5, -0.000108979766180186, -0.00015957388189616127, 0.00059867534764464399,
    0.0041590133601883231, 0.013823727741762866, 0.033004073234068563, 0.062706631334242753, 0.099061123193995358,
    0.13307650057801154, 0.15383860995001259,
)  # fmt: skip


# Written out, because a compiler does not vectorise around a loop over coefficients.
@inlined
def _mills_32(u):
    p = (((_M32[0] * u + _M32[1]) * u + _M32[2]) * u + _M32[3]) * u + _M32[4]
    p = (((p * u + _M32[5]) * u + _M32[6]) * u + _M32[7]) * u + _M32[8]
    return (p * u + _M32[9]) * u + _M32[10]


@inlined
def _mills_64(u):
    p = (((_M64[0] * u + _M64[1]) * u + _M64[2]) * u + _M64[3]) * u + _M64[4]
    p = (((p * u + _M64[5]) * u + _M64[6]) * u + _M64[7]) * u + _M64[8]
    p = (((p * u + _M64[9]) * u + _M64[10]) * u + _M64[11]) * u + _M64[12]
    p = (((p * u + _M64[13]) * u + _M64[14]) * u + _M64[15]) * u + _M64[16]
    p = (((p * u + _M64[17]) * u + _M64[18]) * u + _M64[19]) * u + _M64[20]
    return (p * u + _M64[21]) * u + _M64[22]


@per_row
def _quantile(p, q):
    return normal_quantile(p)


@inlined
def _log_decay(a, beyond):
    return -(a + 0.5 * beyond) * beyond


@inlined
def _mills(a):
    s = SCALE_64 / (SCALE_64 + a)
    return s * _mills_64(2 * s - 1) / INV_SQRT_2PI


def numba_link(variant: str, real: Real) -> NumbaLink:
    exp = FLUSHED_EXP[real]
    zero, one, two, minus_half, density, far = map(real, (0, 1, 2, -0.5, INV_SQRT_2PI, FAR))
    last = real(LAST[real])
    mills, scale = (_mills_32, SCALE_32) if real is np.float32 else (_mills_64, SCALE_64)

    @inlined
    def tails(a):
        a = min(a, far)
        s = scale / (scale + a)
        decay = exp(minus_half * a * a) if a < last else zero
        return decay * (s * mills(two * s - one)), decay * density

    return smooth_link(tails, _quantile, FarTail(_log_decay, _mills, gap=20.0, reach=5.0), real)
