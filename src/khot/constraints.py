r"""The k-hot vectors and their convex hull, as constraints of ``torch.distributions``.

``transform_to(capped_simplex(k))`` keeps the number of coordinates and suits parameters (``pyro.param``);
``biject_to(capped_simplex(k))`` drops one and has a Jacobian, which NUTS and the autoguides need:

.. math:: u \in R^{n-1} \mapsto y &= \mathrm{sigmoid\_topk}((u, 0), k), \\
    \log |\det J| &= \sum_{i=1}^{n} \log d_i - \log \sum_{i=1}^{n} d_i, \\ d_i &= y_i (1 - y_i)

where J is the derivative of the first n - 1 coordinates, diag(d) - d dᵀ / Σd without the last row and column. Both are
registered with torch, whose registries Pyro shares. No map of real vectors has ``k_hot`` as its range; for it, both
registries raise a ValueError that names the alternatives. An argument of a wrong type raises TypeError, and a number
out of range ValueError.
"""

import math
from numbers import Real
from typing import Any

import torch
from torch import Size, Tensor
from torch.distributions import biject_to, constraints, transform_to
from torch.distributions.transforms import Transform

from khot._contents import can_look
from khot._shapes import broadcast_shapes
from khot._torch_internals import has_memory
from khot._validation import check_strided, checked_count, checked_integer
from khot.kernels.exact.rows import compute_dtype, number_on
from khot.kernels.selection import rows_outside
from khot.relaxations import sigmoid_topk
from khot.relaxations.log_odds import inside, log_volume, remember_scores, sigmoid_topk_log_odds, smallest_positive

__all__ = ["capped_simplex", "k_hot", "ranking"]


def __dir__() -> list[str]:
    return __all__


class _KHot(constraints.Constraint):
    """Vectors of zeros and ones with ``k`` ones, or with ``k`` to ``upper`` ones; exact, without a tolerance.

    Args:
        k: Number of ones, an int or an integer tensor that broadcasts with the batch shape.
        upper: Largest number of ones, if it differs from ``k``.

    Example:
        >>> k_hot(2).check(torch.tensor([[1.0, 0.0, 1.0], [1.0, 0.0, 0.0], [0.5, 0.5, 1.0]]))
        tensor([ True, False, False])
    """

    is_discrete = True
    event_dim = 1

    def __init__(self, k: int | Tensor, upper: int | Tensor | None = None) -> None:
        self.k = _checked_size("k", k)
        self.upper = self.k if upper is None else _checked_size("upper", upper)
        if not isinstance(self.k, Tensor) and not isinstance(self.upper, Tensor) and self.upper < self.k:
            raise ValueError(f"`upper` must be at least k={self.k}, but got {self.upper}")
        super().__init__()

    def check(self, value: Tensor) -> Tensor:
        _check_vectors("value", value)
        ones = value == 1
        size = ones.sum(-1)  # an integer, so exact in every dtype
        right = (size == self.k) if self.upper is self.k else (size >= self.k) & (size <= self.upper)
        return (ones | (value == 0)).all(-1) & right

    def holds(self, value: Tensor) -> bool:
        """Whether :meth:`check` holds for all values; faster if it does."""
        return _lie_inside(value, self.k, self.upper, True) or bool(self.check(value).all())

    def __repr__(self) -> str:
        return f"k_hot({self.k})" if self.upper is self.k else f"k_hot({self.k}, {self.upper})"


