"""Which implementation runs, by backend, device, dtype and size; everything that decides stands here.

``KHOT_BACKEND`` in the environment, or :func:`backend` around a piece of code, forces one:

    auto     Triton on accelerators that it supports, and SciPy for isotonic regression on a CPU, where they are
             installed; torch elsewhere (the default)
    torch    plain torch everywhere
    triton   Triton, or an error that says why not; on a CPU only in its interpreter (``TRITON_INTERPRET=1``); plain
             torch for what has no kernel

Blocks and warps: a thread holds up to 16 float32 or 4 float64 entries of a row, which is what the registers have room
for beside the root finder's numbers, so that nothing spills; the longest rows that stay on chip have 32 entries in a
thread. Longer rows are read in tiles; few of them are split over all multiprocessors, which costs a launch for each
step of the root finder.
"""

import functools
import importlib
import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._C import _functorch as functorch
from torch.nn import Parameter
from torch.utils._python_dispatch import _get_current_dispatch_mode

from khot._validation import has_contents

from .autograd import move_batch_first
from .links.base import Link
from .tiles import FEW_ROWS, LONE_ROW, MAX_N, MOST_PLACES, POINTS

BACKENDS = ("auto", "torch", "triton")
OLDEST_CUDA = (8, 0)  # compute capability that current Triton supports
LONG_DRAW, MANY_DRAWS = 2**17, 32  # a draw of more units is one program's work if there are so many of them

MIN_SCIPY = 32  # length of row from which SciPy's loop is worth a call per row


def _checked(name: str, source: str) -> str:
    if name not in BACKENDS:
        raise ValueError(f"{source} must be one of {', '.join(BACKENDS)}, but got {name!r}")
    return name


_backend = _checked(os.environ.get("KHOT_BACKEND", "auto"), "KHOT_BACKEND")


@contextmanager
def backend(name: str) -> Iterator[None]:
    """Forces a backend inside a ``with`` block, for all threads.

    Args:
        name: "auto", "torch" or "triton".

    Raises:
        ValueError: If there is no such backend.

    Example:
        >>> import khot.kernels
        >>> with khot.kernels.backend("torch"):
        ...     sigmoid_topk(torch.zeros(4), 2)
        tensor([0.5000, 0.5000, 0.5000, 0.5000])
    """
    global _backend
    previous, _backend = _backend, _checked(name, "`name`")
    try:
        yield
    finally:
        _backend = previous


def fused(x: Tensor, link: Link, log: bool = False) -> bool:
    """Whether the map of a link is to be one operator, rather than torch operations that a compiler can fuse."""
    return (x.is_cuda or _backend == "triton") and _has_kernel(link, log)


def _has_kernel(link: Link, log: bool) -> bool:
    return link.kernel is not None and (link.kernel_has_log or not log)


def use_triton(x: Tensor, link: Link, log: bool = False) -> bool:
    """:func:`triton_runs` for the kernels of the relaxed masks with this link."""
    return _has_kernel(link, log) and triton_runs(x)


def triton_runs(x: Tensor) -> bool:
    """Whether Triton kernels are to run on the rows of ``x (..., n)``, if there is one for what is to be done.

    Raises:
        RuntimeError: If the backend "triton" is forced where it cannot run.
    """
    wanted = _backend == "triton" or (_backend == "auto" and x.is_cuda)
    if not wanted or x.numel() == 0 or x.shape[-1] > MAX_N:
        return False
    obstacle = _obstacle(x.device)
    if obstacle and _backend == "triton":
        raise RuntimeError(f"backend 'triton' is forced, but {obstacle}")
    return obstacle is None


def isotonic_solver(x: Tensor) -> Callable[..., Any] | None:
    """SciPy's isotonic regression, if that is to run on the rows of ``x (..., n)``."""
    if _backend != "auto" or x.device.type != "cpu" or x.shape[-1] < MIN_SCIPY:
        return None
    return _scipy_isotonic()


@functools.cache
def _scipy_isotonic() -> Callable[..., Any] | None:
    try:
        from scipy.optimize import isotonic_regression  # type: ignore[import-untyped]
    except ImportError:  # no SciPy, or one before 1.12
        return None
    return isotonic_regression


