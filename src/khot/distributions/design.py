"""The base of all sampling designs: laws on the k-hot vectors in {0, 1}ⁿ, every draw with exactly k ones.

Here is what they have in common: the two parametrisations, their checks, shapes, ``expand``, enumeration, and the
moments that follow from the first two orders of inclusion probabilities. A design adds its law.
"""

import functools
import math
import operator
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, cast

import torch
from torch import Size, Tensor
from torch.distributions import constraints
from torch.distributions.utils import lazy_property
from torch.types import _size as SizeLike

from khot._distributed.batch import SpreadBatch
from khot._distributed.placements import is_dtensor
from khot._distributed.shards import Shards
from khot._torch_internals import is_tracing
from khot._tracing import one_operation, overrides_functions, shape_of
from khot._validation import (
    can_look,
    check_flag,
    check_function,
    checked_expansion,
    checked_positive,
    is_finite,
    looks_at_contents,
)
from khot.constraints import capped_simplex, k_hot
from khot.kernels.row_slabs import MOST_SLABS, by_rows
from khot.kernels.small_numbers import log_odds
from khot.laws.kept import Kept
from khot.laws.subsets import k_hot_vectors, k_hot_vectors_of_rank
from khot.relaxations import sigmoid_topk
from khot.relaxations.mask_log_odds import mask_log_odds

from ._arguments import Vector, broadcast_with_k, checked_param, checked_size, in_short, shapes_of
from .base import KHotDistribution, draw, is_half
from .rounding import ROUNDED, rounded, unrounded
from .spread import by_rows_here

MAX_SUPPORT = 1_000_000  # the most subsets that enumerate_support lists: a longer list does not fit into memory

WHOLE = 2**17  # units of rows that are taken all together, so that nothing is made twice
SLAB = 2**14  # of more rows, units that are scored or drawn at a time: about 2 MB
LISTED = 2**20  # units of the k-hot vectors that are listed at a time for a sum over all of them: 8 MB

POSTERIOR_ADVICE = (
    "(Pyro's compute_marginals and sample_posterior give nothing but one logit for each k-hot vector, which no design "
    "can hold. There, sample the number of a vector, i ~ khot.infer.subset_categorical(design), and take "
    "khot.infer.subset_vector(i, n, k))"
)

TOO_MANY_ADVICE = "for a site that is too large to enumerate, khot.infer.KHotSwap samples the posterior"
DIFFERENT_SIZES_ADVICE = (
    "khot.infer.subset_categorical(design) enumerates rows of different sizes, by the numbers of their vectors"
)

Relaxation = Callable[[Tensor, Any, Any], Tensor]

TRACED_WHOLE = (  # what looks at contents in some design: one operation in a trace
    "probs",
    "logits",
    "mean",
    "pairwise_inclusion",
    "covariance_matrix",
    "mode",
    "sample",
    "sample_indices",
    "log_prob",
    "entropy",
    "enumerate_support",
)


class _Derived(lazy_property):  # type: ignore[type-arg]
    """A lazy property whose value is computed anew when the parameters of the design have changed."""

    def __get__(self, instance: Any, obj_type: Any = None) -> Any:
        if instance is None:
            return super().__get__(None, obj_type)
        return instance.derived(self.wrapped.__name__, self.wrapped)


def _changed(member: Any, change: Callable[..., Any]) -> Any:
    """A method or property, changed."""
    if isinstance(member, lazy_property):
        return type(member)(change(member.wrapped))
    if isinstance(member, property):
        return property(change(cast(Any, member.fget)), doc=member.__doc__)
    return change(member)


def _by_rows_here(name: str, member: Any) -> Any:
    return _changed(member, functools.partial(by_rows_here, name))


def _rounded(name: str, member: Any) -> Any:
    return _changed(member, functools.partial(rounded, name))


def _follow_parameters(cls: type) -> None:
    """Makes the lazy properties of a class follow the parameters."""
    for name, member in list(vars(cls).items()):
        if isinstance(member, lazy_property):
            setattr(cls, name, _Derived(member.wrapped))


