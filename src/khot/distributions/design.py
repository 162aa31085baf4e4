"""The base of all sampling designs: laws on the k-hot vectors in {0, 1}ⁿ, with exactly k ones in every draw.

This module contains what they have in common: the two parametrisations, their checks, shapes, ``expand``, enumeration,
and the moments that follow from first- and second-order inclusion probabilities. A design adds its law.
"""

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import torch
from torch import Size, Tensor
from torch.distributions import constraints
from torch.types import _size as SizeLike
from typing_extensions import Self

from khot._contents import can_look, looks_at_contents
from khot._validation import check_flag, check_function, check_positive_contents, checked_positive
from khot.constraints import capped_simplex, k_hot
from khot.kernels.exact.small_numbers import log_odds
from khot.laws.subsets import k_hot_vectors, k_hot_vectors_of_rank
from khot.relaxations import sigmoid_topk
from khot.relaxations.hard import indices_of_largest
from khot.relaxations.mask_log_odds import mask_log_odds

from ._arguments import Vector, check_sizes, checked_param, in_rows, with_size
from .base import KHotDistribution, is_half, lazy
from .entry import entry
from .sizes import shared_ends, shared_k, sizes_of

MAX_SUPPORT = 1_000_000  # the most subsets that enumerate_support lists; a longer list would not fit into memory
LISTED = 2**20  # units of the k-hot vectors that a sum over all of them lists at a time: 8 MB

TOO_MANY_ADVICE = "for a site that is too large to enumerate, khot.infer.KHotSwap samples the posterior"
DIFFERENT_SIZES_ADVICE = (
    "khot.infer.subset_categorical(design) enumerates rows of different sizes by the numbers of their vectors"
)
SURE = 0.5  # a sum whose rounding is smaller fits only the nearest integer

POSTERIOR_ADVICE = (
    "(For Pyro's compute_marginals and sample_posterior, sample i ~ khot.infer.subset_categorical(design), and use "
    "khot.infer.subset_vector(i, n, k).)"
)

Relaxation = Callable[[Tensor, Any, Any], Tensor]

k_hot_of_int = functools.lru_cache(k_hot)  # constraints that all designs of this size share