def use_triton_transport(x: Tensor, k: int) -> bool:
    """:func:`triton_runs` for the kernels of sorted transport, where they take ``x (..., n)`` and are worth it."""
    n, places = x.shape[-1], min(k + 1, x.shape[-1])
    most = MOST_PLACES[torch.float64 if x.dtype == torch.float64 else torch.float32]
    fits = 1 < places <= most and places * n <= MAX_N and (n <= LONE_ROW or x.numel() >= FEW_ROWS * n)
    return fits and triton_runs(x)


def fuses(x: Tensor) -> bool:
    """Whether what there is a kernel for is to be one operator: a compiler does not ask whether Triton is there."""
    if torch.compiler.is_compiling():
        return _backend == "triton" or (_backend == "auto" and x.is_cuda)
    return triton_runs(x)


def fuses_draws(x: Tensor, draws: int, longest: int = MAX_N) -> bool:
    """Whether ``draws`` draws for each row of parameters ``x (..., n)`` are to be one operator, up to n = longest.

    One program makes one draw. For few draws of long rows torch, which spreads a row over the device, is faster.
    """
    n, rows = x.shape[-1], math.prod(x.shape[:-1])
    if n > longest or (n > LONG_DRAW and draws * rows < MANY_DRAWS) or _backend == "torch":
        return False
    return fuses(x)


def sorts_on_chip(values: Tensor) -> bool:
    """Whether the order maps of sorted rows are one kernel, which holds a row; other rows take several steps."""
    return triton_runs(values) and values.shape[-1] <= POINTS[torch.float64][-1][0]


@functools.cache
def _obstacle(device: torch.device) -> str | None:
    """What keeps Triton from running on this device."""
    try:
        importlib.import_module("triton")
    except ImportError as error:
        return f"Triton is not installed ({error})"
    if device.type == "cpu":
        if os.environ.get("TRITON_INTERPRET") == "1":
            return None
        return "a CPU tensor needs Triton's interpreter: set TRITON_INTERPRET=1 before Python starts"
    capability = torch.cuda.get_device_capability(device)
    if torch.version.hip is None and capability < OLDEST_CUDA:
        return f"{device} has compute capability {capability}, and Triton needs {OLDEST_CUDA}"
    return None


def draw_operator(name: str) -> Callable[[Callable[..., Tensor]], Any]:
    """Decorator for ``function(*parameters, seed, draws, dtype, ...)``: registers it as the operator ``khot::name``.

    The first of the parameters is ``(*batch, n)``, the others ``(*batch, ...)``; the result is ``(draws, *batch, n)``,
    of the dtype, and a function of the seed, which is from :func:`khot.kernels.philox.draw_seed`.
    """

    def decorate(function: Callable[..., Tensor]) -> Any:
        draw = operator(name)(function)

        @draw.register_fake
        def _(*args: Any) -> Tensor:
            _, draws, dtype = args[(at := _seed_position(args)) : at + 3]
            return args[0].new_empty((draws, *args[0].shape), dtype=dtype)

        @draw.register_vmap
        def _(info: Any, in_dims: Any, *args: Any) -> tuple[Tensor, int]:
            at = _seed_position(args)
            parameters = move_batch_first(info.batch_size, in_dims, args[:at])
            seed, options = args[at], args[at + 1 :]
            if in_dims[at] is None:  # the same randomness for all
                return torch.stack([draw(*row, seed, *options) for row in zip(*parameters, strict=True)]), 0
            return draw(*parameters, seed.movedim(in_dims[at], 0)[0], *options), 1  # draws and rows have their own

        return draw

    return decorate


def _seed_position(args: tuple[Any, ...]) -> int:
    return max(i for i, value in enumerate(args) if isinstance(value, Tensor))


# What is on and off in torch's dispatcher for code that nobody traces or transforms.
EAGER = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()


def _is_plain(argument: Any) -> bool:
    """Whether a function can look at it: no tensor, or one with data, no subclass and under no function transform."""
    if not isinstance(argument, Tensor):
        return True
    transformed = functorch.is_functorch_wrapped_tensor(argument) or functorch.is_legacy_batchedtensor(argument)
    return type(argument) in (Tensor, Parameter) and not transformed and not argument.is_meta


def is_eager(*arguments: Any) -> bool:
    """Whether a function of these arguments runs now, on data, rather than being traced or transformed."""
    return not (torch.compiler.is_compiling() or _get_current_dispatch_mode()) and all(map(_is_plain, arguments))


