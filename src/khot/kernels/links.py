"""Link functions: what distinguishes one relaxed top-k mask from another.

A link is an increasing F from the reals onto (0, 1) or [0, 1]. The engine in :mod:`khot.kernels.capped_simplex` finds
the threshold ``t`` with sum F((x - t) / scale) = k, and every relaxed mask is that one map with its own link. F and
1 - F come from separate branches, because 1 - F(z) computed by subtraction has no digits left where an item is almost
certainly chosen.
"""

import math
from abc import ABC, abstractmethod
from typing import NamedTuple

import torch
from torch import Tensor

from .link_names import find_link, name_of, register, remember

LOG_2 = math.log(2)
SQRT_HALF = math.sqrt(0.5)
INV_SQRT_2PI = 1 / math.sqrt(2 * math.pi)


def _exp_(z: Tensor) -> Tensor:
    """exp(z) in place. On a CPU exp2 is three times faster than exp; the product rounds no worse than z itself did."""
    return z.mul_(1 / LOG_2).exp2_()


class TailSums(NamedTuple):
    """Row sums of the tails ``u_i = F(z_i)`` below and ``1 - F(z_i)`` above a cut, so that sum F = signed + above.

    Attributes:
        above: Number of entries above the cut, ``z_i > 0`` unless the link cuts elsewhere.
        signed: Sum of ``u_i`` below the cut minus the sum above.
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
        compact: Whether F reaches 0 and 1 at finite ``z``. Then the threshold is not unique where ``y`` consists of
            zeros and ones alone: any root is as good, and the derivatives there are zero.
        reach: A finite ``z`` with ``F(-z) = 0`` and ``F(z) = 1`` to double precision, or nearly so: where the rows with
            ``k = 0`` and ``k = n`` are put.
        reaches_zero: False for a link that is compact but for an exponential tail at 0, which may underflow.
        condition: Of a compact link, a bound of z F'(z) / F(z) for F(z) < 1: how much of the rounding of z shows in F.
        moments: Mean and variance of F as a distribution function, if it has them; for the first guess only.
        kernel: Its name in :mod:`khot.kernels.links_triton`; None, also for subclasses, if it is not there.
        q: The parameter of the kernel, if it has one.

    Links of one class are equal, and the same to compiled graphs, if their attributes are. To be part of an exported
    program (``torch.export``) a link needs a name of its own, by which the process that loads the program finds the
    class: ``class Cauchy(Link, name="mypackage.cauchy")``, in a module that is imported there, too; its attributes
    must be plain numbers, strings, None or tuples of them. A subclass does not inherit the name.

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
    moments: tuple[float, float] = (0.0, math.pi**2 / 3)  # of the logistic distribution
    kernel: str | None = None
    q: float = 1.0
    class_name: str
    exportable: bool
    has_slots: bool = False

    def __init_subclass__(cls, name: str | None = None, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        cls.kernel = cls.__dict__.get("kernel")
        cls.has_slots = cls.has_slots or bool(cls.__dict__.get("__slots__"))
        register(cls, name)

    def __new__(cls, *args: object, **kwargs: object) -> "Link":
        self = super().__new__(cls)
        if not torch.compiler.is_compiling():
            remember(self)
        return self

    @property
    def key(self) -> str:
        """The name by which a graph refers to it, see :mod:`khot.kernels.link_names`."""
        return name_of(self)

    @staticmethod
    def find(key: str) -> "Link":
        """The link with this key, or one that equals it."""
        return find_link(key)

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Link) and self.key == other.key)

    def __hash__(self) -> int:
        return hash(self.key)

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
        """The z with F(z) = p for p in (0, 1); to bracket the root a few digits are enough, ReinMax uses them all."""

    def log_value(self, z: Tensor) -> Tensor:
        """log F(z)."""
        return self.value(z).log()

    def log_complement(self, z: Tensor) -> Tensor:
        """log(1 - F(z))."""
        return self.complement(z).log()

    def log_slope(self, z: Tensor) -> Tensor:
        """log F'(z)."""
        return self.slope(z).log()

    def log_slope_(self, z: Tensor) -> Tensor:
        """:meth:`log_slope` in a buffer of its own: may overwrite ``z`` and need not be differentiable."""
        return self.log_slope(z).clone()

    def log_derivative(self, z: Tensor) -> Tensor:
        """F'(z) / F(z), the derivative of log F."""
        return (self.log_slope(z) - self.log_value(z)).exp()

    def slope_(self, z: Tensor) -> Tensor:
        """:meth:`slope` for a first derivative: may overwrite ``z`` and need not be differentiable."""
        return self.slope(z)

    def slope_at(self, p: Tensor) -> Tensor:
        """F'(z) where F(z) = p, for p in [0, 1]: 0 at both ends."""
        inside = (p > 0) & (p < 1)
        return self.slope(self.inverse(torch.where(inside, p, 0.5))) * inside

    def normalised_slope(self, z: Tensor) -> Tensor:
        """F'(z) divided by its sum over the last axis; zero where all of them are zero."""
        slope = self.slope(z)
        return slope / slope.sum(-1, keepdim=True).clamp(min=torch.finfo(z.dtype).tiny)

    def normalised_slope_(self, z: Tensor) -> Tensor:
        """:meth:`normalised_slope` for a first derivative: may overwrite ``z`` and need not be differentiable."""
        return self.normalised_slope(z)

    def tail_sums(self, z: Tensor) -> TailSums:
        """Sums over the last axis that the root finder needs; may overwrite ``z``."""
        above = z > 0
        signed = torch.where(above, -self.complement(z), self.value(z))
        return TailSums(above.sum(-1), signed.sum(-1), signed.abs().sum(-1), self.slope(z).sum(-1))

    def newton_step(self, sums: TailSums, excess: Tensor) -> Tensor:
        """The step of t, in scales, that the root finder takes at ``excess = above - k``; not finite where it has none.

        Newton's method on log(A / B), for which see :mod:`khot.kernels.capped_simplex`. All tensors are float64.
        """
        size = sums.total + excess.abs()
        ratio = (sums.signed + excess) / size
        return torch.atanh(ratio) * (1 - ratio * ratio) / (1 - ratio * sums.signed / sums.total) * size / sums.slope

    def log_tail(self, z: Tensor) -> Tensor:
        """log u: of F below 0 and of 1 - F above; not differentiable."""
        return torch.where(z > 0, self.log_complement(z), self.log_value(z))

    def scaled_tail_sums(self, z: Tensor) -> TailSums:
        """:meth:`tail_sums` with ``u`` and ``F'`` divided by the row's largest ``u``, so that not all underflow.

        May overwrite ``z``, too.
        """
        above, tail = z > 0, self.log_tail(z)
        shift = tail.amax(-1, keepdim=True)
        slope = self.log_slope_(z).sub_(shift).exp_().sum(-1)
        total = tail.sub_(shift).exp_().sum(-1)
        return TailSums(above.sum(-1), total - 2 * tail.mul_(above).sum(-1), total, slope)


