"""Operators of ``torch.ops.khot``: one operation each, whose backends are registered by name.

    mask = Operator("threshold_mask", exact.mask, fake=_fake)
    mask.backend("triton", module=".triton_forward", takes=only_if(_is_narrow, "rows of more than 4096 take longer"))
    mask.backend("numba", module=".numba_backend")

A compiled graph keeps an operator whole. An eager call bypasses torch's dispatcher, which costs tens of microseconds,
and at the first call the import of torch's compiler.

The first backend without a reason to refuse a call computes it; if all refuse, plain torch does. A backend refuses

* if another one was requested by name;
* if it does not support the device, see :mod:`khot.kernels.operators.platforms`, or there is nothing to compute;
* if its ``takes`` gives a reason, such as a dtype that it has no loop for;
* if something prevents it from running, such as a library that is not installed.

What depends on the device alone is found out once. ``takes`` is asked at each call, as it may depend on the shape.

At the level ``DEBUG`` the logger ``khot`` tells which backend computes a call, and these reasons. The module of a
backend is imported at the first call that it computes.

``KHOT_BACKEND`` in the environment, or :func:`backend` around a piece of code, requests a backend for every operation:

    auto     the fastest one available: Triton on accelerators that it supports, numba on a CPU, torch elsewhere (the
             default)
    torch    plain torch everywhere
    numba    numba if an operation has loops for the call, or an error that says why they cannot run
    triton   Triton if an operation has a kernel for the call, or an error that says why it cannot run; on a CPU only
             in its interpreter (``TRITON_INTERPRET=1``)

Plain torch computes everything that the requested backend does not support.
"""

import functools
import importlib
import inspect
import logging
import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from khot._torch_internals import eager_dispatcher, no_view

from .call import Call, call_of
from .operators.autograd import move_batch_first
from .operators.platforms import MAX_N, PLATFORMS, lacks_triton, warn_without_triton

log = logging.getLogger("khot")

LONG_DRAW, MANY_DRAWS = 2**17, 32  # draws of more units get one program each only if there are this many of them

BACKENDS = ("auto", "torch", *PLATFORMS)


def _checked(name: str, source: str) -> str:
    if name not in BACKENDS:
        raise ValueError(f"{source} must be one of {', '.join(BACKENDS)}, but got {name!r}")
    return name


_wanted = _checked(os.environ.get("KHOT_BACKEND") or "auto", "KHOT_BACKEND")  # an empty variable counts as unset


@contextmanager
def backend(name: str) -> Iterator[None]:
    """Forces a backend inside a ``with`` block, for all threads and every operation.

    Args:
        name: "auto", "torch", "numba" or "triton".

    Raises:
        ValueError: If there is no such backend.

    Example:
        >>> import khot.kernels
        >>> with khot.kernels.backend("torch"):
        ...     sigmoid_topk(torch.zeros(4), 2)
        tensor([0.5000, 0.5000, 0.5000, 0.5000])
    """
    previous = _wanted
    _request(_checked(name, "`name`"))
    try:
        yield
    finally:
        _request(previous)


def _request(name: str) -> None:
    global _wanted
    _wanted = name
    for operation in _EVERY:
        operation.known.clear()


Takes = Callable[..., str | None]


def only_if(holds: Callable[..., bool], otherwise: str) -> Takes:
    """``takes`` for a backend that takes only calls of which a condition holds; ``otherwise`` explains a refusal."""
    return lambda *asked: None if holds(*asked) else otherwise


class Backend(NamedTuple):
    """One way to compute an operation.

    Attributes:
        name: Name of its platform.
        load: Imports the code that computes it.
        takes: The reason why it does not compute a call, by dtype and size; None if it does.
    """

    name: str
    load: Callable[[], Any]
    takes: Takes

    def on(self, device: torch.device) -> Any:
        """Its code, imported; None if something prevents it from running, with a warning if only Triton is missing.

        Raises:
            RuntimeError: If the backend was requested and cannot run, and there are contents to compute with.
        """
        obstacle = PLATFORMS[self.name].obstacle(device)
        if obstacle is None:
            return self.load()
        if self.name == _wanted and device.type != "meta":
            raise RuntimeError(f"backend {self.name!r} is forced, but {obstacle}")
        if self.name == "triton" and lacks_triton():
            warn_without_triton()
        return None