class SamplingDesign(KHotDistribution, is_base=True):
    r"""A distribution over the k-hot vectors of length n: the base class of all designs.

    The parameter is either ``probs``, the inclusion probabilities :math:`\pi_i = P(x_i = 1)`, whose sum is k, or
    ``logits``, real scores from which ``probs = relaxation(logits, k, temperature)`` are computed at first use. All
    results are differentiable in the parameter. Exact 0 and 1 in ``probs`` are legal: such units are never or always
    drawn.

    ``log_prob`` is ``-inf``, with zero gradient, outside the support; with validation on, values there are errors.

    In Pyro, ``infer={"enumerate": "parallel"}`` enumerates a site. This does not work for a site made of several
    latents by ``to_event(1)``, which ``config_enumerate`` skips silently: declare the rows independent by a plate
    instead. For code that needs a Categorical, such as infer_discrete, use :func:`~khot.subset_categorical`. For
    missing rows of data, use ``pyro.sample(..., obs=x, obs_mask=seen)`` with ``seen`` of the batch shape.

    A subclass defines ``_sample(shape, generator)``, which draws ``(*shape, *batch_shape, n)``, and, if it has them,
    ``_log_prob(value)`` for k-hot values, ``_entropy()``, ``_pairwise_inclusion()`` and ``_mode()``. They compute in
    ``_probs`` or ``_logits``, the parameters in at least float32, without checks and in any dtype. If it has only
    ``_log_prob``, this class computes the last three exactly as sums over all C(n, k) vectors, provided that there are
    at most ``MAX_SUPPORT`` (1,000,000); this takes one evaluation of ``_log_prob`` per vector. Members that a design
    lacks raise NotImplementedError and name the designs that have them. A subclass whose logits are natural parameters
    overrides the lazy properties ``_probs`` and ``_logits``, each computed from the other, and sets ``_relaxes`` to
    False; one that does not draw with the probabilities ``_probs`` overrides ``_mean``. ``expand`` and copies work
    without further code if every tensor among the attributes starts with ``batch_shape``.

    Tensors are plain: for a ``torch.distributed.tensor.DTensor`` the guide "at scale" has a recipe.

    With a parameter in bfloat16 or float16 every result is the rounded result of float32, and draws are the same. A sum
    of rounded probabilities may not determine the size, in these types for k in the hundreds and in float32 for k of
    hundreds of thousands: ``probs`` then need ``k``, and are treated as roundings of probabilities that sum to k.

    A design is immutable, as every distribution of torch is: it reads its parameters when it is made, and computes at
    most once what its members share, such as ``probs`` or a product tree. A design that is used after one of its
    tensors was changed in place, as by an optimizer's step, raises a RuntimeError: make it inside the step. Writes into
    ``.data``, in inference mode, and by optimizers with ``fused=True`` are not noticed, because torch does not count
    them. Of two backward passes through members of one design, the first needs ``retain_graph=True``, since they share
    parts.

    Args:
        probs: Inclusion probabilities ``(..., n)`` in [0, 1], each row with an integer sum.
        logits: Real scores ``(..., n)``; a relaxation may take ``-inf`` to exclude a unit and ``inf`` to include it.
        k: Number of ones, an int or an integer tensor that broadcasts with the batch shape of the parameter; it may
            extend that shape, as an enumerated k does. Required with ``logits``. With ``probs`` it is optional and must
            equal their sum up to rounding; it is required if rounding leaves the sum ambiguous, as said above.
        relaxation: Map ``relaxation(logits, k, temperature)`` onto the capped simplex.
        temperature: Softness of the relaxation, a positive number or a tensor that broadcasts to the batch shape.
        validate_args: Whether to check the contents of tensors, as everywhere in torch.distributions. Shapes, dtypes
            and numbers are always checked.

    Raises:
        TypeError: If an argument has the wrong type or dtype.
        ValueError: If both or neither of ``probs`` and ``logits`` are given, or shapes or values are out of range.
    """

    arg_constraints = {
        "probs": Vector(constraints.unit_interval),
        "logits": Vector(constraints.real),
        "k": constraints.nonnegative_integer,
    }
    has_enumerate_support = True
    # The arguments with which a design has all members of its class, as error messages print them; "" if it always has
    # them, None if that depends on another design.
    _complete_with: ClassVar[str | None] = ""

    _size_varies: bool = False  # whether draws of one row may differ in their number of ones
    # The number of ones, or the smallest and the largest if it varies: an int, or a tensor of the batch shape.
    _low: int | Tensor
    _high: int | Tensor
    _relaxes: ClassVar[bool] = True  # whether the class takes `logits` and relaxes them to `probs`

    def __init__(
        self,
        probs: Tensor | None = None,
        logits: Tensor | None = None,
        k: int | Tensor | None = None,
        *,
        relaxation: Relaxation = sigmoid_topk,
        temperature: float | Tensor = 1.0,
        validate_args: bool | None = None,
    ) -> None:
        if (probs is None) == (logits is None):
            got = "neither: for" if probs is None else "both; the second position is `logits`: for"
            got += f" scores and a size, write {type(self).__name__}(logits=scores, k=2)"
            raise ValueError(f"expected exactly one of `probs` and `logits`, but got {got}")
        self.parameter_name = "logits" if probs is None else "probs"
        param = checked_param(self.parameter_name, logits if probs is None else probs)
        if k is None and probs is None:
            raise ValueError(
                f"`k`, the number of ones, is required with `logits`: write {type(self).__name__}(logits=logits, k=2). "
                f"{POSTERIOR_ADVICE}"
            )
        if relaxation is not sigmoid_topk:
            check_function("relaxation", relaxation, "(logits, k, temperature)")
        if validate_args is not None:
            check_flag("validate_args", validate_args, optional=True)
        self.parameter = param = self._with_sizes(param, k)
        self.dtype, batch_shape = param.dtype, param.shape[:-1]
        self.relaxation = relaxation
        is_usual = type(temperature) is float and 0 < temperature < math.inf
        self.temperature = temperature if is_usual else checked_positive("temperature", temperature, batch_shape)
        super().__init__(batch_shape, param.shape[-1:], validate_args=validate_args)

    def _with_sizes(self, param: Tensor, k: Any) -> Tensor:
        """Sets the number of ones of each row, and returns the parameter with all batch dimensions."""
        param, self._low = (param, _sizes(param.detach())) if k is None else with_size(self.parameter_name, param, k)
        if isinstance(self._low, int):
            self._shared_k = self._size = self._low
            self._support = k_hot_of_int(self._low)
        return param

    def _widened(self) -> Tensor:
        is_sum = self.parameter_name == "probs" and not self._size_varies
        return _unrounded(self.parameter, self._k) if is_sum else super()._widened()

    def _in_float64(self) -> Self:
        """This design with a parameter in float64, so that results are not rounded."""
        if self._wide.dtype == torch.float64:
            return self
        new, state = object.__new__(type(self)), self.__getstate__() | {"parameter": self._wide, "dtype": torch.float64}
        tensors = [(name, value) for name, value in state.items() if isinstance(value, Tensor)]
        new.__setstate__(state | {name: value.double() for name, value in tensors if value.is_floating_point()})
        return new

    def _unchecked(self) -> Self:
        """The same law without validation: values outside the support have a log-probability, too."""
        return self._with(_validate_args=False)

    @property
    def k(self) -> Tensor:
        """The number of ones of each row, or the smallest if it varies."""
        return in_rows(self._low, self.parameter)

    @property
    def largest_k(self) -> Tensor:
        """The largest number of ones of each row, which is ``k`` if the number does not vary."""
        return in_rows(self._high if self._size_varies else self._low, self.parameter)

    @lazy
    def _k(self) -> Tensor:
        return self.k

    @lazy
    def _largest_k(self) -> Tensor:
        return self.largest_k

    @lazy
    def _size(self) -> Any:
        return self._low

    @lazy
    def _support(self) -> constraints.Constraint:
        return k_hot(self._size) if self._shared_k is None else k_hot_of_int(self._shared_k)

    @property
    @entry
    def probs(self) -> Tensor:
        """The target inclusion probabilities of the design."""
        return self._rounded(self._probs)

    @lazy
    def _probs(self) -> Tensor:
        probs = self.relaxation(self._logits, self._size, self.temperature)
        if self._validate_args and looks_at_contents(probs):
            name = getattr(self.relaxation, "__name__", repr(self.relaxation))
            self._check_probs(probs, f"what `relaxation` {name} returns", "it is not a mask of inclusion probabilities")
        return probs

    @lazy
    def _log_odds(self) -> Tensor:
        """Float64 log-odds of ``probs``, infinite for certain units; accurate for scores even where ``probs`` round."""
        found = None
        if relaxes_logits(self):
            found = mask_log_odds(self.relaxation, self._logits, self._size, self.temperature)
        return log_odds(self._probs.double()) if found is None else found

    @lazy
    def _logits(self) -> Tensor:
        raise AttributeError(f"this {type(self).__name__} was made from `probs` and has no `logits`")

    @property
    def _mean(self) -> Tensor:
        """Inclusion probabilities P(x_i = 1)."""
        return self._probs

    @property
    def _variance(self) -> Tensor:
        mean = self._mean
        return mean * (1 - mean)

    @property
    @entry
    def pairwise_inclusion(self) -> Tensor:
        """Matrix ``(..., n, n)`` of E[x_i x_j], with ``mean`` on the diagonal."""
        return self._rounded(self._pairwise_inclusion())

    @property
    @entry
    def covariance_matrix(self) -> Tensor:
        """Matrix ``(..., n, n)`` of the covariances of the x_i."""
        return self._rounded(self._covariance_matrix())

    @entry
    def sample_indices(
        self, sample_shape: SizeLike = torch.Size(), *, generator: torch.Generator | None = None
    ) -> Tensor:
        """The k positions of the ones of draws, in increasing order: ``sample_shape + batch_shape + (k,)``, long."""
        shape = self._checked_draw(sample_shape, generator)
        with torch.no_grad():
            return self._sample_indices(shape, generator)

    def _sample_indices(self, shape: Size, generator: torch.Generator | None) -> Tensor:
        k = shared_k(self, "sample_indices")
        return indices_of_largest(self._rounded(self._sample(shape, generator)), k)

    def _rsample(self, shape: Size, generator: torch.Generator | None) -> Tensor:
        raise NotImplementedError(
            f"{type(self).__name__} has no rsample: wrap it in an estimator, such as khot.ReinMax(design), or "
            "khot.StraightThrough(design), which takes every design"
        )

    def _value(self, like: Tensor) -> Tensor:
        unit = torch.arange(self.event_shape[0], device=like.device)
        return (unit < self._k.unsqueeze(-1)).to(like.dtype)

    # Checks of the parameters and of values; each error message says what to do.

    def _fits(self) -> bool:
        return capped_simplex(self._size).holds(self._wide.detach())

    def _validate_constraints(self) -> None:
        if self.parameter_name == "probs" and self._wide.numel() and can_look(self._wide):
            lowest, highest = (end.item() for end in self._wide.detach().aminmax())
            if math.isnan(lowest) or math.isnan(highest):
                raise ValueError("`probs` must lie in [0, 1], but contain NaN")
            if not (lowest >= 0 and highest <= 1):
                sizes = ", and sizes as probs=capped_softmax(sizes.log(), k)" if lowest >= 0 else ""
                raise ValueError(
                    f"`probs` must lie in [0, 1], but got entries from {lowest:.6g} to {highest:.6g}; give scores by "
                    f"keyword, logits=scores{sizes}"
                )
        super()._validate_constraints()

    def _validate_contents(self) -> None:
        check_sizes(self._low, self.event_shape[0])
        check_positive_contents("temperature", self.temperature)
        if self.parameter_name == "probs":
            self._check_probs(
                self._wide,
                "`probs`",
                "round or rescale it; for sums that are not integers, use PhantomUnit; give scores by keyword, "
                "logits=scores",
            )

    def _check_probs(self, probs: Tensor, name: str, advice: str) -> None:
        probs = probs.detach()
        simplex = capped_simplex(self._size)
        if not simplex.holds(probs):
            wrong = ~simplex.check(probs)
            row, k = probs[wrong][0], self._k[wrong][0]
            expected = f"each row of {name} must lie in [0, 1] and sum to its integer k, but"
            if row.isnan().any():
                raise ValueError(f"{expected} one contains NaN (shape {tuple(probs.shape)})")
            raise ValueError(
                f"{expected} got entries from {row.min():.6g} to {row.max():.6g} with the sum "
                f"{row.sum(dtype=torch.float64):.9g} for k={k} (shape {tuple(probs.shape)}); {advice}"
            )

    def _validate_infinite_logits(self) -> None:
        """Checks natural parameters: ``inf`` includes a unit, ``-inf`` excludes it, and k must allow both."""
        if self.parameter_name == "probs":
            return
        included, possible = (self._wide == torch.inf).sum(-1), (self._wide > -torch.inf).sum(-1)
        wrong = (included > self._largest_k) | (possible < self._k)
        if wrong.any():
            low, high = self._k[wrong][0], self._largest_k[wrong][0]
            raise ValueError(
                f"`k` must lie between the number of `logits` equal to inf, {included[wrong][0]}, "
                f"and that of those above -inf, {possible[wrong][0]}, but got k={low if low == high else (low, high)}"
            )

    # Sums over all k-hot vectors, unless a subclass overrides these members.

    def _enumerated_support(self, expand: bool) -> Tensor:
        if self._size_varies:
            low, high = shared_ends(self, "enumerate_support")
        else:
            low = high = shared_k(self, "enumerate_support", DIFFERENT_SIZES_ADVICE)
        n, batch_shape = self.event_shape[0], self.batch_shape
        counts = {k: math.comb(n, k) for k in range(low, high + 1)}
        if (count := sum(counts.values())) > MAX_SUPPORT:
            which = f"there are {count} with {low} to {high} ones out of {n} units"
            which = f"C({n}, {low}) = {count}" if low == high else which
            message = f"enumerate_support lists at most {MAX_SUPPORT} k-hot vectors, but {which}; {TOO_MANY_ADVICE}"
            raise ValueError(message)
        like = self._wide.detach().new_empty((), dtype=self.dtype)
        listed = [k_hot_vectors(n, k, 0, number, like) for k, number in counts.items()]
        values = (listed[0] if low == high else torch.cat(listed)).view(count, *(1,) * len(batch_shape), n)
        return values.expand(count, *batch_shape, n) if expand else values

    def _pairwise_inclusion(self) -> Tensor:
        n = self.event_shape[0]
        pairs = self._wide.new_zeros(*self.batch_shape, n, n, dtype=torch.float64)
        for value, log_prob in self._listed("pairwise_inclusion"):
            pairs = pairs + torch.einsum("s...,s...i,s...j->...ij", log_prob.exp(), value, value)
        return pairs

    def _covariance_matrix(self) -> Tensor:
        design = self._in_float64()
        mean = design._mean
        return design._pairwise_inclusion() - mean.unsqueeze(-1) * mean.unsqueeze(-2)

    def _mode(self) -> Tensor:
        """Found among all vectors; for small C(n, k)."""
        best, most = self._wide.detach().new_zeros(*self.batch_shape, self.event_shape[0]), None
        for value, log_prob in self._listed("mode"):
            largest, at = log_prob.detach().max(0)
            value = value.expand(*log_prob.shape, -1).take_along_dim(at[None, ..., None], 0).squeeze(0).to(best.dtype)
            is_better = largest > (-torch.inf if most is None else most)
            best = torch.where(is_better.unsqueeze(-1), value, best)
            most = largest if most is None else largest.maximum(most)
        return best

    def _entropy(self) -> Tensor:
        entropy = self._wide.new_zeros(self.batch_shape, dtype=torch.float64)
        for _, log_prob in self._listed("entropy"):
            possible = log_prob > -torch.inf
            entropy = entropy - (log_prob.exp() * log_prob.masked_fill(~possible, 0.0)).sum(0)
        return entropy

    def _enumerates(self, wanted: str) -> bool:
        """Whether ``entropy`` or ``pairwise_inclusion`` is a sum over all k-hot vectors, if it exists at all."""
        return wanted not in defined_by(type(self))

    def _listed(self, wanted: str) -> Iterator[tuple[Tensor, Tensor]]:
        """All k-hot vectors and their log-probabilities in float64, in chunks that fit into memory.

        Yields:
            Tensors ``(vectors, ..., n)``, which broadcast with the batch, and ``(vectors, *batch_shape)``. A row with
            fewer vectors than others repeats its last one with a log-probability of ``-inf``.

        Raises:
            NotImplementedError: If there is no ``_log_prob``, or there are too many vectors.
        """
        n, sizes, design = self.event_shape[0], sizes_of(self, wanted), self._in_float64()
        counts = [math.comb(n, k) for k in sizes]
        largest = max(counts, default=0)
        if largest > MAX_SUPPORT:
            raise self._unavailable(wanted, f" of {largest} k-hot vectors, which is more than {MAX_SUPPORT}")
        like, column = design._wide.detach(), (-1, *(1,) * len(self.batch_shape))
        step = max(1, LISTED // max(1, like.numel()))
        for start in range(0, largest, step):
            rank = torch.arange(start, min(start + step, largest), device=like.device).view(column)
            if len(sizes) == 1:
                value, beyond = k_hot_vectors_of_rank(n, sizes[0], rank, like), None
            else:
                count = sum((number * (self._k == k) for k, number in zip(sizes, counts, strict=True)), 0 * self._k)
                value, beyond = k_hot_vectors_of_rank(n, self._k, rank.minimum(count - 1), like), rank >= count
            try:
                log_prob = design._log_prob(value)
            except NotImplementedError:
                raise self._unavailable(wanted) from None
            yield value, log_prob if beyond is None else log_prob.masked_fill(beyond, -torch.inf)

    def _log_prob(self, value: Tensor) -> Tensor:
        """The log-probability of k-hot values."""
        raise self._unavailable("log_prob")

    def _unavailable(self, wanted: str, of_what: str = "") -> NotImplementedError:
        *first, last = designs_with(wanted)
        return NotImplementedError(
            f"{type(self).__name__} has no {wanted}{of_what}; {', '.join(first)} and {last} have it"
        )


def _unrounded(probs: Tensor, k: Tensor) -> Tensor:
    """Float32 probabilities that sum to ``k`` and round to the given ones, which have a half type.

    All entries between 0 and 1 change in the same proportion, by no more than rounding can have changed them. Any
    remaining excess of the sum is taken from entries of 1. The gradient is that of ``probs``.
    """
    exact, unit = probs.detach().double(), torch.finfo(probs.dtype).eps / 2
    inner, ones = exact.masked_fill(exact == 1, 0.0), (exact == 1).double()
    total, movable, certain = (part.sum(-1, keepdim=True) for part in (exact, inner, ones))
    lacking = k.unsqueeze(-1) - total
    share = (lacking / movable.where(movable > 0, 1.0)).clamp(-unit, unit)
    rest = ((lacking - share * movable) / certain.clamp(min=1.0)).clamp(-unit / 2, 0.0)
    return probs.float() + (share * inner + rest * ones).float()


def _sizes(probs: Tensor) -> Tensor:
    """The integers that the sums of rounded probabilities represent."""
    total, dtype, n = probs.sum(-1, dtype=torch.float64), probs.dtype, probs.shape[-1]
    k = total.nan_to_num().round().long()  # the checks report NaN
    if not looks_at_contents(total) or capped_simplex.rounding_of_sum(n, dtype, n) < SURE:
        return k
    for other in (k - 1, k + 1):
        doubtful = (other >= 0) & (other <= n) & capped_simplex(other.clamp(min=0)).is_sum(total, dtype, n)
        if doubtful.any():
            first = total[doubtful][0].item()
            raise ValueError(
                f"`k` must be given with `probs` in {dtype}: the sum {first:.9g} of the rounded entries fits the size "
                f"{other[doubtful][0]} as well as {k[doubtful][0]}; pass k=..., or `probs` in "
                f"{'float32' if is_half(dtype) else 'float64'}"
            )
    return k


OPTIONAL = ("log_prob", "entropy", "pairwise_inclusion", "mode")  # members that not all designs have


def relaxes_logits(design: SamplingDesign) -> bool:
    """Whether ``probs`` is the relaxation of given ``logits``, rather than given or defined by the design."""
    return design.parameter_name == "logits" and design._relaxes


def designs_with(wanted: str) -> list[str]:
    """The designs of this package that have a ``log_prob``, ``entropy``, ``mode`` ..., as users write them.

    The most complete come first. Designs that have it only with one setting come last, with that setting.
    """
    members = [cls for cls in _members(SamplingDesign) if cls._complete_with is not None and wanted in defined_by(cls)]
    members.sort(key=lambda cls: (cls._complete_with != "", -len(defined_by(cls)), cls.__name__))
    return [f"{cls.__name__}({cls._complete_with})" if cls._complete_with else cls.__name__ for cls in members]


def defined_by(cls: type[SamplingDesign]) -> set[str]:
    """Those of :data:`OPTIONAL` that a class defines itself, not as sums over all vectors."""
    return {name for name in OPTIONAL if getattr(cls, f"_{name}") is not getattr(SamplingDesign, f"_{name}")}


def _members(base: type[SamplingDesign]) -> Iterator[type[SamplingDesign]]:
    """The designs of this package: its classes that have no subclasses there."""
    derived = [cls for cls in base.__subclasses__() if cls.__module__.startswith(f"{__package__}.")]
    for cls in derived:
        yield from _members(cls)
    if not derived:
        yield base