class _CappedSimplex(constraints.Constraint):
    """Vectors in [0, 1]ⁿ that sum to ``k``, up to the rounding of their dtype.

    :class:`~khot.RelaxedKHot` is a proper prior with this support, for a latent site in Pyro. An ImproperUniform has no
    samples, and most of Pyro's tools start from one.

    Args:
        k: Real sum, a number or a tensor that broadcasts with the batch shape.

    Example:
        >>> y = transform_to(capped_simplex(2))(torch.tensor([0.0, 1.0, 3.0]))
        >>> capped_simplex(2).check(y)
        tensor(True)
    """

    is_discrete = False
    event_dim = 1
    relative_tolerance = 16.0  # in units of eps: rounding of n entries that sum to k, and a rescaling in the same dtype
    smallest_tolerance = 1e-6  # as for torch's simplex; the error of a mask of temperature T is up to eps |x| / T
    largest_tolerance = 0.25  # distinguishes an integer k from the next one, as long as `rounding_of_sum` allows it

    def __init__(self, k: float | Tensor) -> None:
        if isinstance(k, Tensor):
            check_strided("k", k)
            if k.is_complex() or k.dtype == torch.bool:
                raise TypeError(f"`k` must be real, but got a tensor of dtype {k.dtype}")
            k = k if k.is_floating_point() else k.long()  # not all integer types can be compared and subtracted
        elif isinstance(k, bool) or not isinstance(k, (Real, torch.SymInt, torch.SymFloat)):
            raise TypeError(f"`k` must be a real number or a torch.Tensor, but got {k!r}")
        elif not 0 <= k < math.inf:
            raise ValueError(f"`k` must satisfy 0 <= k <= n, but got k={k}")
        self.k: float | Tensor = k
        super().__init__()

    def check(self, value: Tensor) -> Tensor:
        _check_vectors("value", value)
        value = _in_digits(value)
        inside = (value.clamp(0, 1) == value).all(-1)  # False for NaN
        return inside & self.is_sum(value.sum(-1, dtype=torch.float64), value.dtype, value.shape[-1])

    def is_sum(self, total: Tensor, dtype: torch.dtype, n: int) -> Tensor:
        """Whether float64 sums of vectors of n entries of this dtype satisfy the constraint."""
        k = self.k.to(total.device, torch.float64) if isinstance(self.k, Tensor) else self.k
        return (total - k).abs() <= self._tolerance(k, dtype, n)

    def holds(self, value: Tensor) -> bool:
        """Whether :meth:`check` holds for all values; faster if it does."""
        if not isinstance(self.k, Tensor) and value.is_floating_point():
            tolerance = self._tolerance(self.k, value.dtype, value.shape[-1])
            if _lie_inside(value, self.k - tolerance, self.k + tolerance, False):
                return True
        return bool(self.check(value).all())

    def _tolerance(self, k: Any, dtype: torch.dtype, n: int) -> Any:
        """How far a sum of n entries may be from k, a number or a float64 tensor."""
        unit = self.relative_tolerance * torch.finfo(dtype).eps
        if isinstance(k, Tensor):
            tolerance = (unit * k.clamp(min=1)).clamp(self.smallest_tolerance, self.largest_tolerance)
            return tolerance.maximum(self.rounding_of_sum(k, dtype, n))
        tolerance = min(max(unit * max(k, 1), self.smallest_tolerance), self.largest_tolerance)
        return max(tolerance, self.rounding_of_sum(k, dtype, n))

    @classmethod
    def rounding_of_sum(cls, k: Any, dtype: torch.dtype, n: int) -> Any:
        """The largest distance from k, a number or a tensor, that rounding can cause in the sum of n entries.

        In a half type, whose entries are roundings of wider numbers, that is the rounding of each entry; equal entries
        all round in the same direction, so for k in the hundreds this exceeds 1. In float32 and float64 the computation
        of the entries adds to it, such as a rescaling; this exceeds 1 in float32 for k above half a million.
        """
        units = 0.5 if dtype.itemsize < torch.float32.itemsize else cls.relative_tolerance
        return units * torch.finfo(dtype).eps * k + n * smallest_positive(dtype)

    def __repr__(self) -> str:
        return f"capped_simplex({self.k})"


def _in_digits(value: Tensor) -> Tensor:
    """A value in a floating-point dtype; integers and booleans in float64, which represents them exactly."""
    return value if value.is_floating_point() else value.double()


