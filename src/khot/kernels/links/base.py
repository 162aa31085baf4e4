"""Link functions: what distinguishes one relaxed top-k mask from another.

A link is an increasing F from the reals onto (0, 1) or [0, 1]. The engine in :mod:`khot.kernels.threshold` finds the
threshold ``t`` with sum F((x - t) / scale) = k, and every relaxed mask is this map with its own link. F and 1 - F are
computed by separate branches, because 1 - F(z) by subtraction has no digits left where an item is almost certain.
"""

import math
from abc import ABC, abstractmethod
from functools import cached_property, lru_cache
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import torch
from torch import Tensor

LOG_2 = math.log(2)
ONE_DEVIATION = tuple(0.5 * math.erfc(-d / math.sqrt(2)) for d in (-1, 0, 1))  # P(normal < d)


class Moments(NamedTuple):
    """Mean and variance of a link as a distribution function."""

    mean: float
    variance: float


STEEP = 5  # factor by which a link multiplies the rounding of z


class Link(ABC):
    r"""An increasing link F of a relaxed top-k mask, :math:`y_i = F((x_i - t)/s), \sum_i y_i = k`.

    A subclass provides four elementwise functions in differentiable torch operations; the engine provides the root, the
    implicit derivatives of every order, batching and masking. The other methods have defaults, which are exact as long
    as ``value`` and ``slope`` do not underflow; slopes that underflow count as equal. A link with exponential tails
    overrides the logarithms to stay exact beyond that.

    Attributes:
        compact: Whether F reaches 0 and 1 at finite ``z``. The threshold is then not unique if ``y`` consists only of
            zeros and ones: any root will do, and the derivatives there are zero.
        reach: A finite ``z`` with ``F(-z) = 0`` and ``F(z) = 1`` to double precision, or almost; the distance of the
            threshold in rows with ``k = 0`` and ``k = n``.
        reaches_zero: False for a link that is compact except for an exponential tail at 0, which may underflow.
        condition: For a compact link, a bound of z F'(z) / F(z) for F(z) < 1: how much F magnifies the rounding of z.
        moments: Mean and variance of F as a distribution function, only for the first guess; None if they do not exist
            or are unknown, in which case the guess uses quantiles.
        link_id: The number by which operators know a class of this library; None for other classes, also for
            subclasses. A link of such a class is determined by its ``q``, and never changes.
        kernel: The name under which fused loops find this link in the files beside that of its class, see
            :mod:`khot.kernels.links.base_triton` and :mod:`khot.kernels.links.base_numba`; None, also for subclasses,
            if it has no such files. Compact links have no loops for logarithms.
        q: The parameter of the link in fused loops, if it has one; for a compact link the same as ``condition``.

    Compiled graphs and exported programs contain only links of the library, as numbers. A mask by another link ends a
    graph of ``torch.compile``, and is computed eagerly.

    Example:
        >>> class Cauchy(Link):
        ...     def value(self, z): return torch.atan2(torch.ones_like(z), -z) / torch.pi
        ...     def complement(self, z): return self.value(-z)
        ...     def slope(self, z): return 1 / (torch.pi * (1 + z * z))
        ...     def inverse(self, p): return torch.tan(torch.pi * (p - 0.5))
    """

    reach: float = 1e30
    compact: bool = False
    reaches_zero: bool = True
    condition: float = 1.0
    moments: Moments | None = None
    kernel: str | None = None
    link_id: int | None = None
    q: float = 1.0

    @property
    def is_steep(self) -> bool:
        """Whether the rounding of a float32 z would be visible in F(z), so that z is computed in float64."""
        return self.compact and self.condition >= STEEP

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        cls.kernel, cls.link_id = cls.__dict__.get("kernel"), cls.__dict__.get("link_id")
        cls.key = Link.key  # type: ignore[method-assign]  # a subclass of a link of the library is another link
        if cls.link_id is not None:
            _CLASSES[cls.link_id] = cls
            cls.key = cls.link_id, cls.q  # type: ignore[method-assign, assignment]

    @property
    def key(self) -> tuple[int, float]:
        """What operators know it by: its number and its parameter, or for a user's own link its address here."""
        _OWN[id(self)] = self
        return id(self), 1.0

    @cached_property
    def numbers(self) -> tuple[float, float, float]:
        """The numbers that fused loops get at run time: q, and centre and squared spread for the first guess."""
        centre, spread = self.start(torch.device("cpu"))
        return float(self.q), float(centre), float(spread)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "numbers"}

    @staticmethod
    def find(number: int, q: float) -> "Link":
        """The link with this key.

        Raises:
            ValueError: If it was the key of a user's own link that no longer exists, or of another process.
        """
        link = _link_of_number(number, q) if number in _CLASSES else _OWN.get(number)
        if link is None:
            raise ValueError("this program contains a link that no longer exists, or a link of another process")
        return link

    def has_kernel(self, log: bool) -> bool:
        """Whether it has pieces for fused loops, of values or of logarithms."""
        return self.kernel is not None and not (log and self.compact)

    def __eq__(self, other: object) -> bool:
        if self is other or self.link_id is None:
            return self is other
        return type(other) is type(self) and other.q == self.q

    def __hash__(self) -> int:
        return object.__hash__(self) if self.link_id is None else hash((self.link_id, self.q))

    @abstractmethod
    def value(self, z: Tensor) -> Tensor:
        """F(z), accurate where it is small."""

    @abstractmethod
    def complement(self, z: Tensor) -> Tensor:
        """1 - F(z), accurate where it is small."""

    @abstractmethod
    def slope(self, z: Tensor) -> Tensor:
        """F'(z), accurate in both tails."""

    @abstractmethod
    def inverse(self, p: Tensor) -> Tensor:
        """The z with F(z) = p for p in (0, 1). A few digits are enough to bracket the root; ReinMax uses them all."""

    def start(self, device: torch.device | None = None) -> tuple[float | Tensor, float | Tensor]:
        """Centre and squared spread of F for the first guess: its moments.

        Without moments, those of the normal distribution with the same median and the same distance between the
        quantiles one standard deviation below and above; they exist for every F.
        """
        if self.moments is not None:
            return self.moments
        quantiles = self.inverse(torch.tensor(ONE_DEVIATION, dtype=torch.float64, device=device))
        below, median, above = quantiles.unbind()
        return median, (0.5 * (above - below)).square()

    def value_and_slope(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """F(z), accurate where it is small, and F'(z) up to rounding of numbers next to 1; not differentiable."""
        return self.value(z), self.slope(z)

    def log_value(self, z: Tensor) -> Tensor:
        """log F(z)."""
        return self.value(z).log()

    def log_complement(self, z: Tensor) -> Tensor:
        """log(1 - F(z))."""
        return self.complement(z).log()

    def log_odds(self, z: Tensor) -> Tensor:
        """log F(z) - log(1 - F(z))."""
        return self.log_value(z) - self.log_complement(z)

    def log_slope(self, z: Tensor) -> Tensor:
        """log F'(z), here that of the smallest normal number if F'(z) is less."""
        return self.slope(z).clamp(min=torch.finfo(z.dtype).tiny).log()

    def log_derivative(self, z: Tensor) -> Tensor:
        """F'(z) / F(z), the derivative of log F."""
        return (self.log_slope(z) - self.log_value(z)).exp()

    def slope_at(self, p: Tensor) -> Tensor:
        """F'(z) where F(z) = p, for p in [0, 1]: 0 at both ends."""
        inside = (p > 0) & (p < 1)
        return self.slope(self.inverse(torch.where(inside, p, 0.5))) * inside

    def log_decay(self, z: Tensor, beyond: Tensor) -> Tensor:
        """log F'(z + beyond) - log F'(z), for z far from 0 and ``beyond`` of the same sign.

        In z + beyond, ``beyond`` may be lost to rounding. A link with exponential tails overrides this and
        :meth:`log_hazard`, so that shares of slopes stay exact in gaps so wide that all slopes underflow.
        """
        return self.log_slope(z + beyond) - self.log_slope(z)

    def log_hazard(self, z: Tensor) -> Tensor:
        """log of the ratio of F' and the short tail, F below 0 and 1 - F above."""
        tail = torch.where(z > 0, self.log_complement(z), self.log_value(z))
        return self.log_slope(z) - tail.clamp(min=math.log(torch.finfo(z.dtype).tiny))


_CLASSES: dict[int, type[Link]] = {}
_OWN: "WeakValueDictionary[int, Link]" = WeakValueDictionary()


@lru_cache(maxsize=256)
def _link_of_number(number: int, q: float) -> Link:
    link = object.__new__(_CLASSES[number])
    if q != link.q:
        link.q, link.key = q, (number, q)  # type: ignore[misc]
    return link


class SymmetricLink(Link):
    """A link with F(-z) = 1 - F(z)."""

    def complement(self, z: Tensor) -> Tensor:
        return self.value(-z)

    def log_complement(self, z: Tensor) -> Tensor:
        return self.log_value(-z)