class Backends:
    """The ways to compute an operation, registered by name.

    What there is to know about a device is found out once, and kept until another backend is requested.

    Args:
        package: The package of their modules.
        attribute: The name under which a module has the code: a function of the same arguments, or a record of
            functions.
    """

    def __init__(self, package: str, attribute: str) -> None:
        self.package, self.attribute, self.registered = package, attribute, list[Backend]()
        self.name = attribute.lower()
        self.known = dict[Any, Any]()  # by device the backends and their code; by what a call depends on, its code
        _EVERY.append(self)

    def backend(self, name: str, *, module: str, takes: Takes = lambda *asked: None) -> None:
        """Registers a backend, after those that are already registered.

        Args:
            name: Name of its platform, a key of ``PLATFORMS``.
            module: Its module, relative to the package; imported at the first call that it computes.
            takes: Gives the reason why the backend does not compute a call, or None if it does; see :func:`only_if`.
                Its arguments are what the operation asks its backends about a call; the first is a tensor.
        """
        load = functools.cache(lambda: getattr(importlib.import_module(module, self.package), self.attribute))
        self.registered.append(Backend(name, load, takes))

    def find(self, *asked: Any) -> Any:
        """The code of the first backend that takes this call and runs here, imported; None if none does.

        Raises:
            RuntimeError: If the requested backend takes the call but cannot run here.
        """
        if log.isEnabledFor(logging.DEBUG):
            self.tell(*asked)
        return self.look_up(*asked)

    def look_up(self, *asked: Any) -> Any:
        """:meth:`find` without a line in the log."""
        for choice, code in self._offered(asked[0]):
            if choice.takes(*asked) is None:
                found = code()
                if found is not None:
                    return found
        return None

    def fuses(self, *asked: Any) -> bool:
        """Whether a backend should compute this call; this does not test whether it is installed."""
        return any(choice.takes(*asked) is None for choice, _ in self._offered(asked[0]))

    def _offered(self, x: Tensor) -> tuple[tuple[Backend, Callable[[], Any]], ...]:
        """The backends for this device, unless the shape is for none, each with a function that gives its code."""
        if _unfit(x):
            return ()
        device = x.device
        if device not in self.known:
            self.known[device] = tuple(
                (choice, functools.cache(functools.partial(choice.on, device)))
                for choice in self.registered
                if _elsewhere(choice.name, device) is None
            )
        found: tuple[tuple[Backend, Callable[[], Any]], ...] = self.known[device]
        return found

    def tell(self, *asked: Any) -> None:
        """Writes to the log which backend computes a call, and why not one that comes before it."""
        x, told, by = asked[0], "", "torch"
        for choice in self.registered:
            reason = (
                _elsewhere(choice.name, x.device)
                or _unfit(x)
                or choice.takes(*asked)
                or PLATFORMS[choice.name].obstacle(x.device)
            )
            if reason is None:
                by = choice.name
                break
            told += f"; not on {choice.name}: {reason}"
        log.debug("%s runs on %s%s", self.name, by, told)

    def named(self, name: str) -> Any:
        """The code of the backend of this name, imported; None if it has none.

        For calls for which that backend has already been chosen by another operation.
        """
        return next((choice.load() for choice in self.registered if choice.name == name), None)

    def is_fused(self, *asked: Any) -> bool:
        """Whether a backend computes this call."""
        return self.find(*asked) is not None


_EVERY = list[Backends]()


def _unfit(x: Tensor) -> str | None:
    """The reason why no backend computes calls on tensors ``(..., n)`` of this shape."""
    if x.numel() == 0:
        return "there is nothing to compute"
    return "columns of a row are counted in 32 bits" if x.shape[-1] > MAX_N else None


def _elsewhere(name: str, device: torch.device) -> str | None:
    """The reason why calls on a device are not for this backend, by what was requested."""
    if _wanted != "auto":
        return None if name == _wanted else f"the requested backend is {_wanted}"
    return None if device.type in PLATFORMS[name].devices else PLATFORMS[name].elsewhere


class Operator(Backends):
    """An operation, registered as ``khot::name``; not differentiable itself, but its callers may be.

    Args:
        name: Its name in ``torch.ops.khot``.
        plain: The operation in plain torch, for every call: a function of the operator's typed arguments. The first is
            a tensor, whose device decides. A backend's module has a function of the same name and arguments.
        fake: Empty results for arguments without data.
        asks: Maps the arguments to what backends are asked about a call, a tensor first; by default the arguments.
        batch: Rule for ``torch.vmap``, as ``torch.library.register_vmap`` takes it. By default the batch becomes the
            first dimension of every tensor and result, and an argument ``check`` becomes False, because the contents of
            a batch are not checked. False for an operation that is called only by autograd Functions with their own
            rules.
    """

    def __init__(
        self,
        name: str,
        plain: Callable[..., Any],
        *,
        fake: Callable[..., Any],
        asks: Callable[..., tuple[Any, ...]] = lambda *args: args,
        batch: Callable[..., Any] | bool = True,
    ) -> None:
        super().__init__(plain.__module__.rpartition(".")[0], plain.__name__)
        functools.update_wrapper(self, plain)
        self.name, self.plain, self.asks = name, plain, asks
        self.parameters = tuple(inspect.signature(plain).parameters)
        self._definition = define(name, functools.wraps(plain)(lambda *args: self.implementation(*args)(*args)))
        self._definition.register_fake(fake)
        if batch:
            self._definition.register_vmap(self._batch_first if batch is True else batch)
        OPERATORS[name] = self

    def __call__(self, *args: Any) -> Any:
        return self.within(call_of(*args), *args)

    def within(self, call: Call, *args: Any) -> Any:
        """The results for these arguments, in a call of known kind."""
        if not call.is_plain:
            return self._definition(*args)
        with torch.no_grad():
            results = self.implementation(*args)(*args)
            if isinstance(results, Tensor):
                return no_view(results)
            first = no_view(results[0])
            return results if first is results[0] else (first, *results[1:])

    def implementation(self, *args: Any) -> Callable[..., Any]:
        """The function that computes this call.

        Raises:
            RuntimeError: If the requested backend takes the call but cannot run here.
        """
        found: Callable[..., Any] = self.find(*self.asks(*args)) or self.plain
        return found

    def _batch_first(self, info: Any, in_dims: Sequence[int | None], *args: Any) -> tuple[Any, Any]:
        at = [i for i, value in enumerate(args) if isinstance(value, Tensor)]
        moved = move_batch_first(info.batch_size, [in_dims[i] for i in at], [args[i] for i in at])
        batched = list(args)
        for i, value in zip(at, moved, strict=True):
            batched[i] = value
        if "check" in self.parameters:
            batched[self.parameters.index("check")] = False
        results = self(*batched)
        return results, 0 if isinstance(results, Tensor) else (0,) * len(results)


