"""The links of :mod:`khot.kernels.links`, `clipped_power` and `capped_exponential`, for Triton kernels.

A link goes by its name, a constexpr, and ``q``, which only ``clip_power`` reads. Everything comes from the shorter
tail, F(-a) with a = abs(z), so that neither side loses digits. ``nearest`` = min a over a row keeps its tails from
underflowing all together: with it they and the slopes are divided by about what they are there, see ``shift_factor``.

No library of device functions is used: Triton's interpreter has none.
"""

# mypy: disable-error-code="no-untyped-def"

import triton
import triton.language as tl

INV_SQRT_2PI = tl.constexpr(0.3989422804014327)


@triton.constexpr_function
def is_smooth(link):
    return link in ("logistic", "laplace", "normal")


@triton.constexpr_function
def is_power(link):
    return link in ("clip", "clip_power")


@triton.constexpr_function
def is_compact(link):
    return is_power(link) or link == "exp"


@triton.jit
def _horner4(p, u, a, b, c, d):
    return (((p * u + a) * u + b) * u + c) * u + d


@triton.jit
def _mills(a):
    """exp(a^2 / 2) F(-a) of the normal distribution for a >= 0: s times a polynomial in s = c / (c + a).

    Interpolated at Chebyshev points; the relative error is 1.3e-8 in float32 and 7e-17 in float64.
    """
    if a.dtype == tl.float64:
        s = 5.0 / (5.0 + a)
        u = 2.0 * s - 1.0
        p = (-1.6332385249361177e-10 * u - 1.0074604252267033e-10) * u + 1.8893655039595838e-9
        p = _horner4(p, u, 1.0031299879479652e-9, -1.3565110626631534e-8, -7.1636801030382531e-9, 8.6805251896651399e-8)
        p = _horner4(p, u, 6.6213961430482516e-8, -5.5386757420880948e-7, -7.9558252811861061e-7, 3.3362198231727101e-6)
        p = _horner4(
            p, u, 9.9523542379584201e-6, -1.1875134657297736e-5, -0.000108979766180186, -0.00015957388189616127
        )
        p = _horner4(p, u, 0.00059867534764464399, 0.0041590133601883231, 0.013823727741762866, 0.033004073234068563)
        p = _horner4(p, u, 0.062706631334242753, 0.099061123193995358, 0.13307650057801154, 0.15383860995001259)
    else:
        s = 3.5 / (3.5 + a)
        u = 2.0 * s - 1.0
        p = (-1.42191112e-5 * u - 9.89577166e-6) * u + 0.00012934112
        p = _horner4(p, u, 0.000119362457, -0.000908281686, -0.00184720974, 0.00497315964)
        p = _horner4(p, u, 0.0331568701, 0.0901214451, 0.161589117, 0.212690307)
    return s * p


@triton.jit
def tails(a, LINK: tl.constexpr):
    """F(-a) and F'(a) of a smooth link for a >= 0."""
    if LINK == "logistic":
        tail = 1.0 / (1.0 + tl.exp(a))
        slope = tail - tail * tail
    elif LINK == "laplace":
        tail = 0.5 * tl.exp(-a)
        slope = tail
    else:
        tl.static_assert(LINK == "normal", "unknown link")
        density = tl.exp(-0.5 * a * a)
        tail = density * _mills(a)
        slope = density * INV_SQRT_2PI
    return tail, slope


@triton.jit
def shifted_tails(a, nearest, LINK: tl.constexpr):
    """:func:`tails` divided by :func:`shift_factor`; ``a`` and ``nearest`` below 1e19 in float32."""
    if LINK == "logistic":
        e = tl.exp(nearest - a)
        d = 1.0 + e * tl.exp(-nearest)
        tail = e / d
        slope = tail / d
    elif LINK == "laplace":
        tail = 0.5 * tl.exp(nearest - a)
        slope = tail
    else:
        tl.static_assert(LINK == "normal", "unknown link")
        density = tl.exp(-0.5 * (a - nearest) * (a + nearest))
        tail = density * _mills(a)
        slope = density * INV_SQRT_2PI
    return tail, slope


@triton.jit
def shift_factor(nearest, LINK: tl.constexpr):
    """What :func:`shifted_tails` divides by; 1 for links whose slopes do not underflow."""
    if LINK == "normal":
        return tl.exp(-0.5 * nearest * nearest)
    elif LINK == "logistic" or LINK == "laplace" or LINK == "exp":
        return tl.exp(-nearest)
    else:
        tl.static_assert(is_power(LINK), "unknown link")
        return nearest * 0.0 + 1.0