class SamplingDesign(KHotDistribution):
    r"""A distribution over the k-hot vectors of length n; the base class, to which a subclass adds its law.

    Its parameter is either ``probs``, the inclusion probabilities :math:`\pi_i = P(x_i = 1)`, whose sum is k, or
    ``logits``, real scores of which ``probs = relaxation(logits, k, temperature)``, computed at first use. All results
    are differentiable in the parameter. Exact 0 and 1 in ``probs`` are legal: such units are drawn never and always.

    ``log_prob`` is ``-inf``, with zero gradient, outside of the support; with validation on, values there are errors.

    In Pyro a site is enumerated by ``infer={"enumerate": "parallel"}``; but one made of several latents by
    ``to_event(1)`` is not, and ``config_enumerate`` passes it over without a word: declare the rows independent by a
    plate instead. What asks for a Categorical, infer_discrete for one, takes :func:`~khot.subset_categorical`. Missing
    rows of data are left out by ``pyro.sample(..., obs=x, obs_mask=seen)``, ``seen`` of the batch shape.

    A subclass defines ``sample`` and what it has of ``_log_prob`` (of k-hot values: the rest is done here), ``entropy``
    and ``pairwise_inclusion``. From a ``_log_prob`` alone the last two are computed here, exactly, as sums over all
    C(n, k) vectors, if these are at most ``MAX_SUPPORT`` (1,000,000): that takes as many evaluations of ``_log_prob``.
    What a design lacks raises NotImplementedError and names the designs that have it. One whose logits are natural
    parameters overrides the lazy properties ``probs`` and ``logits``, each computed from the other; one that does not
    draw with the probabilities ``probs`` overrides ``mean``; one with a known mode overrides ``mode``. ``expand`` and
    copies work without further ado as long as every tensor among the attributes starts with ``batch_shape``.

    The parameter may be a ``torch.distributed.tensor.DTensor``, and so are the results. Each process then works on the
    rows that it has, and draws follow one seed, whatever the number of processes. Rows that are cut are gathered when
    the design is made, but those of order sampling and of :class:`~khot.ConditionalPoisson`: for these the guide "at
    scale" lists what sums and candidates give, and what gathers the rows when it is called.

    With a parameter in bfloat16 or float16 every result is the rounding of that in float32, and draws are the same. A
    sum of rounded probabilities is not a size: ``probs`` in these types need ``k`` unless rounding leaves no doubt.
    They are then taken for roundings of probabilities that sum to k.

    A design follows its parameter: after an optimizer step every result is that of a design made of the new contents.
    What its methods have in common, such as ``probs`` or a product tree, is computed once, at the first call that needs
    it, and again when the parameter, ``k`` or ``temperature`` has changed. A change is whatever alters an entry; on an
    accelerator, where to compare entries would mean to wait for it, every write but one into ``.data``. Tensors that a
    relaxation of your own holds are not looked at.

    Args:
        probs: Inclusion probabilities ``(..., n)`` in [0, 1], each row with an integer sum.
        logits: Real scores ``(..., n)``; a relaxation may take ``-inf`` to exclude a unit and ``inf`` to include it.
        k: Number of ones, an int or an integer tensor that broadcasts with the batch shape of the parameter, which it
            may extend, as an enumerated one does. Required with ``logits``; may be given with ``probs``, whose sum it
            must then equal up to rounding, and is required with long rows of them in a half type.
        relaxation: Map ``relaxation(logits, k, temperature)`` onto the capped simplex.
        temperature: Softness of the relaxation, a positive number or a tensor that broadcasts to the batch shape.
        validate_args: Whether to check the contents of tensors, as in all of torch.distributions. Shapes, dtypes and
            numbers are always checked.

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

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        _follow_parameters(cls)
        for name in vars(cls).keys() & set(TRACED_WHOLE):
            setattr(cls, name, _by_rows_here(name, _changed(vars(cls)[name], one_operation)))
        for name in vars(cls).keys() & set(ROUNDED):
            setattr(cls, name, _rounded(name, vars(cls)[name]))
        cls._has_own_probs = cls._has_own_probs or "probs" in vars(cls)
        members = [item for base in cls.__mro__ for item in vars(base).items()]
        cls._lazy = frozenset(name for name, member in members if isinstance(member, lazy_property))

    spread: SpreadBatch | None = None  # where the rows are, if the parameter is a DTensor
    size_varies = False  # whether draws of a row may differ in their number of ones, from `k` to `largest_k`
    _has_own_probs: ClassVar[bool] = False
    _lazy: ClassVar[frozenset[str]] = frozenset()  # what is computed from the parameter when it is asked for
    _knows_parts: ClassVar[bool] = False  # whether rows that are cut stay so
    _settings: ClassVar[tuple[str, ...]] = ()  # a subclass's own arguments, as `repr` shows them
    # The setting with which a design has all that its class defines; "" for any, None where it depends on another one.
    _complete_with: ClassVar[str | None] = ""

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
            got, name = "neither", type(self).__name__
            if probs is not None:
                got = f"both; the second position is `logits`: for scores and a size, write {name}(logits=scores, k=2)"
            raise ValueError(f"expected exactly one of `probs` and `logits`, but got {got}")
        self.parameter_name = "logits" if probs is None else "probs"
        param = checked_param(self.parameter_name, logits if probs is None else probs)
        self.spread = SpreadBatch.of(self.parameter_name, param) if is_dtensor(param) else None
        if self.spread is not None:
            param = self.spread.lead if self._knows_parts else self.spread.whole_rows
        if k is None and probs is None:
            raise ValueError(
                f"`k`, the number of ones, is required with `logits`: write {type(self).__name__}(logits=logits, k=2). "
                f"{POSTERIOR_ADVICE}"
            )
        check_function("relaxation", relaxation, "(logits, k, temperature)")
        check_flag("validate_args", validate_args, optional=True)
        param, self.k, self.largest_k = self._sized(param, k)
        shape = shape_of(param)
        batch_shape, event_shape = shape[:-1], shape[-1:]
        self.__dict__[self.parameter_name] = param
        self.kept = Kept()
        self._shared_k = None if k is None or isinstance(k, (Tensor, tuple)) else operator.index(k)
        self.relaxation = relaxation
        self.overridden = overrides_functions(param, temperature)
        self.temperature = checked_positive("temperature", temperature, batch_shape)
        self._check_rows_here = validate_args
        if self.spread is not None:
            validate_args = self._validate_spread(validate_args)
        super().__init__(batch_shape, event_shape, validate_args=validate_args)
        if is_tracing() and self.relaxes_logits:
            self.__dict__["probs"] = (
                self.probs
            )  # for the operations of a trace, as the relaxation may hold on to tensors

    def __repr__(self) -> str:
        shown = {self.parameter_name: self.parameter, "k": self.size}
        shown |= {name: getattr(self, name) for name in self._settings}
        return f"{type(self).__name__}({', '.join(f'{name}: {in_short(value)}' for name, value in shown.items())})"

    def _sized(self, param: Tensor, k: Any) -> tuple[Tensor, Tensor, Tensor]:
        """The parameter with all dimensions of the batch, and the smallest and the largest number of ones of rows."""
        size = self._sums_of(param) if k is None else checked_size(k, param)
        if isinstance(k, Tensor):
            param, size = broadcast_with_k(self.parameter_name, param, size)
        return param, size, size

    @property
    def _is_rounded(self) -> bool:
        return self.spread is None and is_half(self.dtype)  # of a spread design that of the rows here has a twin

    def _parameter_in_float32(self) -> Tensor:
        return self.parameter.float() if self.parameter_name == "logits" else unrounded(self.parameter, self.k)

    @property
    def size(self) -> int | Tensor:
        """``k`` as an int where it is known to be the same in all rows, else as the tensor ``k``."""
        return self.k if self._shared_k is None else self._shared_k

    @property
    def relaxes_logits(self) -> bool:
        """Whether ``probs`` is the relaxation of given ``logits``, rather than given itself or a law of its own."""
        return self.parameter_name == "logits" and not self._has_own_probs

    def _sums_of(self, probs: Tensor) -> Tensor:
        n = shape_of(probs)[-1]
        if self.spread is None:
            return _sizes(probs.detach().sum(-1, dtype=torch.float64), probs.dtype, n)
        spread = self.spread.in_parts() if self._knows_parts else self.spread
        total = spread.here("probs", probs.detach()).sum(-1, dtype=torch.float64)
        if self._knows_parts:
            (total,) = spread.shards.sum(total)
        return spread.together(_sizes(total, probs.dtype, n), axes_after=0)

    def _fits(self) -> bool:
        if self._shared_k is None or isinstance(self.temperature, Tensor):
            return False
        if self.arg_constraints is not SamplingDesign.arg_constraints:
            return False
        if self.parameter_name == "logits":
            return is_finite(self.parameter)
        return capped_simplex(self._shared_k).holds(self.parameter.detach())

    def _validate_contents(self) -> None:
        n, k = self.event_shape[0], self.k
        if not ((k >= 0) & (k <= n)).all():
            raise ValueError(f"`k` must satisfy 0 <= k <= n, but got k from {k.min()} to {k.max()} with n={n}")
        if isinstance(self.temperature, Tensor) and not ((self.temperature > 0) & self.temperature.isfinite()).all():
            raise ValueError(f"`temperature` must be positive and finite, but got {self.temperature}")
        if self.parameter_name == "probs":
            self._check_probs(
                self.parameter, "`probs`", "round or rescale it; for sums that are no integer there is PhantomUnit"
            )

    def _check_probs(self, probs: Tensor, name: str, advice: str) -> None:
        probs = probs.detach()
        simplex = capped_simplex(self.size)
        if not simplex.holds(probs):
            wrong = ~simplex.check(probs)
            row, k = probs[wrong][0], self.k[wrong][0]
            raise ValueError(
                f"each row of {name} must lie in [0, 1] and sum to its integer k, but got entries from {row.min():.6g} "
                f"to {row.max():.6g} with the sum {row.sum(dtype=torch.float64):.9g} for k={k} "
                f"(shape {tuple(probs.shape)}); {advice}"
            )

    def _validate_infinite_logits(self) -> None:
        """For logits that are natural parameters: ``inf`` includes a unit and ``-inf`` excludes it, k in between."""
        if self.parameter_name == "probs":
            return
        included, possible = (self.parameter == torch.inf).sum(-1), (self.parameter > -torch.inf).sum(-1)
        wrong = (included > self.largest_k) | (possible < self.k)
        if wrong.any():
            low, high = self.k[wrong][0], self.largest_k[wrong][0]
            raise ValueError(
                f"`k` must lie between the number of infinite `logits`, {included[wrong][0]}, "
                f"and of those above -inf, {possible[wrong][0]}, but got k={low if low == high else (low, high)}"
            )

    def expand(self, batch_shape: SizeLike, _instance: Any = None) -> "SamplingDesign":
        new = self._get_checked_instance(type(self), _instance)
        batch_shape, batch_dim = checked_expansion(batch_shape, self.parameter, self.batch_shape), len(self.batch_shape)

        def expanded(value: Any) -> Any:
            if isinstance(value, Tensor):
                return value.expand(batch_shape + shape_of(value)[batch_dim:])
            return value.expand(batch_shape) if isinstance(value, SamplingDesign) else value

        for name, value in self.__dict__.items():
            if name != "_derived":
                new.__dict__[name] = expanded(value)
        if batch_shape != self.batch_shape:
            new.kept = Kept()
        if self.spread is not None:
            new.spread = SpreadBatch.of(self.parameter_name, new.parameter)
        elif not torch.compiler.is_compiling():
            new._derived_now().update({name: expanded(value) for name, value in self._derived_now().items()})
        super(SamplingDesign, new).__init__(batch_shape, self.event_shape, validate_args=False)
        new._validate_args = self._validate_args
        return cast(SamplingDesign, new)

    def _validate_spread(self, validate_args: bool | None) -> bool:
        """Checks the rows that this process has, if any design is checked; the whole is then not looked at.

        Of rows that stay cut it is one collective, unless something is wrong, which all processes see: they gather the
        rows for the message.
        """
        KHotDistribution.__init__(self, *self._shapes(), validate_args=False)
        spread = cast(SpreadBatch, self.spread)
        if self._knows_parts and spread.is_cut:
            fits = not self.checks_rows_here or self.parts_here._parts_fit(spread.in_parts().shards)
            self._derived = None
            if fits:
                return False
        KHotDistribution.__init__(self.rows_here, *self.rows_here._shapes(), validate_args=validate_args)
        self._derived = None  # the rows here, of which, as of parts, a subclass may have more to tell
        return False

    @property
    def checks_rows_here(self) -> bool:
        """Whether what this process has of a spread design is validated, and values given to it are."""
        default = bool(type(self)._validate_args)
        return default if self._check_rows_here is None else self._check_rows_here

    def _parts_fit(self, shards: Shards) -> bool:
        """Whether the parameter, of which this is a part, will pass all checks."""
        x, total = self.parameter.detach(), torch.zeros((), dtype=torch.float64)
        if self.parameter_name == "probs":
            regular = (x >= 0) & (x <= 1)
            total = x.sum(-1, dtype=torch.float64)
        else:
            regular = ~x.isnan()
        counts = (~regular).sum(-1), (x == torch.inf).sum(-1), (x > -torch.inf).sum(-1)
        wrong, included, possible, total = shards.sum(*counts, total.expand(self.batch_shape))
        fits = (wrong == 0) & (self.k >= 0) & (self.k <= shards.n)
        if self.parameter_name == "probs":
            fits &= capped_simplex(self.size).is_sum(total, x.dtype, shards.n)
        elif not self.relaxes_logits:
            fits &= (included <= self.k) & (possible >= self.k)
        if isinstance(self.temperature, Tensor):
            fits &= (self.temperature > 0) & self.temperature.isfinite()
        return bool(fits.all())

    def _sources(self) -> list[Any]:
        sizes = [] if self._shared_k is not None else [self.k, self.largest_k]
        return [self.parameter, self.temperature, *sizes]

    def _shapes(self) -> tuple[Size, Size]:
        shape = shape_of(self.parameter)
        return shape[:-1], shape[-1:]

    @lazy_property
    def rows_here(self) -> "SamplingDesign":
        """Of a design whose parameter is a DTensor: that of the rows that this process has, in plain tensors."""
        new = self._part_of(cast(SpreadBatch, self.spread))
        if self._check_rows_here is not None:
            new._validate_args = self._check_rows_here
        return new

    @lazy_property
    def parts_here(self) -> "SamplingDesign":
        """The same of cut rows, as a design of the units that this process has: for members that work on parts.

        They are to be called where ``shards_of_rows`` tells who has the other parts.
        """
        new = self._part_of(cast(SpreadBatch, self.spread).in_parts())
        new._validate_args = False
        return new

    def _part_of(self, spread: SpreadBatch) -> "SamplingDesign":
        new = object.__new__(type(self))
        new.__dict__.update(self.__getstate__() | {"spread": None})
        with torch.enable_grad():  # which those want who come later
            for name, value in new.__dict__.items():
                if isinstance(value, Tensor):
                    new.__dict__[name] = spread.here(name, value)
        super(SamplingDesign, new).__init__(*new._shapes(), validate_args=False)
        new.__dict__.pop("_validate_args", None)
        return new

    def holds_parts(self, value: Tensor, shards: Shards) -> Tensor:
        """Which values ``(..., m)`` are in the support, of which this process has a part; all find the same."""
        wrong, total = shards.sum(((value != 0) & (value != 1)).sum(-1), value.sum(-1, dtype=torch.float64))
        return (wrong == 0) & (total == self.k)

    def some_parts(self, value: Tensor, inside: Tensor, shards: Shards) -> Tensor:
        """The values, k-hot ones in the place of those that are not ``inside`` the support."""
        unit = shards.first + torch.arange(value.shape[-1], device=value.device)
        return torch.where(inside.unsqueeze(-1), value, (unit < self.k.unsqueeze(-1)).to(value.dtype))

    def log_prob_of_parts(self, value: Tensor, shards: Shards) -> Tensor:
        """Log-probability of k-hot values ``(*sample_shape, *batch_shape, m)``, of which this process has a part."""
        raise self._unavailable("log_prob")

    def works_on_parts(self, member: str) -> bool:
        """Whether this member, of a design whose rows are cut, needs no whole rows.

        All processes ask, as it may take collectives, and get the same answer.
        """
        return False

    def some_rows(self, start: int, stop: int) -> "SamplingDesign":
        """The design of some rows of the batch, which are counted as if it had one dimension."""
        new, batch_dim, rows = object.__new__(type(self)), len(self.batch_shape), self.batch_shape.numel()
        new.__dict__.update(self.__getstate__())
        for name, value in new.__dict__.items():
            if isinstance(value, Tensor):
                new.__dict__[name] = value.detach().reshape(rows, *value.shape[batch_dim:])[start:stop]
        super(SamplingDesign, new).__init__(*new._shapes(), validate_args=False)
        return new

    def __getstate__(self) -> dict[str, Any]:
        """What copies and pickles hold: the parameter, not what was computed from it, whose graph cannot be copied."""
        lazy = self._lazy - {self.parameter_name}
        return {name: value for name, value in super().__getstate__().items() if name not in lazy} | {"kept": Kept()}

    def _validate_sample(self, value: Tensor) -> None:
        try:
            super()._validate_sample(value)
        except ValueError as error:
            if "support" not in str(error) or not can_look(value) or not ((value > 0) & (value < 1)).any():
                raise
            message = "entries between 0 and 1 are relaxed; where the guide is, so must the model be"
            raise ValueError(f"{error}\n{message} (khot.infer.KHotReparam)") from None

    @classmethod
    def infer_shapes(cls, **arg_shapes: Size) -> tuple[Size, Size]:
        return shapes_of(arg_shapes["probs"] if "probs" in arg_shapes else arg_shapes["logits"], arg_shapes)

    @constraints.dependent_property(is_discrete=True, event_dim=1)
    def support(self) -> constraints.Constraint:
        return k_hot(self.size)

    @lazy_property
    def probs(self) -> Tensor:
        """Inclusion probabilities that the design aims at."""
        probs = self.relaxation(self.logits, self.size, self.temperature)
        if self._validate_args and looks_at_contents(probs):
            name = getattr(self.relaxation, "__name__", repr(self.relaxation))
            self._check_probs(probs, f"what `relaxation` {name} returns", "it is no mask of inclusion probabilities")
        return probs

    @lazy_property
    def log_odds(self) -> Tensor:
        """Float64 log-odds of ``probs``, infinite for units that are certain; of scores also where ``probs`` round."""
        found = None
        if self.relaxes_logits and not torch.compiler.is_compiling():  # whose tracer does not know what has a link
            found = mask_log_odds(self.relaxation, self.logits, self.size, self.temperature)
        return log_odds(self.probs.double()) if found is None else found

    def _found(self, name: str) -> Tensor | None:
        """A lazy property that has been computed already, else None."""
        if name in self.__dict__ or torch.compiler.is_compiling():
            return self.__dict__.get(name)
        return self._derived_now().get(name)

    @lazy_property
    def logits(self) -> Tensor:
        """Scores that ``probs`` were computed from."""
        raise AttributeError(f"this {type(self).__name__} was made from `probs` and has no `logits`")

    @property
    def mean(self) -> Tensor:
        """Inclusion probabilities P(x_i = 1)."""
        return self.probs

    @property
    def variance(self) -> Tensor:
        return self.mean * (1 - self.mean)

    @property
    @one_operation
    def pairwise_inclusion(self) -> Tensor:
        """Matrix ``(..., n, n)`` of E[x_i x_j], with ``mean`` on the diagonal; here as a sum over all k-hot vectors."""
        n = self.event_shape[0]
        pairs = self.parameter.new_zeros(*self.batch_shape, n, n, dtype=torch.float64)
        for value, log_prob in self._listed("pairwise_inclusion"):
            pairs = pairs + torch.einsum("s...,s...i,s...j->...ij", log_prob.exp(), value, value)
        return pairs.to(self.parameter.dtype)

    @property
    @one_operation
    def covariance_matrix(self) -> Tensor:
        """Matrix ``(..., n, n)`` of the covariances of the x_i."""
        design = self.in_float64()
        mean = design.mean
        covariance = design.pairwise_inclusion - mean.unsqueeze(-1) * mean.unsqueeze(-2)
        return covariance.to(self.parameter.dtype)

    @property
    @one_operation
    def mode(self) -> Tensor:
        """The most probable k-hot vector, found among all of them: for small C(n, k)."""
        best, most = self.parameter.detach().new_zeros(*self.batch_shape, self.event_shape[0]), None
        for value, log_prob in self._listed("mode"):
            largest, at = log_prob.detach().max(0)
            value = value.expand(*log_prob.shape, -1).take_along_dim(at[None, ..., None], 0).squeeze(0).to(best.dtype)
            is_better = largest > (-torch.inf if most is None else most)
            best = torch.where(is_better.unsqueeze(-1), value, best)
            most = largest if most is None else largest.maximum(most)
        return best

    def sample(self, sample_shape: SizeLike = torch.Size(), *, generator: torch.Generator | None = None) -> Tensor:
        """Draws k-hot vectors, ``sample_shape + batch_shape + (n,)``.

        Args:
            sample_shape: Shape of the independent draws.
            generator: Source of randomness on the device of the parameters, torch's default one if None.
        """
        raise NotImplementedError(f"{type(self).__name__} does not define `sample`")

    def rsample(self, sample_shape: SizeLike = torch.Size(), *, generator: torch.Generator | None = None) -> Tensor:
        raise NotImplementedError(
            f"{type(self).__name__} has no rsample: wrap it by an estimator, as in khot.ReinMax(design), or in "
            "khot.StraightThrough(design), which takes every design"
        )

    @one_operation
    def sample_indices(
        self, sample_shape: SizeLike = torch.Size(), *, generator: torch.Generator | None = None
    ) -> Tensor:
        """Draws as the k positions of the ones, in increasing order: ``sample_shape + batch_shape + (k,)``, long."""
        k = self._require_shared_k("sample_indices")
        value = draw(self, sample_shape, generator)
        return positions(value, k)

    @one_operation
    def log_prob(self, value: Tensor) -> Tensor:
        """Log-probability of values ``(*sample_shape, *batch_shape, n)``."""
        if self._validate_args:
            self._validate_sample(value)
            if self._shared_k is not None:
                return self._log_prob(value)
        if value.device.type == "cpu" and self._is_in_support(value):
            return self._log_prob(value)
        inside = self.support.check(value)
        unit = torch.arange(self.event_shape[0], device=value.device)
        some_value = (unit < self.k.unsqueeze(-1)).to(value.dtype)  # k-hot, in the place of those that are not
        value = torch.where(inside.unsqueeze(-1), value, some_value)
        return self._log_prob(value).masked_fill(~inside, -torch.inf)

    def _size_of(self, k: Tensor) -> int | Tensor:
        """k of some rows, as an int where it is one."""
        return k if self._shared_k is None else self._shared_k

    def _by_rows(self, function: Callable[..., Tensor], *arguments: Tensor) -> Tensor:
        """``function(probs, k, *others, kept=self.kept)`` of tensors ``(..., n)``; of many rows slab by slab."""
        probs, *others = arguments
        if probs.numel() <= WHOLE:
            return function(probs, self.k, *others, kept=self.kept)
        return self._in_slabs(function, *arguments, largest=SLAB, most=MOST_SLABS)

    def _in_slabs(
        self, function: Callable[..., Tensor], *arguments: Tensor, largest: int, most: int | None = None
    ) -> Tensor:
        """``function(probs, k, *others)``, of many rows in slabs of ``largest`` units each, at ``most`` so many."""

        def of_rows(probs: Tensor, *others_and_k: Tensor) -> tuple[Tensor]:
            *others, k = others_and_k
            return (function(probs, k.squeeze(-1), *others),)

        return by_rows(of_rows, largest, *arguments, self.k.unsqueeze(-1), most=most)[0]

    def _draw_by_rows(self, function: Callable[..., Tensor], sample_shape: SizeLike, *options: Any) -> Tensor:
        """Draws ``function(probs, k, draws, *options)``, ``(draws, *probs.shape)``, in the shape of ``sample``."""
        shape, draws = self._extended_shape(sample_shape), math.prod(sample_shape)

        def of_rows(probs: Tensor, k: Tensor, kept: Kept | None = None) -> Tensor:
            return function(probs, k, draws, *options, kept=kept).movedim(0, -2)

        drawn = self._by_rows(of_rows, self.probs.detach())
        return drawn.movedim(-2, 0).reshape(shape).to(self.parameter.dtype)

    def _log_prob(self, value: Tensor) -> Tensor:
        """That of k-hot values."""
        raise self._unavailable("log_prob")

    @one_operation
    def entropy(self) -> Tensor:
        """Entropy in nats, ``(...)``; here as a sum over all k-hot vectors."""
        entropy = self.parameter.new_zeros(self.batch_shape, dtype=torch.float64)
        for _, log_prob in self._listed("entropy"):
            possible = log_prob > -torch.inf
            entropy = entropy - (log_prob.exp() * log_prob.masked_fill(~possible, 0.0)).sum(0)
        return entropy.to(self.parameter.dtype)

    def enumerates(self, wanted: str) -> bool:
        """Whether ``entropy`` or ``pairwise_inclusion`` is computed as a sum over all k-hot vectors, if at all."""
        return getattr(type(self), wanted) is getattr(SamplingDesign, wanted)

    def _listed(self, wanted: str) -> Iterator[tuple[Tensor, Tensor]]:
        """All k-hot vectors and their log-probabilities in float64, in chunks that fit into memory.

        Yields:
            Tensors ``(vectors, ..., n)``, which broadcasts with the batch, and ``(vectors, *batch_shape)``. A row with
            fewer vectors than others repeats its last one, with a log-probability of ``-inf``.

        Raises:
            NotImplementedError: If there is no ``_log_prob``, or there are too many vectors.
        """
        n, sizes, design = operator.index(self.event_shape[0]), self.sizes(wanted), self.in_float64()
        counts = [math.comb(n, k) for k in sizes]
        largest = max(counts) if counts else 0  # not `default=0`, which torch.compile does not know
        if largest > MAX_SUPPORT:
            raise self._unavailable(wanted, f" of {largest} k-hot vectors, which is more than {MAX_SUPPORT}")
        like, column = design.parameter.detach(), (-1, *(1,) * len(self.batch_shape))
        step = max(1, LISTED // max(1, like.numel()))
        for start in range(0, largest, step):
            rank = torch.arange(start, min(start + step, largest), device=like.device).view(column)
            if len(sizes) == 1:
                value, beyond = k_hot_vectors_of_rank(n, sizes[0], rank, like), None
            else:
                count = sum((number * (self.k == k) for k, number in zip(sizes, counts, strict=True)), 0 * self.k)
                value, beyond = k_hot_vectors_of_rank(n, self.k, rank.minimum(count - 1), like), rank >= count
            try:
                log_prob = design._log_prob(value)
            except NotImplementedError:
                raise self._unavailable(wanted) from None
            yield value, log_prob if beyond is None else log_prob.masked_fill(beyond, -torch.inf)

    def in_float64(self) -> "SamplingDesign":
        """This design with a parameter in float64, so that all results have their digits; of a DTensor itself."""
        if self.parameter.dtype == torch.float64 or self.spread is not None:
            return self
        new = object.__new__(type(self))
        for name, value in self.__getstate__().items():
            if name == self.parameter_name or name not in self._lazy:  # what is computed has rounding errors
                is_real = isinstance(value, Tensor) and value.is_floating_point()
                new.__dict__[name] = value.double() if is_real else value
        new.kept = Kept()
        return new

    @one_operation
    def enumerate_support(self, expand: bool = True) -> Tensor:
        """All C(n, k) k-hot vectors in lexicographic order of their positions, along a new first dimension.

        Raises:
            NotImplementedError: If rows differ in ``k``.
            ValueError: If there are more than ``MAX_SUPPORT`` of them.
        """
        n, k = operator.index(self.event_shape[0]), self._require_shared_k("enumerate_support", DIFFERENT_SIZES_ADVICE)
        count, batch_shape, param = math.comb(n, k), self.batch_shape, self.parameter
        if count > MAX_SUPPORT:
            raise ValueError(
                f"enumerate_support lists at most {MAX_SUPPORT} k-hot vectors, but C({n}, {k}) = {count}; "
                f"{TOO_MANY_ADVICE}"
            )
        values = k_hot_vectors(n, k, 0, count, like=param.detach())
        values = values.view(count, *(1,) * len(batch_shape), n)
        return values.expand(count, *batch_shape, n) if expand else values

    def _require_shared_k(self, wanted: str, advice: str = "") -> int:
        if self._shared_k is None:
            sizes = self.sizes(wanted)
            if len(sizes) != 1:
                advice = f"; {advice}" if advice else ""
                raise NotImplementedError(f"{wanted} needs the same k in all rows, but got k in {sizes}{advice}")
            return sizes[0]
        return self._shared_k

    def sizes(self, wanted: str) -> list[int]:
        """The different k of the rows, in increasing order.

        Raises:
            NotImplementedError: For what is wanted, if nobody can look at the contents of k.
        """
        if self._shared_k is not None:
            return [self._shared_k]
        if not can_look(self.k):
            raise NotImplementedError(f"{wanted} needs `k` as an int where contents of tensors cannot be looked at")
        return cast(list[int], self.k.unique().tolist())

    def _unavailable(self, wanted: str, of_what: str = "") -> NotImplementedError:
        *first, last = designs_with(wanted)
        return NotImplementedError(
            f"{type(self).__name__} has no {wanted}{of_what}; {', '.join(first)} and {last} have it"
        )


_follow_parameters(SamplingDesign)
for _name in TRACED_WHOLE:  # which subclasses have by `__init_subclass__`
    if _name in vars(SamplingDesign):
        setattr(SamplingDesign, _name, _by_rows_here(_name, vars(SamplingDesign)[_name]))
for _name in ROUNDED:
    if _name in vars(SamplingDesign):
        setattr(SamplingDesign, _name, _rounded(_name, vars(SamplingDesign)[_name]))

OPTIONAL = {"log_prob": "_log_prob", "entropy": "entropy", "pairwise_inclusion": "pairwise_inclusion", "mode": "mode"}
"""What not all designs have, by the method that a design defines for it."""


def designs_with(wanted: str) -> list[str]:
    """The designs of this package that have a ``log_prob``, ``entropy``, ``mode`` ..., as users write them.

    The most complete come first, those that have it in one setting only last, with the setting.
    """
    members = [cls for cls in _members(SamplingDesign) if cls._complete_with is not None and wanted in _defined_by(cls)]
    members.sort(key=lambda cls: (cls._complete_with != "", -len(_defined_by(cls)), cls.__name__))
    return [f"{cls.__name__}({cls._complete_with})" if cls._complete_with else cls.__name__ for cls in members]


def _defined_by(cls: type[SamplingDesign]) -> set[str]:
    return {name for name, own in OPTIONAL.items() if getattr(cls, own) is not getattr(SamplingDesign, own)}


def _members(base: type[SamplingDesign]) -> Iterator[type[SamplingDesign]]:
    """The designs of this package: its classes that are no base of others there."""
    derived = [cls for cls in base.__subclasses__() if cls.__module__.startswith(f"{__package__}.")]
    for cls in derived:
        yield from _members(cls)
    if not derived:
        yield base


def positions(value: Tensor, k: int) -> Tensor:
    """Where k-hot vectors ``(..., n)`` have their ones, ``(..., k)`` in increasing order."""
    if can_look(value):
        return value.nonzero()[:, -1].view(*value.shape[:-1], k)
    return value.topk(k, sorted=False).indices.sort(-1).values  # whose shape does not depend on what it finds


def _sizes(total: Tensor, dtype: torch.dtype, n: int) -> Tensor:
    """The integers that float64 sums of n probabilities of a dtype stand for."""
    k = total.nan_to_num().round().long()  # NaN is for the checks to find
    if not is_half(dtype) or not looks_at_contents(total):
        return k
    for other in (k - 1, k + 1):
        doubtful = (other >= 0) & (other <= n) & capped_simplex(other.clamp(min=0)).is_sum(total, dtype, n)
        if doubtful.any():
            first = total[doubtful][0].item()
            raise ValueError(
                f"`k` must be given with `probs` in {dtype}, whose rounded entries sum to {first:.6g} and may stand "
                f"for a size of {other[doubtful][0]} as well as {k[doubtful][0]}: pass k=..., or `probs` in float32"
            )
    return k