class _Ranking(constraints.Constraint):
    """Vectors of ``k`` different indices below ``n``, of an integer dtype.

    If rows differ in ``k``, vectors are as wide as the largest ``k``; entries beyond the ``k`` of a row are -1.

    Args:
        n: Number of units to choose from.
        k: Number of indices, an int or an integer tensor that broadcasts with the batch shape.

    Example:
        >>> ranking(5, 3).check(torch.tensor([[4, 0, 2], [4, 0, 4], [4, 0, 5]]))
        tensor([ True, False, False])
    """

    is_discrete = True
    event_dim = 1

    def __init__(self, n: int, k: int | Tensor) -> None:
        self.n, self.k = checked_count("n", n), _checked_size("k", k)
        if not isinstance(self.k, Tensor) and not self.k <= self.n:
            raise ValueError(f"`k` must satisfy 0 <= k <= n, but got k={self.k} with n={self.n}")
        super().__init__()

    def check(self, value: Tensor) -> Tensor:
        _check_vectors("value", value)
        shape, width = value.shape[:-1], value.shape[-1]
        if value.is_floating_point() or value.is_complex() or value.dtype == torch.bool:
            return torch.zeros(shape, dtype=torch.bool, device=value.device)
        value = value.long()  # not all integer types can be compared
        k = number_on(value.device, self.k).unsqueeze(-1)
        place = torch.arange(width, device=value.device)
        is_choice = place < k
        fits = torch.where(is_choice, (value >= 0) & (value < self.n), value == -1).all(-1) & (k <= width).squeeze(-1)
        unit = torch.where(is_choice, value.clamp(0, self.n - 1), self.n + place)
        ordered = unit.sort(-1).values
        return fits & (ordered[..., 1:] > ordered[..., :-1]).all(-1)

    def holds(self, value: Tensor) -> bool:
        """Whether :meth:`check` holds for all values; does not sort."""
        if value.numel() == 0 or value.dtype != torch.long or isinstance(self.k, Tensor) or value.shape[-1] != self.k:
            return bool(self.check(value).all())
        lowest, highest = value.aminmax()
        if not (lowest.item() >= 0 and highest.item() < self.n):
            return False
        short = torch.short if self.k <= torch.iinfo(torch.short).max else torch.long  # fewer bytes to read and write
        place = torch.arange(self.k, dtype=short, device=value.device).expand(value.shape)
        # Write its place to each index; if two are equal, one of them finds the place of the other.
        given = place.new_empty(*value.shape[:-1], self.n).scatter_(-1, value, place)
        return torch.equal(given.gather(-1, value), place)

    def __repr__(self) -> str:
        return f"ranking({self.n}, {self.k})"


def _checked_size(name: str, size: Any) -> int | Tensor:
    number = checked_integer(name, size)
    if not isinstance(number, Tensor) and number < 0:
        raise ValueError(f"`{name}` must satisfy 0 <= {name} <= n, but got {number}")
    return number


def _lie_inside(value: Tensor, low: Any, high: Any, is_binary: bool) -> bool:
    """Whether a loop shows that all vectors lie in [0, 1]ⁿ, or in {0, 1}ⁿ, and that their sums are in this range."""
    if isinstance(low, Tensor) or isinstance(high, Tensor) or not has_memory(value):
        return False
    count_outside = rows_outside.find(value)
    if count_outside is None:
        return False
    value = value if value.dtype in (torch.float32, torch.float64) else value.double()
    return bool(count_outside(value, low, high, is_binary) == 0)


def _check_vectors(name: str, value: Tensor) -> None:
    check_strided(name, value)
    if value.dim() == 0:
        raise ValueError(f"`{name}` must consist of vectors, but got a scalar")


k_hot = _KHot
capped_simplex = _CappedSimplex
ranking = _Ranking


class _CappedSimplexTransform(Transform):
    """The shared part of the two maps onto the capped simplex, which apply ``sigmoid_topk`` to scores."""

    domain = constraints.real_vector
    added = 0  # scores at the end that are held at 0

    def __init__(self, k: float | Tensor, cache_size: int = 0) -> None:
        self.k = k
        super().__init__(cache_size=cache_size)

    @constraints.dependent_property(is_discrete=False, event_dim=1)
    def codomain(self) -> constraints.Constraint:
        return capped_simplex(self.k)

    def with_cache(self, cache_size: int = 1) -> Transform:
        return self if self._cache_size == cache_size else type(self)(self.k, cache_size=cache_size)

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return False
        return torch.equal(torch.as_tensor(self.k, dtype=torch.float64), torch.as_tensor(other.k, dtype=torch.float64))

    def _check_vector(self, name: str, value: Tensor, added: int) -> None:
        """Checks that the interior is not empty, as for k = 0 and n; reads tensors only on a CPU, where it is free."""
        _check_vectors(name, value)
        k, n = self.k, value.shape[-1] + added
        if isinstance(k, Tensor):
            fits = k.device.type != "cpu" or not can_look(k) or bool(((k > 0) & (k < n)).all())
        else:
            fits = 0 < k < n
        if not fits:
            raise ValueError(f"the interior of capped_simplex(k) needs 0 < k < n, but got k={k} with n={n}")

    def _scores(self, u: Tensor) -> Tensor:
        self._check_vector("u" if self.added else "x", u, self.added)
        return (torch.nn.functional.pad(u, (0, self.added)) if self.added else u).expand(self.forward_shape(u.shape))

    def _logit(self, y: Tensor) -> Tensor:
        self._check_vector("y", y, 0)
        if can_look(y):
            if not ((y > 0) & (y < 1)).all():
                raise ValueError(
                    f"an initial value under capped_simplex({self.k}) must lie in its interior, 0 < y < 1, "
                    f"but got values from {y.min().item():.6g} to {y.max().item():.6g}"
                )
            if not capped_simplex(self.k).check(y).all():
                message = f"a value under capped_simplex({self.k}) must sum to k={self.k}, but got sums {y.sum(-1)}"
                raise ValueError(message)
        return y.to(compute_dtype(y)).logit()

    def forward_shape(self, shape: Size) -> Size:
        return _batch_shape(shape, self.k) + Size([_length(shape) + self.added])

    def inverse_shape(self, shape: Size) -> Size:
        return _batch_shape(shape, self.k) + Size([_length(shape) - self.added])


