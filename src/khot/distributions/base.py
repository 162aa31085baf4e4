"""The shared part of designs, relaxed laws and the estimators that wrap designs: their checks and their draws."""

import functools
from collections.abc import Callable
from inspect import signature
from typing import Any, ClassVar, TypeVar, cast

import torch
from pyro.distributions import MaskedDistribution, TorchDistribution
from torch import Size, Tensor
from torch.distributions import Distribution, Independent
from torch.distributions.constraints import Constraint
from torch.distributions.utils import lazy_property
from torch.types import _size as SizeLike
from typing_extensions import Self

from khot._contents import can_look, has_contents
from khot._shapes import broadcast_shapes
from khot._torch_internals import may_record, validates
from khot._validation import check_value, checked_expansion, checked_shape, name_init
from khot.laws.kept import Snapshot

from .entry import entry, unwatched, with_function

Law = TypeVar("Law", bound="KHotDistribution")
R = TypeVar("R")

RESULTS = (  # members that are computed from the parameter; see :meth:`KHotDistribution.in_float32`
    "probs",
    "logits",
    "log_odds",
    "size_probs",
    "mean",
    "variance",
    "pairwise_inclusion",
    "covariance_matrix",
    "mode",
    "sample",
    "sample_indices",
    "log_prob",
    "entropy",
)
ENTRIES = (  # members that users call
    *RESULTS,
    "__init__",
    "expand",
    "rsample",
    "enumerate_support",
    "to_khot",
    "from_scores",
    "attach_gradient",
)


