"""Student's t links in Triton, by T = F(-a) r^df with r = sqrt(df + a^2), which is of order 1 for all a.

    F(-a) = T / r^df,    log F(-a) = log T - df log r,    F'(a) / F(-a) = C / (T r)

with C = F'(a) r^(df + 1), see :mod:`khot.kernels.links.student_t`, and with rho = a / r,

    df = 1   T = r atan(1 / a) / pi
    df = 2   T = 1 / (1 + rho)
    df = 4   T = 4 (3 - m) / (1 + rho)^2,    m = 1 - rho = 4 / (r^2 (1 + rho)).
"""

# mypy: disable-error-code="no-untyped-def"

from dataclasses import dataclass

import triton
import triton.language as tl

from ..gpu.tools import horner4, reciprocal
from .base_triton import SmoothLink
from .student_t import DENSITY, StudentT

ASYMPTOTIC = tl.constexpr(1e18)  # up to here a^2 is finite in float32; beyond it a equals r up to rounding
QUANTILE_STEPS = tl.constexpr(2)  # of Newton's method for df = 4, from a guess that is off by at most 7%


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class StudentTLink(SmoothLink):
    """The record of ``StudentT(df)``."""

    df: int

    @property
    def density(self) -> float:
        """C."""
        return DENSITY[self.df]


@triton.jit
def _inverse_radius(a, LINK: tl.constexpr):
    near = tl.minimum(a, ASYMPTOTIC)
    return tl.where(a < ASYMPTOTIC, tl.rsqrt(near * near + LINK.df), reciprocal(a))


@triton.jit
def _power(x, LINK: tl.constexpr):
    """x^df."""
    if LINK.df == 1:
        return x
    elif LINK.df == 2:
        return x * x
    else:
        return (x * x) * (x * x)


@triton.jit
def _atan_ratio(u):
    """4 atan(v) / (pi v) for u = v^2, with v up to tan(pi / 8).

    Interpolated at Chebyshev points; the relative error is 1e-7 in float32 and 2e-16 in float64, most of it rounding.
    """
    if u.dtype == tl.float64:
        p = (0.026910392897109125 * u - 0.055361120236235441) * u + 0.072426311798369192
        p = horner4(p, u, -0.084546084265149201, 0.097911528886723161, -0.1157473177105974, 0.1414709977470778)
        p = horner4(p, u, -0.18189136220003134, 0.25464790893245535, -0.42441318157832524, 1.2732395447351626)
    else:
        p = -0.0767293012 * u + 0.13457924
        p = horner4(p, u, -0.181303361, 0.254624775, -0.424412845, 1.27323954)
    return p


@triton.jit
def _scaled_tail(a, inverse, LINK: tl.constexpr):
    """T, from a and 1 / r."""
    both = 1.0 + tl.where(a < ASYMPTOTIC, a * inverse, 1.0)  # 1 + rho
    if LINK.df == 1:
        # atan(1 / a) = 2 atan(s) = 4 atan(v), by halving the angle twice.
        s = inverse * reciprocal(both)
        half = 1.0 + tl.sqrt(1.0 + s * s)
        v = s * reciprocal(half)
        return _atan_ratio(v * v) * reciprocal(both * half)
    elif LINK.df == 2:
        return reciprocal(both)
    else:
        over = reciprocal(both)
        return 4.0 * (3.0 - 4.0 * inverse * inverse * over) * (over * over)


@triton.jit
def _tails(a, LINK: tl.constexpr):
    inverse = _inverse_radius(a, LINK)
    power = _power(inverse, LINK)
    return _scaled_tail(a, inverse, LINK) * power, LINK.density * power * inverse


@triton.jit
def _log_tail(a, tail, LINK: tl.constexpr):
    inverse = _inverse_radius(a, LINK)
    return tl.log(_scaled_tail(a, inverse, LINK)) + LINK.df * tl.log(inverse)


@triton.jit
def _hazard(a, tail, LINK: tl.constexpr):
    inverse = _inverse_radius(a, LINK)
    return LINK.density * inverse / _scaled_tail(a, inverse, LINK)


@triton.jit
def _log_decay(start, beyond, LINK: tl.constexpr):
    ratio = _inverse_radius(start + beyond, LINK) / _inverse_radius(start, LINK)
    return (LINK.df + 1) * tl.log(ratio)


@triton.jit
def _quantile(p, complement, q, LINK: tl.constexpr):
    tail = tl.minimum(p, complement)
    if LINK.df == 1:
        u = tail * tail  # tail cot(pi tail) / (1 - 4 u), to 3e-6
        ratio = (((0.424703201 * u + 0.159874123) * u + 0.220161022) * u + 0.225880849) * u + 0.318310696
        size = ratio * (1.0 - 4.0 * u) / tail
    elif LINK.df == 2:
        size = (1.0 - 2.0 * tail) / tl.sqrt(2.0 * tail * (1.0 - tail))
    else:
        root = tl.sqrt(tail * (4.0 / 3.0))  # m from m^2 (3 - m) = 4 tail
        missing = root * (1.0 + root / 6.0)
        for _ in tl.static_range(QUANTILE_STEPS):
            wrong = missing * missing * (3.0 - missing) - 4.0 * tail
            missing -= wrong / (3.0 * missing * (2.0 - missing))
        size = 2.0 * (1.0 - missing) / tl.sqrt(missing * (2.0 - missing))
    return tl.where(p < complement, -size, size)


def _record(df: int) -> StudentTLink:
    return StudentTLink(
        name=StudentT(df).kernel,
        of=StudentT,
        df=df,
        quantile=_quantile,
        tails=_tails,
        log_tail=_log_tail,
        hazard=_hazard,
        log_decay=_log_decay,
        heavy=True,
    )


KERNELS = {link.name: link for link in map(_record, DENSITY)}