@triton.jit
def below_cap(z, LINK: tl.constexpr):
    """Whether F(z) < 1, for a compact link."""
    if LINK == "exp":
        return z < 0.0
    else:
        tl.static_assert(is_power(LINK), "unknown link")
        return z < 1.0


@triton.jit
def uncapped(z, q, LINK: tl.constexpr):
    """F(z) and F'(z) of a compact link where it is below 1; both 0 elsewhere."""
    if LINK == "exp":
        tail = tl.where(z < 0.0, tl.exp(tl.minimum(z, 0.0)), 0.0)
        return tail, tail
    else:
        base = tl.where(z < 1.0, tl.maximum(z, 0.0), 0.0)
        if LINK == "clip":
            return base, tl.where((z > 0) & (z < 1.0), 1.0, 0.0).to(z.dtype)
        else:
            tl.static_assert(LINK == "clip_power", "unknown link")
            power = tl.exp2((q - 1.0) * tl.log2(base))  # 0 where the base is: q > 1
            return base * power, q * power


@triton.jit
def value(z, q, LINK: tl.constexpr, LOG: tl.constexpr):
    """F(z), or log F(z)."""
    if is_compact(LINK):
        tl.static_assert(not LOG, "no logarithm of this link")
        below, _ = uncapped(z, q, LINK)
        return tl.where(below_cap(z, LINK), below, 1.0)
    else:
        a = tl.abs(z)
        tail, _ = tails(a, LINK)
        if LOG:
            # log(1 - u) by its series where the subtraction rounds; below, log u without underflow.
            high = tl.where(tail < 1e-4, -tail - 0.5 * tail * tail - tail * tail * tail / 3.0, tl.log(1.0 - tail))
            if LINK == "logistic":
                low = tl.log(1.0 - tail) - a
            else:
                tl.static_assert(LINK == "laplace", "no logarithm of this link")
                low = -0.6931471805599453 - a
            return tl.where(z > 0, high, low)
        else:
            return tl.where(z > 0, 1.0 - tail, tail)


@triton.jit
def slopes(z, nearest, q, LINK: tl.constexpr):
    """F'(z) divided by :func:`shift_factor`."""
    if LINK == "exp":
        slope = tl.exp(nearest + tl.where(z < 0.0, z, -3e18))  # 0 where capped, also if all are
    elif is_compact(LINK):
        _, slope = uncapped(z, q, LINK)
    else:
        _, slope = shifted_tails(tl.abs(z), nearest, LINK)
    return slope


@triton.jit
def log_slope_ratio(z, LINK: tl.constexpr):
    """F'(z) / F(z), the derivative of log F, for the logistic and the Laplace link."""
    tail, _ = tails(tl.abs(z), LINK)
    if LINK == "logistic":
        return tl.where(z > 0, tail, 1.0 - tail)
    else:
        tl.static_assert(LINK == "laplace", "no logarithm of this link")
        return tl.where(z > 0, tail / (1.0 - tail), 1.0)


@triton.jit
def add2(a0, a1, b0, b1):
    return a0 + b0, a1 + b1


@triton.jit
def add3(a0, a1, a2, b0, b1, b2):
    return a0 + b0, a1 + b1, a2 + b2


@triton.jit
def add4(a0, a1, a2, a3, b0, b1, b2, b3):
    return a0 + b0, a1 + b1, a2 + b2, a3 + b3


@triton.jit
def tail_sums(z, q, LINK: tl.constexpr):
    """The four sums of :class:`khot.kernels.links.base.TailSums` over a tile, in one reduction; -inf adds nothing."""
    if is_compact(LINK):
        # One after the other where all together take more registers than there are.
        above = tl.sum(tl.where(below_cap(z, LINK), 0, 1), 0)
        tail, slope = uncapped(z, q, LINK)
        total, slope = tl.reduce((tail, slope), 0, add2)
        return above, total, total, slope
    else:
        tail, slope = tails(tl.abs(z), LINK)
        positive = z > 0
        signed = tl.where(positive, -tail, tail)
        count = tl.where(positive, 1, 0)
        if LINK == "laplace":
            above, signed, total = tl.reduce((count, signed, tail), 0, add3)
            return above, signed, total, total
        else:
            return tl.reduce((count, signed, tail, slope), 0, add4)
