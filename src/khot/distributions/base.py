"""The base of designs, relaxed laws and the estimators that wrap designs: the members that users call, and checks."""

from collections.abc import Callable, Sequence
from inspect import signature
from itertools import filterfalse
from typing import Any, ClassVar, TypeVar, cast

import torch
from pyro.distributions import MaskedDistribution, TorchDistribution
from torch import Size, Tensor
from torch.distributions import Distribution, Independent, constraints
from torch.distributions.utils import lazy_property
from torch.types import _size as SizeLike
from typing_extensions import Self

from khot._contents import can_look, has_contents, is_finite
from khot._shapes import broadcast_shapes
from khot._torch_internals import all_true, is_recorded, is_traced_by_mode, transform_level
from khot._validation import check_generator, check_value, checked_expansion, checked_shape, name_init
from khot.laws.once import Once

from ._arguments import in_short
from .entry import count_of_writes, entry

Law = TypeVar("Law", bound="KHotDistribution")

WIDE = torch.float32.itemsize
RELAXED_ADVICE = "\nentries between 0 and 1 are relaxed: relax the model too (khot.infer.KHotReparam)"
ORDINARY = {torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.bool}  # of most values


class lazy(lazy_property):  # type: ignore[type-arg]
    """A value that is computed from the parameters at the first need, for all later calls, with its graph.

    A value made inside a transform or tracer that the law itself was not made in belongs to it, and is not remembered.
    """

    def __get__(self, instance: Any, obj_type: Any = None) -> Any:
        if instance is None:
            return super().__get__(None, obj_type)
        if torch.is_inference_mode_enabled():
            with torch.inference_mode(False), torch.set_grad_enabled(not instance.parameter.is_inference()):
                value = self.wrapped(instance)
        elif torch.is_grad_enabled():
            value = self.wrapped(instance)
        else:
            with torch.enable_grad():
                value = self.wrapped(instance)
        if instance._level == transform_level() and not is_traced_by_mode():
            vars(instance)[self.wrapped.__name__] = value
        return value


def _lacking(name: str) -> Callable[..., Any]:
    """A member of a law that does not have it."""

    def member(law: Any, *_: Any) -> Any:
        raise NotImplementedError(f"{type(law).__name__} has no {name}")

    return member