class KHotDistribution(TorchDistribution):
    """A distribution over vectors of n units, whose shapes and values are checked in one place.

    With validation on, contents are checked if there are any, which is not so for meta tensors and fake tensors.

    A law of a half type computes in float32 and rounds its results. Rounded probabilities do not sum to k, rounded
    noise has ties, and rounded moments cancel. So a subclass defines ``RESULTS`` and lazy properties only for tensors
    in float32 or float64. Lazy properties are computed again when the parameters have changed.

    Attributes:
        provenance: What Pyro's provenance tensors among the parameters depend on.
    """

    parameter_name = "logits"
    _lazy: ClassVar[frozenset[str]] = frozenset()  # the members that are computed from the parameter on demand
    _derived: tuple[Snapshot, dict[str, Any]] | None = None  # see `derived`
    _shared_k: int | None = None  # the size, if it is known to be the same in all rows
    _log_prob: Any  # log-probability of values in the support
    provenance: frozenset[Any] = frozenset()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        name_init(cls)
        for name, member in list(vars(cls).items()):
            if isinstance(member, lazy_property):
                member = _Derived(member.wrapped)
            elif name in RESULTS:
                member = with_function(member, _rounded)
            if name in ENTRIES:
                member = with_function(member, entry)
            if member is not vars(cls)[name]:
                setattr(cls, name, member)
        members = [item for base in cls.__mro__ for item in vars(base).items()]
        cls._lazy = frozenset(name for name, member in members if isinstance(member, lazy_property))

    def __init__(
        self, batch_shape: Size = Size(), event_shape: Size = Size(), validate_args: bool | None = None
    ) -> None:
        self._batch_shape, self._event_shape = batch_shape, event_shape  # torch's __init__ checks come below
        if validate_args is not None:
            self._validate_args = validate_args
        if self._validate_args:
            self._validate_parameters(validate_args)

    def _validate_parameters(self, validate_args: bool | None) -> None:
        tensors = self._tensors()
        looks = can_look(*tensors)
        if looks:
            if self._fits():
                return
            self._validate_range()
        # Inside transforms of torch.func, torch's own checks can read the contents.
        if looks or (has_contents(*tensors) and validates(*tensors)):
            super().__init__(self._batch_shape, self._event_shape, validate_args=validate_args)
        if looks:
            self._validate_contents()

    def _fits(self) -> bool:
        """Whether one quick test shows that all checks of the parameters will pass. The checks are slower.

        Each of them serves one error message. False if a subclass has further ``arg_constraints``.
        """
        return False

    def _validate_range(self) -> None:
        """Makes the checks for which torch would raise without advice."""

    def _validate_contents(self) -> None:
        """Checks the contents of the parameters, beyond their ``arg_constraints``."""

    @entry
    def sample(self, sample_shape: SizeLike = Size(), *, generator: torch.Generator | None = None) -> Tensor:
        """Draws without gradient, ``sample_shape + batch_shape + event_shape``.

        Args:
            sample_shape: Shape of the independent draws.
            generator: Source of randomness on the device of the parameters; by default torch's own. Inside a vmap its
                numbers follow ``randomness``, as those of the default one do.
        """
        with torch.no_grad():
            return draw(self, sample_shape, generator, "rsample")

    def expand(self, batch_shape: SizeLike, _instance: Any = None) -> Self:
        new = instance_of(type(self), {}) if _instance is None else _instance
        batch_shape, batch_dim = checked_expansion(batch_shape, self.parameter, self.batch_shape), len(self.batch_shape)
        laws: dict[int, KHotDistribution] = {}  # a design that is also the scorer stays one, so that they share a graph

        def expanded(value: Any) -> Any:
            if isinstance(value, KHotDistribution):
                return laws.get(id(value)) or laws.setdefault(id(value), value.expand(batch_shape))
            return value.expand(batch_shape + value.shape[batch_dim:]) if isinstance(value, Tensor) else value

        new.__dict__.update({name: expanded(value) for name, value in vars(self).items() if name != "_derived"})
        if self._derived is not None:
            new._derived_now().update({name: expanded(value) for name, value in self._derived_now().items()})
        KHotDistribution.__init__(new, batch_shape, self.event_shape, validate_args=False)
        new._validate_args = self._validate_args
        return cast(Self, new)

    @property
    def parameter(self) -> Tensor:
        """The tensor that the law was constructed from, as ``parameter_name`` says."""
        return cast(Tensor, self.__dict__[self.parameter_name])

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the parameter, of draws and of results."""
        return self.parameter.dtype

    @property
    def in_float32(self: Law) -> Law:
        """The same law with results in float32 if its dtype is a half type, for further computations; otherwise self.

        With the same seed its draws are those of this law. Gradients reach the parameter of this law, rounded once.
        """
        if not is_half(self.parameter.dtype):
            return self
        return cast(Law, self.derived("in_float32", type(self)._made_in_float32))

    def _made_in_float32(self) -> "KHotDistribution":
        return instance_of(type(self), self.__getstate__() | {self.parameter_name: self.parameter.float()})

    @property
    def unchecked(self: Law) -> Law:
        """The same law without validation: values outside the support have a log-probability, too."""
        return instance_of(type(self), self.__getstate__() | {"_validate_args": False})

    @unwatched
    def derived(self, name: str, make: Callable[[Any], Any]) -> Any:
        """``make(self)``, computed once, and again when the parameters have changed."""
        found = self._derived_now()
        if name not in found:
            with torch.set_grad_enabled(may_record()):  # later callers may need the graph
                found[name] = make(self)
        return found[name]

    def _derived_now(self) -> dict[str, Any]:
        """The values computed from the current parameters."""
        sources = self._sources()
        if self._derived is None or not self._derived[0].holds(sources):
            self._derived = Snapshot(sources), {}
        return self._derived[1]

    def _sources(self) -> list[Any]:
        """The tensors and numbers that results are computed from."""
        return [self.parameter]

    def __getstate__(self) -> dict[str, Any]:
        """The state for copies and pickles, without computed values, whose graph cannot be copied."""
        return {name: value for name, value in vars(self).items() if name != "_derived"}

    def _tensors(self) -> list[Tensor]:
        return [value for value in vars(self).values() if isinstance(value, Tensor)]

    def _checks_contents(self, *tensors: Tensor) -> bool:
        """Whether validation is on, and the checks of this library can read these tensors and the parameters."""
        return bool(self._validate_args) and can_look(*tensors, *self._tensors())

    def _extended_shape(self, sample_shape: SizeLike = Size()) -> Size:
        return Size(checked_shape("sample_shape", sample_shape) + self.batch_shape + self.event_shape)

    def _validate_sample(self, value: Tensor) -> None:
        """As in torch; but if rows differ in k, a value for several rows, as in enumeration over k, must fit one."""
        check_value(value)
        tensors = value, *self._tensors()
        if not (has_contents(*tensors) and validates(*tensors)):
            self._validate_shape(value)
            return
        if self._is_in_support(value):
            return
        try:
            super()._validate_sample(value)
        except ValueError as error:
            if "within the support" not in str(error) or not can_look(*tensors):
                raise
            fits = cast(Constraint, self.support).check(value)
            if not (fits.long().sum_to_size(value.shape[:-1]) > 0).all():
                raise

    def _log_prob_of_any(self, value: Tensor, some_value: Callable[[], Tensor]) -> Tensor:
        """``_log_prob`` of values in the support, ``-inf`` elsewhere, where ``some_value()`` is scored instead."""
        check_value(value)
        if self._validate_args:
            self._validate_sample(value)
            if self._shared_k is not None:
                return self._log_prob(value)
        if value.device.type == "cpu" and self._is_in_support(value):
            return self._log_prob(value)
        inside = cast(Constraint, self.support).check(value)
        value = torch.where(inside.unsqueeze(-1), value, some_value())
        return self._log_prob(value).masked_fill(~inside, -torch.inf)

    def _is_in_support(self, value: Tensor) -> bool:
        """Whether one quick test shows that a value will pass all checks, which are slower: each serves one message."""
        shape = self._batch_shape + self._event_shape
        if value.shape[value.dim() - len(shape) :] != shape:
            return False
        support: Any = self.support
        return hasattr(support, "holds") and can_look(value, *self._tensors()) and support.holds(value.detach())

    def _validate_shape(self, value: Tensor) -> None:
        try:
            shape = broadcast_shapes(value.shape, self.batch_shape + self.event_shape)
        except RuntimeError:
            shape = Size()
        if value.shape[-1:] != self.event_shape or not shape:
            raise ValueError(
                f"a value must have a shape that broadcasts with batch_shape + event_shape, "
                f"{tuple(self.batch_shape + self.event_shape)}, with the same last axis, but got {tuple(value.shape)}"
            )


class _Derived(lazy_property):  # type: ignore[type-arg]
    """A lazy property whose value is computed again when the parameters of the law have changed."""

    def __get__(self, instance: Any, obj_type: Any = None) -> Any:
        if instance is None:
            return super().__get__(None, obj_type)
        name, law = self.wrapped.__name__, instance.in_float32
        return law.derived(name, self.wrapped) if law is instance else _in_dtype_of(instance, getattr(law, name))


def _rounded(member: Callable[..., Any]) -> Callable[..., Any]:
    """A member of a law: of its form in float32, rounded, if the law has a half type."""

    @functools.wraps(member)
    def call(law: Any, *args: Any, **kwargs: Any) -> Any:
        wide = law.in_float32
        result = member(wide, *args, **kwargs)
        return result if wide is law else _in_dtype_of(law, result)

    return call


def _in_dtype_of(law: KHotDistribution, result: Any) -> Any:
    is_wide = isinstance(result, Tensor) and result.dtype == torch.float32
    return result.to(law.dtype) if is_wide else result


def instance_of(kind: type[R], attributes: dict[str, Any]) -> R:
    """An object with these attributes, made without a call of ``__init__``."""
    new = object.__new__(kind)
    vars(new).update(attributes)
    return new


def is_half(dtype: torch.dtype) -> bool:
    """Whether a dtype has fewer digits than float32, which is then used for all arithmetic."""
    return dtype.itemsize < torch.float32.itemsize


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
