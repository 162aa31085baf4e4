"""Operators of ``torch.ops.khot``: one operation each, whose backends are registered by name.

    mask = Operator("threshold_mask", reference.mask, fake=_fake)
    mask.backend("triton", module=".triton_forward", takes=lambda x, *_: ...)
    mask.backend("torch", module=".torch_backend")

A compiled graph keeps an operator whole. An eager call goes round torch's dispatcher, which costs tens of microseconds,
and at the first call the import of torch's compiler. The first backend that runs on the tensors' device and ``takes``
the call does the work, the reference if there is none; its module is imported then, not before. ``KHOT_BACKEND`` in the
environment, or :func:`backend` around a piece of code, chooses for every operation:

    auto     the fastest that is there: Triton on accelerators that it supports, numba on a CPU, SciPy for isotonic
             regression of long rows there, torch elsewhere (the default)
    torch    plain torch everywhere
    numba    numba where an operation has loops for the call, or an error that says why they cannot run
    triton   Triton where an operation has a kernel for the call, or an error that says why it cannot run; on a CPU only
             in its interpreter (``TRITON_INTERPRET=1``)

Plain torch does what the chosen one has nothing for.
"""

import functools
import importlib
import inspect
import math
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor

from khot._distributed.draws import draws_of_rows
from khot._torch_internals import (
    count_as_constant,
    eager_dispatcher,
    has_dispatch_mode,
    is_plain,
    is_transformed,
    no_view,
)

from .autograd import move_batch_first
from .sharding_rules import teach_rules

OLDEST_CUDA = (8, 0)  # compute capability that current Triton supports
LONG_DRAW, MANY_DRAWS = 2**17, 32  # a draw of more units is one program's work if there are so many of them