class KHotDistribution(TorchDistribution):
    """A distribution over vectors of n units, whose members, shapes and values are checked in one place.

    A subclass defines its law in members with an underscore: ``_log_prob``, ``_sample`` or ``_rsample``, ``_mean`` and
    so on, and as ``lazy`` properties what several of these share. They compute in ``_wide``, the parameter in at least
    float32. The members that users call check their arguments and convert results to ``dtype``: in a half type, rounded
    probabilities do not sum to k, rounded noise has ties, and rounded moments cancel.

    A law is immutable. It counts the writes to its tensors, and all of its members raise a RuntimeError after one.

    With validation on, contents are checked if there are any, which is not so for meta tensors and fake tensors.

    Attributes:
        parameter: The tensor that the law was made from.
        parameter_name: The name of this argument.
        dtype: The dtype of draws and of results.
    """

    parameter: Tensor
    parameter_name: str
    dtype: torch.dtype
    _provenance: frozenset[Any] = frozenset()  # the dependencies of parameters that are Pyro's provenance tensors
    _wide: Tensor
    _shared_k: int | None = None  # the size, if it is known to be the same in all rows
    _known_constraints: ClassVar[Any] = None  # those of the class of this library that it is or derives from
    _tensors: list[Tensor]  # the arguments that are tensors
    _counted: Sequence[Tensor] = ()  # `_tensors`, without those whose writes torch does not count
    _writes: int

    def __init_subclass__(cls, *, is_base: bool = False, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if cls.__module__.startswith("khot."):
            cls._known_constraints = cls.arg_constraints
        if "__init__" not in vars(cls):
            name_init(cls)
        if not is_base:  # of which there are no instances
            cls.__init__ = entry(cls.__init__)  # type: ignore[method-assign]

    def __init__(
        self, batch_shape: Size = Size(), event_shape: Size = Size(), validate_args: bool | None = None
    ) -> None:
        self._batch_shape, self._event_shape = batch_shape, event_shape  # torch's __init__ has slower checks
        if validate_args is not None:
            self._validate_args = validate_args
        self._begin()
        if self._validate_args:
            self._validate_parameters()

    def _begin(self) -> None:
        """Prepares a law after its parameters have been set."""
        own = self.__dict__
        self._tensors = [x for x in own.values() if isinstance(x, Tensor)]
        self._kept, self._level = Once(), transform_level()
        self._counted = list(filterfalse(Tensor.is_inference, self._tensors))
        self._writes = sum(map(count_of_writes, self._counted))
        if "parameter" in own:
            narrow = self.parameter.dtype.itemsize < WIDE
            self._wide = own[f"_{self.parameter_name}"] = self._widened() if narrow else self.parameter

    def _widened(self) -> Tensor:
        """The parameter in float32."""
        return self.parameter.float()

    # What users call.

    @entry
    def sample(self, sample_shape: SizeLike = Size(), *, generator: torch.Generator | None = None) -> Tensor:
        """Draws without gradient, ``sample_shape + batch_shape + event_shape``.

        Args:
            sample_shape: Shape of the independent draws.
            generator: Source of randomness on the device of the parameters; by default torch's own. Inside a vmap its
                numbers follow ``randomness``, as those of the default one do. An activation checkpoint resets only the
                default one, so its second run raises a RuntimeError with any other.
        """
        shape, drawn = self._checked_draw(sample_shape, generator), self._rsample if self.has_rsample else self._sample
        with torch.no_grad():
            return self._rounded(drawn(shape, generator))

    @entry
    def rsample(self, sample_shape: SizeLike = Size(), *, generator: torch.Generator | None = None) -> Tensor:
        """Draws with a gradient; the arguments are those of ``sample``."""
        return self._rounded(self._rsample(self._checked_draw(sample_shape, generator), generator))

    @entry
    def log_prob(self, value: Tensor) -> Tensor:
        """Log-probability of values ``(*sample_shape, *batch_shape, *event_shape)``."""
        return self._rounded(self._score(value))

    @property
    @entry
    def mean(self) -> Tensor:
        return self._rounded(self._mean)

    @property
    @entry
    def variance(self) -> Tensor:
        return self._rounded(self._variance)

    @property
    @entry
    def mode(self) -> Tensor:
        """The most probable value."""
        return self._rounded(self._mode())

    @entry
    def entropy(self) -> Tensor:
        """Entropy in nats, of the batch shape."""
        return self._rounded(self._entropy())

    @entry
    def enumerate_support(self, expand: bool = True) -> Tensor:
        """All values of the support along a new first dimension: by size, then in lexicographic order of positions.

        Raises:
            NotImplementedError: If rows differ in ``k``.
            ValueError: If there are more than ``MAX_SUPPORT`` (1,000,000) values.
        """
        return cast(Tensor, self._enumerated_support(expand))

    @property
    @entry
    def logits(self) -> Tensor:
        """The scores from which ``probs`` were computed, or the natural parameters of the law."""
        return self._rounded(self._logits)

    @constraints.dependent_property(is_discrete=True, event_dim=1)
    @entry
    def support(self) -> constraints.Constraint:
        return cast(constraints.Constraint, self._support)

    @classmethod
    def infer_shapes(cls, **arg_shapes: Size) -> tuple[Size, Size]:
        param = arg_shapes["probs"] if "probs" in arg_shapes else arg_shapes["logits"]
        return broadcast_shapes(param[:-1], arg_shapes.get("k", Size())), Size(param[-1:])

    def __repr__(self) -> str:
        shown = {self.parameter_name: self.parameter, "k": self._size}
        shown |= {name: getattr(self, name) for name in self._settings}
        return f"{type(self).__name__}({', '.join(f'{name}: {in_short(value)}' for name, value in shown.items())})"

    @entry
    def expand(self, batch_shape: SizeLike, _instance: Any = None) -> Self:
        new = object.__new__(type(self)) if _instance is None else _instance
        batch_shape, batch_dim = checked_expansion(batch_shape, self.parameter, self.batch_shape), len(self.batch_shape)
        laws: dict[int, Any] = {}  # a design that is also the scorer stays one, so that they share a graph

        def expanded(value: Any) -> Any:
            if id(value) not in laws:
                is_law = isinstance(value, KHotDistribution)
                laws[id(value)] = value.expand(batch_shape + (() if is_law else value.shape[batch_dim:]))
            return laws[id(value)]

        kinds, given = (Tensor, KHotDistribution), self.__getstate__() | {"_batch_shape": batch_shape}
        wider = {name: expanded(value) for name, value in vars(self).items() if isinstance(value, kinds)}
        new.__setstate__(given | {name: value for name, value in wider.items() if name in given})
        new.__dict__.update(wider)
        if batch_shape == self.batch_shape:
            new._kept = self._kept
        return cast(Self, new)

    def _checked_draw(self, sample_shape: Any, generator: Any) -> Size:
        check_generator(generator, self.parameter.device)
        return checked_shape("sample_shape", sample_shape)

    def _rounded(self, result: Tensor) -> Tensor:
        """A result in the dtype of the law, converted by way of float32, in which users without half types get it."""
        if result.dtype == self.dtype:
            return result
        wide = result.float() if self._wide.dtype == torch.float32 else result.double()  # twice as fast as `to`
        return wide if wide.dtype == self.dtype else wide.to(self.dtype)

    # What a subclass defines, without checks and in any dtype: those below, if it has them, and the lazy properties
    # `_logits` and `_support`.

    _size: Any  # `k` as an int if it is known to be the same in all rows, otherwise as it was given
    _settings: ClassVar[tuple[str, ...]] = ()  # arguments that `repr` shows
    _mean: Any = property(_lacking("mean"))
    _variance: Any = property(_lacking("variance"))
    _mode: Any = _lacking("mode")
    _entropy: Any = _lacking("entropy")
    _enumerated_support: Any = _lacking("enumerate_support")
    _rsample: Any = _lacking("rsample")  # takes (shape, generator) and draws `(*shape, *batch_shape, *event_shape)`
    _sample: Any = _lacking("sample")  # likewise, for a law without rsample
    _log_prob: Any = _lacking("log_prob")  # of values in the support
    _value: Any  # a value in the support, on the device of another, which is scored in place of those outside

    # The same law in other forms.

    @entry
    def __getstate__(self) -> dict[str, Any]:
        """The state for copies and pickles, without computed values, whose graph cannot be copied."""
        kind, made = type(self), ("_wide", "_kept", "_level", "_tensors", "_counted", "_writes")
        return {
            name: value
            for name, value in vars(self).items()
            if name not in made and not isinstance(getattr(kind, name, None), lazy_property)
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._begin()

    def _with(self, **state: Any) -> Self:
        """This law with other attributes and all values that were computed so far."""
        new = object.__new__(type(self))
        new.__dict__.update(self.__dict__, **state)
        return new

    def _unrounded(self) -> Self:
        return self if self._wide.dtype == self.dtype else self._with(parameter=self._wide, dtype=self._wide.dtype)

    # Checks of the parameters.

    def _validate_parameters(self) -> None:
        looks = can_look(*self._tensors)
        if looks:
            is_usual = len(self._tensors) == 1 and self.arg_constraints is self._known_constraints
            if is_usual and (is_finite(self._wide) if self.parameter_name == "logits" else self._fits()):
                return
        if looks or _is_reducible(*self._tensors):  # in transforms of torch.func, only these can be made
            self._validate_constraints()
        if looks:
            self._validate_contents()

    def _fits(self) -> bool:
        """Whether one quick test shows that ``probs`` will pass all checks, each of which serves one error message."""
        return False

    def _validate_constraints(self) -> None:
        """Checks the ``arg_constraints`` of the tensors that were given, as torch does."""
        given = vars(self) | {self.parameter_name: self._wide, "k": vars(self).get("_low")}
        for name, constraint in self.arg_constraints.items():
            value = given.get(name)
            if isinstance(value, Tensor) and not all_true(constraint.check(value)):
                raise ValueError(
                    f"Expected parameter {name} ({type(value).__name__} of shape {tuple(value.shape)}) of distribution "
                    f"{self!r} to satisfy the constraint {constraint!r}, but found invalid values:\n{value}"
                )

    def _validate_contents(self) -> None:
        """Checks the contents of the parameters, beyond their ``arg_constraints``."""

    def _checks_contents(self, *tensors: Tensor) -> bool:
        """Whether validation is on, and the checks of this library can read these tensors and the parameters."""
        return bool(self._validate_args) and can_look(*tensors, *self._tensors)

    # Checks of values.

    def _score(self, value: Tensor) -> Tensor:
        """``_log_prob`` of values in the support, ``-inf`` elsewhere, or an error with validation on."""
        if self._is_in_support(value):
            return self._log_prob(value)
        self._check_sample(value)
        if self._validate_args and self._shared_k is not None:
            return self._log_prob(value)
        inside = self._support.check(value)
        value = torch.where(inside.unsqueeze(-1), value, self._value(value))
        return self._log_prob(value).masked_fill(~inside, -torch.inf)

    def _is_in_support(self, value: Any) -> bool:
        """Whether one quick test shows that a value will pass all checks, which are slower: each serves one message."""
        if not isinstance(value, Tensor) or value.dtype not in ORDINARY or value.layout is not torch.strided:
            return False
        if value.is_nested or not can_look(value, *(() if self._shared_k is not None else self._tensors)):
            return False
        wanted, shape, holds = self._batch_shape + self._event_shape, value.shape, getattr(self._support, "holds", None)
        if (shape != wanted and shape[len(shape) - len(wanted) :] != wanted) or holds is None:
            return False
        return bool((self._validate_args or value.is_cpu) and holds(value.detach()))

    def _check_sample(self, value: Any) -> None:
        """Checks the type of a value, and with validation on its shape and contents."""
        check_value(value)
        if self._validate_args:
            self._validate_sample(value)

    def _validate_sample(self, value: Tensor) -> None:
        """Checks a value as torch does; but if rows differ in k, a value for several rows must fit only one of them."""
        try:
            shape = broadcast_shapes(value.shape, self.batch_shape + self.event_shape)
        except RuntimeError:
            shape = Size()
        if value.shape[-1:] != self.event_shape or not shape:
            raise ValueError(
                f"a value must match event_shape, {tuple(self.event_shape)}, on its last axis and broadcast with "
                f"batch_shape, {tuple(self.batch_shape)}, but got {tuple(value.shape)}"
            )
        if not _is_reducible(value, *self._tensors) or self._is_in_support(value):
            return
        inside = self._support.check(value)
        if all_true(inside):
            return
        if not can_look(inside) or not (inside.long().sum_to_size(value.shape[:-1]) > 0).all():
            is_relaxed = self._support.is_discrete and can_look(value) and ((value > 0) & (value < 1)).any()
            raise ValueError(
                f"Expected value argument ({type(value).__name__} of shape {tuple(value.shape)}) to be within the "
                f"support ({self._support!r}) of the distribution {self!r}, but found invalid values:\n{value}"
                f"{RELAXED_ADVICE if is_relaxed else ''}"
            )


def _is_reducible(*tensors: Tensor) -> bool:
    """Whether torch can reduce a condition on these tensors to a bool, if not Python, as inside a vmap."""
    return has_contents(*tensors) and not any(map(is_recorded, tensors))


def unrounded(law: Law) -> Law:
    """The same law with results in float32 if its dtype is a half type, for further computations; otherwise itself.

    With the same seed its draws are those of the law. Gradients reach the parameter of the law, rounded once.
    """
    return law._unrounded()


def is_half(dtype: torch.dtype) -> bool:
    """Whether a dtype has fewer digits than float32, which is then used for all arithmetic."""
    return dtype.itemsize < WIDE


def column(value: float | Tensor) -> float | Tensor:
    """A number as it is, or a tensor of the batch shape with a last dimension added for the units."""
    return value.unsqueeze(-1) if isinstance(value, Tensor) else value


def draw(
    design: Distribution, sample_shape: SizeLike, generator: torch.Generator | None = None, method: str = "sample"
) -> Tensor:
    """``design.sample`` or ``design.rsample``, passing on a generator if one is given and the distribution takes one.

    Raises:
        TypeError: If the distribution takes no generator.
    """
    if generator is None:
        return cast(Tensor, getattr(design, method)(sample_shape))
    source: Any = design
    while isinstance(source, (Independent, MaskedDistribution)):  # these draw from what they wrap
        source = source.base_dist
    drawn_by = getattr(source, method)
    if "generator" not in signature(drawn_by).parameters:
        raise TypeError(f"`generator` must be None here: {type(source).__name__}.{method} takes no generator")
    return cast(Tensor, drawn_by(sample_shape, generator=generator))
