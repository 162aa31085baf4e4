"""Link functions: what distinguishes one relaxed top-k mask from another.

A link is an increasing F from the reals onto (0, 1) or [0, 1]. The engine in :mod:`khot.kernels.capped_simplex` finds
the threshold ``t`` with sum F((x - t) / scale) = k, and every relaxed mask is that one map with its own link. F and
1 - F come from separate branches, because 1 - F(z) computed by subtraction has no digits left where an item is almost
certainly chosen.
"""

from abc import ABC, abstractmethod
from itertools import count
from typing import NamedTuple
from weakref import WeakValueDictionary

import torch
from torch import Tensor

_links: "WeakValueDictionary[str, Link]" = WeakValueDictionary()
_counter = count()


class TailSums(NamedTuple):
    """Row sums of the short tails ``u_i = F(z_i)`` where ``z_i <= 0`` and ``1 - F(z_i)`` where ``z_i > 0``.

    Attributes:
        above: Number of entries with ``z_i > 0``.
        signed: Sum of ``u_i`` over ``z_i <= 0`` minus the sum over ``z_i > 0``.
        total: Sum of all ``u_i``.
        slope: Sum of ``F'(z_i)``.
    """

    above: Tensor
    signed: Tensor
    total: Tensor
    slope: Tensor


class Link(ABC):
    r"""An increasing link F of a relaxed top-k mask, :math:`y_i = F((x_i - t)/s), \sum_i y_i = k`.

    A subclass gives four elementwise functions in differentiable torch operations; the engine supplies the root, the
    implicit derivatives of every order, batching and masking. The other methods have defaults, exact as long as
    ``value`` and ``slope`` do not underflow; a link with exponential tails overrides the logarithms and
    ``normalised_slope`` to stay exact beyond.

    Attributes:
        compact: Whether F reaches 0 and 1 at finite ``z``.
        reach: A finite ``z`` with ``F(-z) = 0`` and ``F(z) = 1`` to double precision, or nearly so: where the rows with
            ``k = 0`` and ``k = n`` are put.

    Example:
        >>> class Cauchy(Link):
        ...     def value(self, z): return torch.atan2(torch.ones_like(z), -z) / torch.pi
        ...     def complement(self, z): return self.value(-z)
        ...     def slope(self, z): return 1 / (torch.pi * (1 + z * z))
        ...     def inverse(self, p): return torch.tan(torch.pi * (p - 0.5))
    """

    reach: float = 1e30
    compact: bool = False
    key: str

    def __new__(cls, *args: object, **kwargs: object) -> "Link":
        # A compiled graph cannot hold a Python object: it names the link by this key and finds it again when it runs.
        self = super().__new__(cls)
        self.key = f"{cls.__module__}.{cls.__qualname__}.{next(_counter)}"
        _links[self.key] = self
        return self

    @staticmethod
    def find(key: str) -> "Link":
        """The living link with this key."""
        return _links[key]

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
        """The z with F(z) = p for p in (0, 1); it only brackets the root, so a few digits are enough."""

    def log_value(self, z: Tensor) -> Tensor:
        """log F(z)."""
        return self.value(z).log()

    def log_complement(self, z: Tensor) -> Tensor:
        """log(1 - F(z))."""
        return self.complement(z).log()

    def log_slope(self, z: Tensor) -> Tensor:
        """log F'(z)."""
        return self.slope(z).log()

    def slope_(self, z: Tensor) -> Tensor:
        """:meth:`slope` for a first derivative: may overwrite ``z`` and need not be differentiable."""
        return self.slope(z)

    def normalised_slope(self, z: Tensor) -> Tensor:
        """F'(z) divided by its sum over the last axis; zero where all of them are zero."""
        slope = self.slope(z)
        return slope / slope.sum(-1, keepdim=True).clamp(min=torch.finfo(z.dtype).tiny)

    def tail_sums(self, z: Tensor) -> TailSums:
        """Sums over the last axis that the root finder needs; may overwrite ``z``."""
        above = z > 0
        signed = torch.where(above, -self.complement(z), self.value(z))
        return TailSums(above.sum(-1), signed.sum(-1), signed.abs().sum(-1), self.slope(z).sum(-1))

    def scaled_tail_sums(self, z: Tensor) -> TailSums:
        """:meth:`tail_sums` with ``u`` and ``F'`` divided by the row's largest ``u``, so that not all underflow."""
        above = z > 0
        log_tail = torch.where(above, self.log_complement(z), self.log_value(z))
        shift = log_tail.amax(-1, keepdim=True)
        tail = (log_tail - shift).exp()
        signed = torch.where(above, -tail, tail)
        return TailSums(above.sum(-1), signed.sum(-1), tail.sum(-1), (self.log_slope(z) - shift).exp().sum(-1))


class Logistic(Link):
    """F(z) = 1 / (1 + exp(-z)): the link of sigmoid top-k and of unsorted SOFT top-k."""

    reach = 800.0  # exp(-800) is 0 in double precision

    def value(self, z: Tensor) -> Tensor:
        return torch.sigmoid(z)

    def complement(self, z: Tensor) -> Tensor:
        return torch.sigmoid(-z)

    def slope(self, z: Tensor) -> Tensor:
        return torch.sigmoid(z) * torch.sigmoid(-z)

    def inverse(self, p: Tensor) -> Tensor:
        return torch.logit(p)

    def log_value(self, z: Tensor) -> Tensor:
        return torch.nn.functional.logsigmoid(z)

    def log_complement(self, z: Tensor) -> Tensor:
        return torch.nn.functional.logsigmoid(-z)

    def log_slope(self, z: Tensor) -> Tensor:
        return self.log_value(z) + self.log_value(-z)

    def normalised_slope(self, z: Tensor) -> Tensor:
        return torch.softmax(self.log_slope(z), -1)

    def slope_(self, z: Tensor) -> Tensor:
        tail = z.abs_().neg_().sigmoid_()
        return tail.sub_(tail * tail)

    def tail_sums(self, z: Tensor) -> TailSums:
        # u = sigmoid(-|z|) and F' = u - u^2, hence one transcendental function and two buffers for all four sums.
        above = torch.gt(z, 0, out=torch.empty_like(z))
        count = above.sum(-1)
        tail = z.abs_().neg_().sigmoid_()
        total = tail.sum(-1)
        slope = total - torch.linalg.vector_norm(tail, dim=-1).square_()
        return TailSums(count, total - 2 * tail.mul_(above).sum(-1), total, slope)


LOGISTIC = Logistic()