class Logistic(Link, name="logistic"):
    """F(z) = 1 / (1 + exp(-z)): the link of sigmoid top-k and of unsorted SOFT top-k."""

    reach = 800.0  # exp(-800) is 0 in double precision
    kernel = "logistic"

    def value(self, z: Tensor) -> Tensor:
        return torch.sigmoid(z)

    def complement(self, z: Tensor) -> Tensor:
        return torch.sigmoid(-z)

    def slope(self, z: Tensor) -> Tensor:
        return torch.sigmoid(z) * torch.sigmoid(-z)

    def inverse(self, p: Tensor) -> Tensor:
        return torch.logit(p)

    def slope_at(self, p: Tensor) -> Tensor:
        return p * (1 - p)

    def log_value(self, z: Tensor) -> Tensor:
        return torch.nn.functional.logsigmoid(z)

    def log_complement(self, z: Tensor) -> Tensor:
        return torch.nn.functional.logsigmoid(-z)

    def log_slope(self, z: Tensor) -> Tensor:
        return self.log_value(z) + self.log_value(-z)

    def log_derivative(self, z: Tensor) -> Tensor:
        return torch.sigmoid(-z)

    def log_tail(self, z: Tensor) -> Tensor:
        return torch.nn.functional.logsigmoid(z.abs().neg_())

    def normalised_slope(self, z: Tensor) -> Tensor:
        return torch.softmax(self.log_slope(z), -1)

    def log_slope_(self, z: Tensor) -> Tensor:
        log_tail = z.abs_().neg_()
        return log_tail.sub_(log_tail.exp().log1p_().mul_(2))

    def normalised_slope_(self, z: Tensor) -> Tensor:
        return torch.softmax(self.log_slope_(z), -1)

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