def _is_installed(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except (ImportError, ValueError):  # which tests and tools make it that hide a library
        return False


HAS_NUMBA = _is_installed("numba")  # importing it takes half a second: at the first call
HAS_TRITON = _is_installed("triton")
MAX_N = 2**31 - 2**15  # columns of a row: Triton's kernels count them in int32


@functools.cache  # of no argument: once a process
def _warn_without_triton() -> None:
    message = "Triton is not installed, so that plain torch computes what has faster kernels: pip install 'khot[gpu]'"
    warnings.warn(message, RuntimeWarning, stacklevel=2)


@functools.cache
def _triton_obstacle(device: torch.device) -> str | None:
    try:
        importlib.import_module("triton")
    except ImportError as error:
        return f"Triton is not installed ({error}): pip install 'khot[gpu]'"
    if device.type == "cpu":
        if os.environ.get("TRITON_INTERPRET") == "1":
            return None
        return "a CPU tensor needs Triton's interpreter: set TRITON_INTERPRET=1 before Python starts"
    capability = torch.cuda.get_device_capability(device)
    if torch.version.hip is None and capability < OLDEST_CUDA:
        return f"{device} has compute capability {capability}, and Triton needs {OLDEST_CUDA}"
    return None


@functools.cache
def _numba_obstacle(device: torch.device) -> str | None:
    if device.type != "cpu":
        return f"numba's loops run on a CPU, and the tensor is on {device}"
    if not getattr(sys, "_is_gil_enabled", lambda: True)():
        return "numba's loops are not tested in a Python without the global interpreter lock"
    try:
        importlib.import_module("numba")
    except ImportError as error:
        return f"numba is not installed ({error}): pip install 'khot[cpu]'"
    return None


@functools.cache
def _scipy_obstacle(device: torch.device) -> str | None:
    if device.type != "cpu":
        return f"SciPy knows no {device.type} tensors"
    try:
        from scipy.optimize import isotonic_regression  # type: ignore[import-untyped]  # noqa: F401 - new in 1.12
    except ImportError as error:
        return f"SciPy 1.12 or newer is not installed ({error})"
    return None


class Platform(NamedTuple):
    """What backends run on.

    Attributes:
        devices: Types of the devices on which they are chosen without being forced; None for all.
        fits: Whether they can work on a tensor ``(..., n)`` of this shape at all.
        obstacle: What keeps them from running on a device, or None.
        has_name: Whether one can ask for them by name.
    """

    devices: tuple[str, ...] | None
    fits: Callable[[Tensor], bool]
    obstacle: Callable[[torch.device], str | None]
    has_name: bool = True


PLATFORMS = {
    "torch": Platform(None, lambda x: True, lambda device: None),
    "numba": Platform(("cpu",) if HAS_NUMBA else (), lambda x: x.numel() > 0, _numba_obstacle),
    "triton": Platform(("cuda",), lambda x: x.numel() > 0 and x.shape[-1] <= MAX_N, _triton_obstacle),
    "scipy": Platform(("cpu",), lambda x: True, _scipy_obstacle, has_name=False),
}
BACKENDS = ("auto", *(name for name, platform in PLATFORMS.items() if platform.has_name))


def _checked(name: str, source: str) -> str:
    if name not in BACKENDS:
        raise ValueError(f"{source} must be one of {', '.join(BACKENDS)}, but got {name!r}")
    return name


_wanted = _checked(os.environ.get("KHOT_BACKEND", "auto"), "KHOT_BACKEND")


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
    try:
        yield
    finally:
        _wanted = previous


def is_eager(*arguments: Any) -> bool:
    """Whether a function of these arguments runs now, on data, rather than being traced or transformed."""
    return not (torch.compiler.is_compiling() or has_dispatch_mode()) and all(map(is_plain, arguments))


class Backend(NamedTuple):
    """One way to compute an operation.

    Attributes:
        name: Of the platform.
        load: Imports what computes it.
        takes: Whether it can and shall compute a call, by dtype and size.
    """

    name: str
    load: Callable[[], Any]
    takes: Callable[..., bool]

    def is_asked(self, x: Tensor) -> bool:
        """Whether it shall run on this tensor's device, if it can, and on this shape."""
        if _wanted == "auto":
            devices = PLATFORMS[self.name].devices
            asked = devices is None or x.device.type in devices
        else:
            asked = self.name == _wanted
        return asked and PLATFORMS[self.name].fits(x)

    def runs(self, device: torch.device) -> bool:
        """Whether it can run; says once where Triton could, were it installed.

        Raises:
            RuntimeError: If it is forced and cannot, and there are contents to compute with.
        """
        obstacle = PLATFORMS[self.name].obstacle(device)
        if obstacle and self.name == _wanted and device.type != "meta":
            raise RuntimeError(f"backend {self.name!r} is forced, but {obstacle}")
        if obstacle and self.name == "triton" and not HAS_TRITON:
            _warn_without_triton()
        return obstacle is None


class Backends:
    """The ways to compute an operation, registered by name.

    Args:
        package: Where their modules are.
        attribute: What a module has to compute it: a function of the same arguments, or a record of functions.
    """

    def __init__(self, package: str, attribute: str) -> None:
        self.package, self.attribute, self.registered = package, attribute, list[Backend]()

    def backend(self, name: str, *, module: str, takes: Callable[..., bool] = lambda *args: True) -> None:
        """Registers a backend, after those that are there already.

        Args:
            name: Of its platform, a key of ``PLATFORMS``.
            module: Where it is, relative to the package; imported at the first call that it takes.
            takes: Of what is asked about a call, first a tensor, whether it computes this one; asked once a call.
        """
        load = functools.cache(lambda: getattr(importlib.import_module(module, self.package), self.attribute))
        self.registered.append(Backend(name, load, takes))

    def choose(self, *asked: Any) -> Backend | None:
        """The first backend that takes this call and runs here.

        Raises:
            RuntimeError: If a backend is forced that takes the call but cannot run here.
        """
        for choice in self.registered:
            if choice.is_asked(asked[0]) and choice.takes(*asked) and choice.runs(asked[0].device):
                return choice
        return None

    def find(self, *asked: Any) -> Any:
        """What computes this call, imported; None where nothing that is registered does."""
        choice = self.choose(*asked)
        return None if choice is None else choice.load()

    def named(self, name: str) -> Any:
        """What this backend has, imported: for the same backend of an operation that is built on this one."""
        return next(choice.load() for choice in self.registered if choice.name == name)

    def is_fused(self, *asked: Any) -> bool:
        """:meth:`fuses` to a compiler; to others whether a backend other than torch computes this call."""
        if torch.compiler.is_compiling():
            return self.fuses(*asked)
        choice = self.choose(*asked)
        return choice is not None and choice.name != "torch"

    def fuses(self, *asked: Any) -> bool:
        """Whether a backend other than torch shall compute this call: then a compiler is to keep it whole.

        Nobody asks here whether that backend is installed, which a compiler could not follow.
        """
        others = (choice for choice in self.registered if choice.name != "torch")
        return any(choice.is_asked(asked[0]) and choice.takes(*asked) for choice in others)


class Operator(Backends):
    """An operation, registered as ``khot::name``; not differentiable, though what calls it may be.

    Args:
        name: In ``torch.ops.khot``.
        reference: The definition: a function of the operator's typed arguments, the first of them a tensor whose device
            decides. A backend's module has a function of the same name and arguments.
        fake: Empty results for arguments without data.
        batch: Rule for ``torch.vmap``, as ``torch.library.register_vmap`` takes it. By default the batch goes first in
            every tensor and result, and an argument ``check`` becomes False: nobody looks at the contents of a batch.
            False for an operation that is called only by autograd Functions with rules of their own.
    """

    def __init__(
        self,
        name: str,
        reference: Callable[..., Any],
        *,
        fake: Callable[..., Any],
        batch: Callable[..., Any] | bool = True,
    ) -> None:
        super().__init__(reference.__module__.rpartition(".")[0], reference.__name__)
        functools.update_wrapper(self, reference)
        self.name, self.reference = name, reference
        self.parameters = tuple(inspect.signature(reference).parameters)
        self._definition = define(name, functools.wraps(reference)(lambda *args: self.implementation(*args)(*args)))
        self._definition.register_fake(fake)
        self.batch_goes_first = batch is True
        if batch:
            self._definition.register_vmap(self._batch_first if batch is True else batch)
        OPERATORS[name] = self

    def __call__(self, *args: Any) -> Any:
        if not is_eager(*args):
            _rules_are_known()
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
            RuntimeError: If a backend is forced that takes the call but cannot run here.
        """
        found: Callable[..., Any] | None = self.find(*args)
        return found or self.plain

    @functools.cached_property
    def plain(self) -> Callable[..., Any]:
        """What takes every call: the torch backend if there is one, else the reference."""
        loads = (choice.load for choice in self.registered if choice.name == "torch")
        return next((load() for load in loads), self.reference)

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


@count_as_constant  # which a compiler shall call while it traces
def _rules_are_known() -> bool:
    """Tells DTensors how they may be placed."""
    return teach_rules(list(OPERATORS), {name for name, operator in OPERATORS.items() if operator.batch_goes_first})


class DrawOperator(Operator):
    """An operation that draws: a function of parameters, a seed and the place of its draws among all draws of the seed.

    Args:
        name: In ``torch.ops.khot``.
        reference: The definition, ``function(*parameters, seed, first, draws, dtype, ...)``. The first of the
            parameters is ``(*batch, n)``, the others ``(*batch, ...)``; the seed is from
            :func:`khot.kernels.philox.draw_seed`, ``first`` is a :class:`khot.kernels.philox.Place`, and the result
            ``(draws, *batch, n)``, of the dtype. The number for draw d, row r and unit i of a call is that for
            ``first.draw + d``, ``first.row + r`` and ``first.unit + i`` of the seed, whoever makes it.

    A backend is asked about the first parameter and the number of draws.
    """

    def __init__(self, name: str, reference: Callable[..., Tensor]) -> None:
        super().__init__(name, reference, fake=self._fake, batch=self._batch)

    @staticmethod
    def fills_device(x: Tensor, draws: int) -> bool:
        """Whether a program for each draw is worth while: few of long rows torch spreads over the device."""
        n, rows = x.shape[-1], math.prod(x.shape[:-1])
        return draws > 0 and (n <= LONG_DRAW or draws * rows >= MANY_DRAWS)

    @functools.cached_property
    def _seed(self) -> int:
        """Which argument is the seed; the draws are the second one after it."""
        return self.parameters.index("seed")

    def implementation(self, *args: Any) -> Callable[..., Any]:
        found: Callable[..., Any] | None = self.find(args[0], args[self._seed + 2])
        return found or self.plain

    def kernel(self, x: Tensor, draws: int) -> Callable[..., Tensor] | None:
        """What makes the draws for parameters x, if that is not plain torch, which may use a generator of torch's."""
        if not is_eager(x) or is_transformed():  # inside a vmap a seed may be one of many, though x is not
            return self if self.fuses(x, draws) else None
        found: Callable[..., Tensor] | None = self.find(x, draws)
        if draws_of_rows() is not None:  # whose numbers are those of their places, on every backend
            return found or self.plain
        return None if found is self.plain else found

    def _fake(self, *args: Any) -> Tensor:
        _, _, draws, dtype = args[self._seed : self._seed + 4]
        return args[0].new_empty((draws, *args[0].shape), dtype=dtype)

    def _batch(self, info: Any, in_dims: Sequence[int | None], *args: Any) -> tuple[Tensor, int]:
        parameters = move_batch_first(info.batch_size, in_dims, args[: self._seed])
        seed, options = args[self._seed], args[self._seed + 1 :]
        seed_dim = in_dims[self._seed]
        if seed_dim is None:  # the same randomness for all
            return torch.stack([self(*row, seed, *options) for row in zip(*parameters, strict=True)]), 0
        return self(*parameters, seed.movedim(seed_dim, 0)[0], *options), 1  # draws and rows have their own


def define(name: str, function: Callable[..., Any], **options: Any) -> Any:
    """Registers a function as ``khot::name``, with all of torch at work in it but autograd."""

    @functools.wraps(function)
    def below_dispatcher(*args: Any) -> Any:
        with eager_dispatcher(), torch.no_grad():
            return function(*args)

    return torch.library.custom_op(f"khot::{name}", below_dispatcher, mutates_args=(), **options)