def _define(name: str, function: Callable[..., Any], **options: Any) -> Any:
    @functools.wraps(function)
    def below_dispatcher(*args: Any) -> Any:
        # Who calls has switched off parts of the dispatcher that transforms of torch.func in the function need.
        with torch._C._ForceDispatchKeyGuard(*EAGER), torch.no_grad():
            return function(*args)

    return torch.library.custom_op(f"khot::{name}", below_dispatcher, mutates_args=(), **options)


def operator(name: str) -> Callable[[Callable[..., Any]], Any]:
    """Decorator for a function that is not differentiable: registers it as the operator ``khot::name``.

    The result has the methods ``register_fake`` and ``register_vmap`` of the operator.
    """

    def decorate(function: Callable[..., Any]) -> Any:
        @functools.wraps(function)
        def without_grad(*args: Any) -> Any:
            with torch.no_grad():
                return function(*args)

        definition = _define(name, function)

        @functools.wraps(function)
        def call(*args: Any) -> Any:
            return without_grad(*args) if is_eager(*args) else definition(*args)

        vars(call).update(register_fake=definition.register_fake, register_vmap=definition.register_vmap)
        return call

    return decorate


def differentiable_operator(name: str) -> Callable[[Callable[..., Tensor]], Any]:
    """Decorator for a function of tensors and constants, in differentiable operations that the contents decide on.

    On data it is the function itself. Graphs hold the operators ``khot::name`` and, for the first derivative in all
    floating-point tensors, ``khot::name_derivative``, which calls the function again. A vmap inside of a graph goes
    through them one by one.

    The result has the method ``register_fake`` of the operator.
    """

    def decorate(function: Callable[..., Tensor]) -> Any:
        def derivative(grad: Tensor, *args: Any) -> list[Tensor]:
            with torch.enable_grad():
                args = tuple(x.detach().requires_grad_() if _is_real(x) else x for x in args)
                found = torch.autograd.grad(function(*args), list(filter(_is_real, args)), grad, materialize_grads=True)
            return [x.clone(memory_format=torch.contiguous_format) for x in found]

        schema = torch.library.infer_schema(function, mutates_args=())
        of_derivative = schema.replace("(", "(Tensor grad, ", 1).replace("-> Tensor", "-> Tensor[]")
        value, slope = _define(name, function), _define(f"{name}_derivative", derivative, schema=of_derivative)

        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
            tensors = iter(ctx.saved_tensors)
            args = [next(tensors) if constant is None else constant for constant in ctx.constants]
            found = iter(slope(grad, *args))
            return tuple(next(found) if _is_real(x) else None for x in args)

        def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
            ctx.save_for_backward(*(x for x in inputs if isinstance(x, Tensor)))
            ctx.constants = [None if isinstance(x, Tensor) else x for x in inputs]

        value.register_autograd(backward, setup_context=setup_context)
        value.register_vmap(
            lambda info, in_dims, *args: (torch.stack([value(*x) for x in _each(info, in_dims, args)]), 0)
        )

        @slope.register_fake
        def _(grad: Tensor, *args: Any) -> list[Tensor]:
            return [torch.empty_like(x, memory_format=torch.contiguous_format) for x in filter(_is_real, args)]

        @slope.register_vmap
        def _(info: Any, in_dims: Any, *args: Any) -> tuple[list[Tensor], list[int]]:
            found = zip(*(slope(*x) for x in _each(info, in_dims, args)), strict=True)
            stacked = [torch.stack(parts) for parts in found]
            return stacked, [0] * len(stacked)

        @functools.wraps(function)
        def call(*args: Any) -> Any:
            tensors = (x for x in args if isinstance(x, Tensor))
            return function(*args) if has_contents(*tensors) else value(*args)

        vars(call).update(register_fake=value.register_fake)
        return call

    return decorate


def _is_real(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point()


def _each(info: Any, in_dims: Any, args: tuple[Any, ...]) -> list[list[Any]]:
    """The arguments of a vmap for each of its calls."""
    return [
        [x if dim is None else x.select(dim, i) for x, dim in zip(args, in_dims, strict=True)]
        for i in range(info.batch_size)
    ]