class Laplace(Link, name="laplace"):
    """F(z) = exp(z) / 2 for z <= 0 and 1 - exp(-z) / 2 above: the link of LapSum."""

    reach = 800.0
    moments = (0.0, 2.0)
    kernel = "laplace"

    def value(self, z: Tensor) -> Tensor:
        tail = z.abs().mul_(-1 / LOG_2).sub_(1).exp2_()
        return z.detach().sign().relu_().sub_(tail).abs_()  # |[z > 0] - tail|: on a CPU `where` costs far more

    def complement(self, z: Tensor) -> Tensor:
        return self.value(-z)

    def slope(self, z: Tensor) -> Tensor:
        return 0.5 * torch.exp(-z.abs())

    def inverse(self, p: Tensor) -> Tensor:
        return torch.where(p <= 0.5, (2 * p).log(), -(2 - 2 * p).log())

    def slope_at(self, p: Tensor) -> Tensor:
        return torch.minimum(p, 1 - p)

    def log_value(self, z: Tensor) -> Tensor:
        return torch.where(z <= 0, z.clamp(max=0) - LOG_2, torch.log1p(-0.5 * torch.exp(-z.clamp(min=0))))

    def log_complement(self, z: Tensor) -> Tensor:
        return self.log_value(-z)

    def log_slope(self, z: Tensor) -> Tensor:
        return -z.abs() - LOG_2

    def log_derivative(self, z: Tensor) -> Tensor:
        tail = (-z.clamp(min=0)).exp()
        return tail / (2 - tail)

    def log_tail(self, z: Tensor) -> Tensor:
        return z.abs().neg_().sub_(LOG_2)

    def normalised_slope(self, z: Tensor) -> Tensor:
        return torch.softmax(-z.abs(), -1)

    def log_slope_(self, z: Tensor) -> Tensor:
        return z.abs_().neg_().sub_(LOG_2)

    def normalised_slope_(self, z: Tensor) -> Tensor:
        return torch.softmax(self.log_slope_(z), -1)

    def slope_(self, z: Tensor) -> Tensor:
        return _exp_(z.abs_().neg_()).mul_(0.5)

    def tail_sums(self, z: Tensor) -> TailSums:
        # u = F' = exp(-|z|) / 2.
        above = torch.gt(z, 0, out=torch.empty_like(z))
        count = above.sum(-1)
        tail = _exp_(z.abs_().neg_())
        total = 0.5 * tail.sum(-1)
        return TailSums(count, total - tail.mul_(above).sum(-1), total, total)


class Normal(Link, name="normal"):
    """F(z) = erfc(-z / sqrt 2) / 2, the standard normal distribution function."""

    reach = 40.0  # erfc(40 / sqrt 2) is 0 in double precision
    moments = (0.0, 1.0)
    kernel = "normal"

    def value(self, z: Tensor) -> Tensor:
        return (z * -SQRT_HALF).erfc_().mul_(0.5)

    def complement(self, z: Tensor) -> Tensor:
        return self.value(-z)

    def slope(self, z: Tensor) -> Tensor:
        return INV_SQRT_2PI * torch.exp(-0.5 * z * z)

    def inverse(self, p: Tensor) -> Tensor:
        return torch.special.ndtri(p)

    def log_value(self, z: Tensor) -> Tensor:
        return torch.special.log_ndtr(z)

    def log_complement(self, z: Tensor) -> Tensor:
        return self.log_value(-z)

    def log_slope(self, z: Tensor) -> Tensor:
        return -0.5 * z * z + math.log(INV_SQRT_2PI)

    def log_tail(self, z: Tensor) -> Tensor:
        return torch.special.log_ndtr(z.abs().neg_())

    def normalised_slope(self, z: Tensor) -> Tensor:
        # Relative to the largest, where |z| = m: exp((m^2 - z^2) / 2), factored so that no square overflows first.
        distance = z.abs()
        nearest = distance.detach().amin(-1, keepdim=True)
        weight = torch.exp(-0.5 * (distance - nearest) * (distance + nearest))
        return weight / weight.sum(-1, keepdim=True)

    def slope_(self, z: Tensor) -> Tensor:
        return _exp_(z.mul_(z).mul_(-0.5)).mul_(INV_SQRT_2PI)

    def tail_sums(self, z: Tensor) -> TailSums:
        above = torch.gt(z, 0, out=torch.empty_like(z))
        count = above.sum(-1)
        tail = torch.erfc(z.abs_().mul_(SQRT_HALF))
        slope = _exp_(z.mul_(z).neg_()).sum(-1)
        total = 0.5 * tail.sum(-1)
        return TailSums(count, total - tail.mul_(above).sum(-1), total, INV_SQRT_2PI * slope)


LOGISTIC = Logistic()
LAPLACE = Laplace()
NORMAL = Normal()