OPERATORS: dict[str, Operator] = {}


class DrawOperator(Operator):
    """An operation that draws: a function of parameters and a seed.

    Args:
        name: Its name in ``torch.ops.khot``.
        plain: The operation in plain torch, ``function(*parameters, seed, draws, dtype, ...)``. The first of the
            parameters is ``(*batch, n)``, the others ``(*batch, ...)``; the seed is from
            :func:`~khot.kernels.random_numbers.philox.draw_seed`, and the result ``(draws, *batch, n)``, of the dtype.
            What a draw of a row is depends on its number and that of the row, not on how many there are.

    Backends are asked about the first parameter and the number of draws.
    """

    def __init__(self, name: str, plain: Callable[..., Tensor]) -> None:
        super().__init__(name, plain, fake=self._fake, asks=self._first_and_draws, batch=self._batch)

    @staticmethod
    def fills_device(x: Tensor, draws: int) -> str | None:
        """``takes`` for backends with one program per draw."""
        n, rows = x.shape[-1], math.prod(x.shape[:-1])
        if draws > 0 and n > LONG_DRAW and draws * rows < MANY_DRAWS:
            return "torch spreads a long row over the whole device, and there are too few draws for a program each"
        return DrawOperator.has_draws(x, draws)

    @staticmethod
    def has_draws(x: Tensor, draws: int) -> str | None:
        """``takes`` for backends that make any positive number of draws."""
        return None if draws > 0 else "there is nothing to draw"

    @functools.cached_property
    def _seed(self) -> int:
        """The index of the seed among the arguments; the number of draws comes after it."""
        return self.parameters.index("seed")

    def _first_and_draws(self, *args: Any) -> tuple[Any, ...]:
        return args[0], args[self._seed + 1]

    def kernel(self, x: Tensor, draws: int) -> Callable[..., Tensor] | None:
        """The function that makes the draws for parameters x; None for plain torch, which may use torch's generators.

        Inside a vmap it is the operator, even if x is not mapped, because the seed may be.
        """
        call = call_of(x)
        if not call.is_plain:
            return self if self.fuses(x, draws) else None
        found: Callable[..., Tensor] | None = self.find(x, draws)
        return None if found is self.plain else found

    def _fake(self, *args: Any) -> Tensor:
        draws, dtype = args[self._seed + 1 : self._seed + 3]
        return args[0].new_empty((draws, *args[0].shape), dtype=dtype)

    def _batch(self, info: Any, in_dims: Sequence[int | None], *args: Any) -> tuple[Tensor, int]:
        parameters = move_batch_first(info.batch_size, in_dims, args[: self._seed])
        seed, options = args[self._seed], args[self._seed + 1 :]
        seed_dim = in_dims[self._seed]
        if seed_dim is None:  # the same randomness for the whole batch
            return torch.stack([self(*row, seed, *options) for row in zip(*parameters, strict=True)]), 0
        return self(*parameters, seed.movedim(seed_dim, 0)[0], *options), 1  # draws and rows have their own numbers


def define(name: str, function: Callable[..., Any]) -> Any:
    """Registers a function as ``khot::name``, inside which all parts of torch except autograd work.

    Its arguments that are given by keyword only are no arguments of the operator.
    """
    signature = inspect.signature(function)
    taken = [parameter for parameter in signature.parameters.values() if parameter.kind is not parameter.KEYWORD_ONLY]

    @functools.wraps(function)
    def below_dispatcher(*args: Any) -> Any:
        with eager_dispatcher(), torch.no_grad():
            return function(*args)

    below_dispatcher.__signature__ = signature.replace(parameters=taken)  # type: ignore[attr-defined]
    return torch.library.custom_op(f"khot::{name}", below_dispatcher, mutates_args=())