class _SigmoidTopKTransform(_CappedSimplexTransform):
    """Maps Rⁿ onto the interior of the capped simplex by ``sigmoid_topk``; constant along 1; right inverse: logit."""

    def _call(self, x: Tensor) -> Tensor:
        return sigmoid_topk(self._scores(x), self.k)

    def _inverse(self, y: Tensor) -> Tensor:
        return self._logit(y).to(y.dtype)


class _CappedSimplexBijection(_CappedSimplexTransform):
    """The bijection of Rⁿ⁻¹ and the interior of the capped simplex: ``sigmoid_topk`` with the last score held at 0.

    Values are rounded to stay in the interior, and their scores are remembered for the densities that need them.
    """

    bijective = True
    added = 1

    def _call(self, u: Tensor) -> Tensor:
        scores = self._scores(u)
        y = inside(sigmoid_topk(scores, self.k))
        remember_scores(y, scores, self.k)
        return y

    def _inverse(self, y: Tensor) -> Tensor:
        logit = self._logit(y)
        return (logit[..., :-1] - logit[..., -1:]).to(y.dtype)

    def log_abs_det_jacobian(self, u: Tensor, y: Tensor) -> Tensor:
        scores = self._scores(u.to(compute_dtype(u)))
        return log_volume(sigmoid_topk_log_odds(scores, self.k)).to(u.dtype)  # y may have rounded to 0 or 1


def _length(shape: Size) -> int:
    """The number of entries of the vectors in a tensor of this shape."""
    if not shape:
        raise ValueError("the shape of vectors must have at least one dimension, but got that of a scalar")
    return shape[-1]


def _batch_shape(shape: Size, k: float | Tensor) -> Size:
    return broadcast_shapes(shape[:-1], k.shape) if isinstance(k, Tensor) else Size(shape[:-1])


@transform_to.register(_CappedSimplex)
def _transform_to_capped_simplex(constraint: _CappedSimplex) -> _SigmoidTopKTransform:
    return _SigmoidTopKTransform(constraint.k)


@biject_to.register(_CappedSimplex)
def _biject_to_capped_simplex(constraint: _CappedSimplex) -> _CappedSimplexBijection:
    return _CappedSimplexBijection(constraint.k)


@transform_to.register(_KHot)
@biject_to.register(_KHot)
def _no_transform_to_k_hot(constraint: _KHot) -> Transform:
    # Not a NotImplementedError, which Pyro would replace by general advice on discrete sites.
    raise ValueError(
        f"no transform maps real vectors to {constraint}, so NUTS, HMC and continuous autoguides cannot take this site "
        "as it is. (1) khot.infer.KHotSwap samples it. (2) khot.infer.KHotReparam(temperature=0.5) relaxes it; start "
        "from a sample then, NUTS(..., init_strategy=init_to_sample) or AutoNormal(..., init_loc_fn=init_to_sample), "
        "from pyro.infer.autoguide. (3) TraceEnum_ELBO enumerates it, as a design or as "
        "khot.infer.subset_categorical(design); hide it from an autoguide with pyro.poutine.block(model, hide=[...])"
    )
