r"""Student's t laws as links: their tails follow a power law, so distant entries keep a noticeable weight.

With r = sqrt(df + z^2) and u = z / r the distribution functions of 1, 2 and 4 degrees of freedom are elementary,

    df = 1   F = 1/2 + atan(z) / pi,    F' = 1 / (pi r^2)    (the Cauchy law)
    df = 2   F = (1 + u) / 2,           F' = 1 / r^3
    df = 4   F = 1/2 + u (3 - u^2) / 4, F' = 12 / r^5

and so are their short tails, F(-a) for a >= 0, without differences of nearly equal numbers. With m = 1 - a / r, which
is df / (r (r + a)),

    df = 1   F(-a) = atan2(1, a) / pi
    df = 2   F(-a) = m / 2
    df = 4   F(-a) = m^2 (3 - m) / 4.

Their inverse at the tail probability p, with :math:`\varphi = \frac{2}{3} \arcsin \sqrt p` for df = 4, where
:math:`u (3 - u^2) = 2 (1 - 2p)` has the root :math:`u = 2 \sin(\pi / 6 - \varphi)`:

    df = 1   a = 1 / tan(pi p)
    df = 2   a = (1 - 2p) / sqrt(2 p (1 - p))
    df = 4   a = 2 (1 - m) / sqrt(m (2 - m)),    m = 2 sin^2(phi / 2) + sqrt(3) sin(phi)
"""

import math

import torch
from torch import Tensor

from khot._validation import checked_int

from .base import LOG_2, SymmetricLink

DENSITY = {1: 1 / math.pi, 2: 1.0, 4: 12.0}  # F' r^(df + 1), for the degrees of freedom that have an elementary F


class StudentT(SymmetricLink, name="student_t"):
    r"""The distribution function of Student's t law with ``df`` degrees of freedom as a link, for ``df`` 1, 2 or 4.

    .. math:: F'(z) \propto (1 + z^2 / \nu)^{-(\nu + 1) / 2}

    The tails are heavy: :math:`F(-a)` falls like :math:`a^{-\nu}`. An entry far below the threshold keeps a share of k
    and a gradient, unlike with the exponential tails of :class:`Logistic`. No variance is needed; df = 1 and 2 have
    none. F and its inverse are elementary for these degrees of freedom, and accurate in both tails.

    Args:
        df: Degrees of freedom :math:`\nu`: 1 (the Cauchy law), 2 or 4.

    Raises:
        TypeError: If ``df`` is not an int.
        ValueError: If ``df`` is another int.

    References:
        [1] Shaw (2006), "Sampling Student's T distribution - use of the inverse cumulative distribution function",
            Journal of Computational Finance 9(4): the closed forms.

    Example:
        >>> capped_simplex_map(torch.tensor([3.0, 1.0, 0.0]), 1, link=StudentT(1))
        tensor([0.6749, 0.1988, 0.1263])
    """

    kernel_has_log = True

    def __init__(self, df: int) -> None:
        df = checked_int("df", df)
        if df not in DENSITY:
            raise ValueError(f"`df` must be 1, 2 or 4, for which F is elementary, but got {df}")
        self.df = df

    @property
    def kernel(self) -> str:  # type: ignore[override]
        return f"student_t_{self.df}"

    def value(self, z: Tensor) -> Tensor:
        tail = self._tail(_size(z))
        return torch.where(z > 0, 1 - tail, tail)

    def slope(self, z: Tensor) -> Tensor:
        return DENSITY[self.df] * self._radius(z).reciprocal() ** (self.df + 1)

    def tail_and_slope(self, z: Tensor) -> tuple[Tensor, Tensor]:
        return self._tail(z.abs()), self.slope(z)

    def inverse(self, p: Tensor) -> Tensor:
        upper = p > 0.5
        size = self._quantile(torch.where(upper, 1 - p, p))
        return torch.where(upper, size, -size)

    def log_value(self, z: Tensor) -> Tensor:
        a = _size(z)
        return torch.where(z > 0, torch.log1p(-self._tail(a)), self._log_tail(a))

    def log_slope(self, z: Tensor) -> Tensor:
        return math.log(DENSITY[self.df]) - (self.df + 1) * self._radius(z).log()

    def log_derivative(self, z: Tensor) -> Tensor:
        a = _size(z)
        return torch.where(z > 0, self.slope(a) / (1 - self._tail(a)), self._decay(a))

    def _radius(self, z: Tensor) -> Tensor:
        return torch.hypot(z, torch.full_like(z, math.sqrt(self.df)))

    def _tail(self, a: Tensor) -> Tensor:
        """F(-a) for a >= 0."""
        if self.df == 1:
            return torch.atan2(torch.ones_like(a), a) / torch.pi
        m = self._missing(a)
        return 0.5 * m if self.df == 2 else 0.25 * m * m * (3 - m)

    def _missing(self, a: Tensor) -> Tensor:
        """m = 1 - a / r, computed without the difference."""
        r = self._radius(a)
        return (self.df / r) / (r + a)

    def _log_tail(self, a: Tensor) -> Tensor:
        """log F(-a) for a >= 0, even if F(-a) underflows."""
        if self.df == 1:
            return self._tail(a).log()  # it does not underflow for any finite a
        r = self._radius(a)
        shrinkage = r.log() + (0.5 * r + 0.5 * a).log() + LOG_2  # log(df / m); half of r + a does not overflow
        if self.df == 2:
            return -shrinkage
        return 2 * LOG_2 - 2 * shrinkage + torch.log(3 - self._missing(a))

    def _decay(self, a: Tensor) -> Tensor:
        """F'(-a) / F(-a) for a >= 0: about df / a in the tail, where both underflow; 0 at infinity."""
        inverse = self._radius(a).reciprocal()
        if self.df == 1:
            limits = torch.finfo(a.dtype)
            angle = torch.atan2(torch.ones_like(a), a).clamp(min=limits.tiny * limits.eps)  # 0 / 0 at infinity
            return inverse * (inverse / angle)
        m = self._missing(a)
        return (2 - m) * inverse if self.df == 2 else 3 * (2 - m) ** 2 * inverse / (3 - m)

    def _quantile(self, p: Tensor) -> Tensor:
        """The a >= 0 with F(-a) = p, for p up to 1/2."""
        if self.df == 1:
            return 1 / torch.tan(torch.pi * p)
        if self.df == 2:
            return (1 - 2 * p) / (2 * p * (1 - p)).sqrt()
        phi = 2 / 3 * torch.asin(p.sqrt())
        m = 2 * (0.5 * phi).sin() ** 2 + math.sqrt(3) * phi.sin()
        return 2 * (1 - m) / (m * (2 - m)).sqrt()


def _size(z: Tensor) -> Tensor:
    """abs(z), whose derivative at 0 is the one from below, where F is its own short tail."""
    return torch.where(z > 0, z, -z)
