"""Operators of ``torch.ops.khot``: one operation each, whose backends are registered by name.

    mask = Operator("threshold_mask", exact.mask, fake=_fake, asks=lambda x, *_: (x, x.shape[-1]))
    mask.backend("triton", module=".triton_forward", takes=only_if(_is_narrow, "rows of more than 4096 take longer"))
    mask.backend("numba", module=".numba_backend")

A compiled graph keeps an operator whole. An eager call bypasses torch's dispatcher, which costs tens of microseconds,
and at the first call the import of torch's compiler.

A call is computed by the first backend that has no reason to refuse it, and otherwise by plain torch. Reasons are that
another backend was requested, the device, what the backend's ``takes`` says, or that a library is not installed. The
choice is made once for all calls with the same device, dtype and facts about their arguments. At the level ``DEBUG``
the logger ``khot`` tells which backend computes a call, and the reasons of the others.

``KHOT_BACKEND`` in the environment, or :func:`backend` around a piece of code, requests a backend for every operation:

    auto     the fastest one available: Triton on accelerators that it supports, numba on a CPU, torch elsewhere (the
             default)
    torch    plain torch everywhere
    numba    numba if an operation has loops for the call, or an error that says why they cannot run
    triton   Triton if an operation has a kernel for the call, or an error that says why it cannot run; on a CPU only
             in its interpreter (``TRITON_INTERPRET=1``)
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
from .operators.autograd import move_batch_first, wants_gradient
from .operators.platforms import DEVICES, MAX_N, OBSTACLES, lacks_triton, warn_without_triton

log = logging.getLogger("khot")

MOST_CHOICES = 64  # choices kept for an operation; exponents and numbers of draws may change from step to step

BACKENDS = ("auto", "torch", *DEVICES)


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
    global _wanted
    previous, _wanted = _wanted, _checked(name, "`name`")
    _forget_choices()
    try:
        yield
    finally:
        _wanted = previous
        _forget_choices()


def _forget_choices() -> None:
    for operation in _EVERY:
        operation.known.clear()


Takes = Callable[..., str | None]


def only_if(holds: Callable[..., bool], otherwise: str) -> Takes:
    """``takes`` for a backend that takes a call only if a condition holds; ``otherwise`` is the reason of a refusal."""
    return lambda *asked: None if holds(*asked) else otherwise


class Choice(NamedTuple):
    """The code of the backend that computes a call, or None for plain torch; and a line for the log."""

    code: Any
    line: str


class Operation:
    """The ways to compute an operation, registered by name.

    Args:
        package: The package of their modules.
        attribute: The name under which a module has the code: a function of the same arguments, or a record of
            functions.
    """

    def __init__(self, package: str, attribute: str) -> None:
        self.package, self.attribute, self.name = package, attribute, attribute.lower()
        self.backends = dict[str, tuple[str, Takes]]()  # modules and `takes` by name, in the order of preference
        self.known = dict[Any, Choice]()  # what has been chosen
        _EVERY.append(self)

    def backend(self, name: str, *, module: str, takes: Takes = lambda *asked: None) -> None:
        """Registers the backend of a library, which comes after those that are already registered.

        Its module, relative to the package, is imported at the first call that it computes. ``takes`` gets the
        arguments of :meth:`find`, and gives the reason why the backend does not compute a call, or None if it does.
        """
        self.backends[name] = module, takes

    def load(self, name: str, *asked: Any) -> Any:
        """The code of the backend of this name, imported."""
        return getattr(importlib.import_module(self.backends[name][0], self.package), self.attribute)

    def find(self, x: Tensor, *facts: Any) -> Any:
        """The code of the first backend that takes a call and runs here; None if none does.

        Args:
            x: A tensor (..., n); only its device and its dtype count.
            *facts: What else the choice depends on: numbers and names.

        Raises:
            RuntimeError: If the requested backend takes the call but cannot run here.
        """
        fits = x.numel() > 0 and x.shape[-1] <= MAX_N
        key = x.device, x.dtype, bool(fits), *facts  # a bool if shapes are symbols
        found = self.known.get(key)
        if found is None:
            if len(self.known) >= MOST_CHOICES:
                self.known.clear()
            found = self.known[key] = self.choose(x, *facts)
        if found.line and log.isEnabledFor(logging.DEBUG):
            log.debug(found.line)
        return found.code

    def is_fused(self, x: Tensor, *facts: Any) -> bool:
        """Whether a backend computes this call."""
        return self.find(x, *facts) is not None

    def choose(self, x: Tensor, *facts: Any) -> Choice:
        """:meth:`find`, for the first time."""
        told = ""
        for name in self.backends:
            refusal = self._refusal(name, x, *facts)  # wherever the backend can run
            reason = refusal or OBSTACLES[name](x.device)
            if reason is None:
                return Choice(self.load(name, x, *facts), f"{self.name} runs on {name}{told}")
            if refusal is None and name == _wanted and x.device.type != "meta":
                raise RuntimeError(f"backend {name!r} is forced, but {reason}")
            if refusal is None and name == "triton" and lacks_triton():
                warn_without_triton()
            told += f"; not on {name}: {reason}"
        return Choice(None, f"{self.name} runs on torch{told}")

    def _refusal(self, name: str, x: Tensor, *facts: Any) -> str | None:
        if _wanted not in ("auto", name):
            return f"the requested backend is {_wanted}"
        if _wanted == "auto" and x.device.type != DEVICES[name]:
            return f"it is for tensors on {DEVICES[name]}"
        if x.numel() == 0:
            return "there is nothing to compute"
        if x.shape[-1] > MAX_N:
            return "columns of a row are counted in 32 bits"
        return self.backends[name][1](x, *facts)


_EVERY = list[Operation]()


class Operator(Operation):
    """An operation, registered as ``khot::name``; not differentiable itself, but its callers may be.

    Args:
        name: Its name in ``torch.ops.khot``.
        plain: The operation in plain torch, for every call: a function of the operator's typed arguments. A backend's
            module has a function of the same name and arguments.
        fake: Empty results for arguments without data.
        asks: Maps the arguments to what the choice of a backend depends on, see :meth:`Operation.find`; by default the
            first argument, a tensor.
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
        asks: Callable[..., tuple[Any, ...]] = lambda x, *_: (x,),
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
        if wants_gradient(*args):
            with torch.no_grad():
                results = self.implementation(*args)(*args)
        else:
            results = self.implementation(*args)(*args)
        return no_view(results) if isinstance(results, Tensor) else tuple(map(no_view, results))

    def implementation(self, *args: Any) -> Callable[..., Any]:
        """The function that computes this call."""
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

    Backends are asked about the first parameter, its length n, the number of its rows, and the number of draws.

    Args:
        name: Its name in ``torch.ops.khot``.
        plain: The operation in plain torch, ``function(*parameters, seed, draws, dtype, ...)``. The first of the
            parameters is ``(*batch, n)``, the others ``(*batch, ...)``; the seed is from
            :func:`~khot.kernels.random_numbers.philox.draw_seed`, and the result ``(draws, *batch, n)``, of the dtype.
            A draw depends on the number of the draw and the number of the row, not on how many there are.
    """

    def __init__(self, name: str, plain: Callable[..., Tensor]) -> None:
        self._seed = list(inspect.signature(plain).parameters).index("seed")  # the number of draws comes after it
        super().__init__(
            name,
            plain,
            fake=lambda x, *rest: x.new_empty((rest[self._seed], *x.shape), dtype=rest[self._seed + 1]),
            asks=lambda x, *rest: _size_of_draws(x, rest[self._seed]),
            batch=self._batch,
        )

    def kernel(self, x: Tensor, draws: int) -> Callable[..., Tensor] | None:
        """The function that makes the draws for parameters x; None for plain torch, which may use torch's generators.

        Inside a vmap it is the operator, even if x is not mapped, because the seed may be.
        """
        found: Callable[..., Tensor] | None = self.find(*_size_of_draws(x, draws))
        return found if found is None or call_of(x).is_plain else self

    def _batch(self, info: Any, in_dims: Sequence[int | None], *args: Any) -> tuple[Tensor, int]:
        parameters = move_batch_first(info.batch_size, in_dims, args[: self._seed])
        seed, options = args[self._seed], args[self._seed + 1 :]
        seed_dim = in_dims[self._seed]
        if seed_dim is None:  # the same randomness for the whole batch
            return torch.stack([self(*row, seed, *options) for row in zip(*parameters, strict=True)]), 0
        return self(*parameters, seed.movedim(seed_dim, 0)[0], *options), 1  # draws and rows have their own numbers


def _size_of_draws(x: Tensor, draws: int) -> tuple[Tensor, int, int, int]:
    return x, int(x.shape[-1]), int(math.prod(x.shape[:-1])), draws


def has_draws(x: Tensor, n: int, rows: int, draws: int) -> str | None:
    """``takes`` for backends of a :class:`DrawOperator` that make any positive number of draws."""
    return None if draws > 0 else "there is nothing to draw"


def define(name: str, function: Callable[..., Any]) -> Any:
    """Registers a function as ``khot::name``, inside which all parts of torch except autograd work.

    Its keyword-only arguments are not arguments of the operator.
    """
    signature = inspect.signature(function)
    taken = [parameter for parameter in signature.parameters.values() if parameter.kind is not parameter.KEYWORD_ONLY]

    @functools.wraps(function)
    def below_dispatcher(*args: Any) -> Any:
        with eager_dispatcher(), torch.no_grad():
            return function(*args)

    below_dispatcher.__signature__ = signature.replace(parameters=taken)  # type: ignore[attr-defined]
    return torch.library.custom_op(f"khot::{name}", below_dispatcher, mutates_args=())
