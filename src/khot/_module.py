"""The shared part of the modules: buffers that keep their dtype, and numbers that may be assigned at any time."""

import functools
import inspect
from collections.abc import Callable
from typing import Any, ClassVar, ParamSpec

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.nn.utils.parametrize import is_parametrized

from khot._distributed.placements import as_dtensor, is_dtensor
from khot._refusals import refuse_trace
from khot._torch_internals import is_exporting
from khot._validation import name_init

P = ParamSpec("P")


class Module(torch.nn.Module):
    """A module whose state survives casts and whose numbers may change.

    * Casts such as ``module.bfloat16()`` change only parameters. Buffers keep their dtype, because a running average in
      half precision stops as soon as its steps are smaller than the spacing of the numbers.
    * An attribute named in ``_numbers`` may be assigned at any time. A compiled graph treats it as a constant until it
      changes, and reads it from a tensor from then on, so annealing it costs one recompilation.
    * :meth:`reset_parameters` gives parameters and buffers the values that they have at construction. FSDP calls it,
      and so does code that makes a model by ``to_empty``.
    * State dictionaries in which a parameter of shape (1,) has no axes can be loaded.
    """

    _numbers: ClassVar[tuple[str, ...]] = ()
    _what_others_take = ""  # advice on arguments that other libraries take by position here

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        name_init(cls)
        cls.__init__ = _with_keywords_named(cls.__init__)  # type: ignore[method-assign]

    def __init__(self) -> None:
        super().__init__()
        self._changed: dict[str, Tensor] = {}  # numbers that were assigned since construction, for compiled graphs
        self._start: dict[str, float | Tensor] = {}  # the first values of parameters and buffers

    def reset_parameters(self) -> None:
        """Gives parameters and buffers the values that they have at construction, as after ``to_empty``."""
        for name, value in self._start.items():
            if isinstance(value, Tensor) and value.is_meta:
                raise RuntimeError(
                    f"`{name}` of {type(self).__name__} was given as a tensor without data, so its first values are "
                    "not known: give a number or a tensor with data, or load a state"
                )
            self._overwrite(name, value)

    def _checked(self, name: str, value: Any) -> Any:
        """The checked value for an attribute in ``_numbers``; raises if it is invalid."""
        return value

    def _number(self, name: str) -> Any:
        """An attribute in ``_numbers``; in a compiled graph a tensor, if it has changed since construction."""
        if torch.compiler.is_compiling() and not is_exporting() and name in self._changed:
            return self._changed[name]
        return getattr(self, name)

    def _overwrite(self, name: str, value: float | Tensor) -> None:
        """Writes a number, or numbers, into a parameter or buffer, through the inverses of its parametrisations."""
        with torch.no_grad():
            own, is_computed = getattr(self, name), is_parametrized(self, name)
            new = own.clone() if is_computed else own
            if is_dtensor(new) and isinstance(value, Tensor):
                value = as_dtensor(name, value.to(new.device), name, new.device_mesh)
            new.copy_(value) if isinstance(value, Tensor) else new.fill_(value)
            if is_computed:
                super().__setattr__(name, new)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self._numbers:
            if not isinstance(value, Parameter):  # FSDP replaces the parameter with its shards
                value = self._checked(name, value)
            if isinstance(value, (int, float)) and (name in self._changed or self.__dict__.get(name, value) != value):
                dtype = torch.int64 if isinstance(value, int) else torch.float64
                with torch.inference_mode(False):  # a graph that trains cannot save a tensor of inference mode
                    self._changed[name] = torch.tensor(value, dtype=dtype, device="cpu")
            else:
                self._changed.pop(name, None)
        super().__setattr__(name, value)

    def _slow_forward(self, *args: Any, **kwargs: Any) -> None:
        """Raises; ``torch.jit.trace`` calls it in place of ``forward``."""
        refuse_trace()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Module":
        before = dict(self._buffers)
        super()._apply(fn, recurse)
        for name, buffer in before.items():
            moved = self._buffers[name]
            if buffer is not None and moved is not None and moved.dtype != buffer.dtype:
                self._buffers[name] = buffer.to(moved.device)
        return self

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any], *args: Any
    ) -> None:
        assigns = local_metadata.get("assign_to_params_buffers", False)
        for name, own in (*self._parameters.items(), *self._buffers.items()):
            saved = state_dict.get(prefix + name)
            if own is None or not isinstance(saved, Tensor):
                continue
            if saved.dim() == 0 and own.shape == (1,):
                saved = saved.reshape(1)
            if name in self._buffers:
                saved = saved.to(own.dtype)
                if assigns and saved.shape == own.shape:
                    self._buffers[name] = saved  # a setter would copy the number, which a meta tensor cannot take
            state_dict[prefix + name] = saved
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *args)


def _with_keywords_named(init: Callable[P, None]) -> Callable[P, None]:
    """The same constructor with an error that names the keywords if too many arguments are given by position."""
    _, *parameters = inspect.signature(init).parameters.values()
    by_position = [f"`{p.name}`" for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    keywords = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]

    @functools.wraps(init)
    def checked(*args: P.args, **kwargs: P.kwargs) -> None:
        given = len(args) - 1
        if keywords and given > len(by_position):
            kind: Any = type(args[0])
            raise TypeError(
                f"{kind.__name__} takes only {' and '.join(by_position)} by position, but got {given} arguments; "
                f"{', '.join(keywords)} are keywords{kind._what_others_take}"
            )
        init(*args, **kwargs)

    return checked


def as_scalar(parameter: Tensor) -> Tensor:
    """A parameter of shape (1,), the smallest that FSDP accepts, as a tensor without axes; any other as it is."""
    return parameter.reshape(()) if parameter.shape == (1,) else parameter
