"""Functions of rows that are computed slab by slab, and again for derivatives, to need memory for one slab only.

A function of tensors whose first dimension counts independent rows is applied to slabs of some rows each. Only the
arguments are saved for the backward pass. A derivative is again a function of rows, of the arguments and the cotangents
or tangents, and computes what it needs of a slab again. So derivatives of every order and mode follow. This is for
CPUs, where slabs that fit into the caches also take less time; accelerators have their own kernels, which need all rows
at once.
"""

import math
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from khot._shapes import broadcast_shapes
from khot._torch_internals import for_transforms

from ..call import runs_on_cpu
from ..operators.autograd import SavingFunction, with_forward_mode

IN_CACHE = 2**15  # items of a slab of which a few float64 arrays fit into the caches of a core
MOST_SLABS = 6  # each costs a few milliseconds; six reduce the memory, some hundred times the input, to a sixth

_thread = threading.local()  # its attribute ``inside`` says whether a slab is being computed

Tensors = tuple[Tensor, ...]
RowFunction = Callable[..., Tensors]


def in_slabs(function: RowFunction, size: int, *arguments: Tensor) -> Tensors:
    """``function(*arguments)`` by slabs of at most ``size`` rows.

    Args:
        function: Maps tensors ``(rows, ...)``, differentiable if of a floating-point dtype, to a tuple of such tensors.
        size: Rows of a slab.
        *arguments: The arguments of the function.
    """
    if len(arguments[0]) <= size or in_slab() or not runs_on_cpu(*arguments):
        return function(*arguments)
    results: Tensors = _apply(function, size, *arguments)
    return results


def by_rows(function: RowFunction, largest: int, *arguments: Tensor, most: int | None = MOST_SLABS) -> Tensors:
    """``function(*arguments)`` of tensors ``(..., length)``, by slabs of about ``largest`` entries.

    Calls inside a slab are not split again.

    Args:
        function: A function of rows with one leading dimension of any length, or with those of small arguments.
        largest: Number of entries of the broadcast first argument up to which there are no slabs.
        *arguments: Tensors whose shapes without the last dimension broadcast.
        most: Largest number of slabs, which become larger instead; None for no limit.

    Returns:
        Tensors ``(..., *rest)`` from the ``(rows, *rest)`` that the function returns.
    """
    batch_shape = broadcast_shapes(*(x.shape[:-1] for x in arguments))
    rows, length = math.prod(batch_shape), arguments[0].shape[-1]
    if rows <= 1 or rows * length <= largest or in_slab() or not runs_on_cpu(*arguments):
        return function(*arguments)
    flat = [x.expand(*batch_shape, x.shape[-1]).reshape(-1, x.shape[-1]) for x in arguments]
    results = in_slabs(function, slab_size(rows, length, largest, most), *flat)
    return tuple(y.view(*batch_shape, *y.shape[1:]) for y in results)


def in_cache(function: RowFunction, x: Tensor, *others: Tensor) -> Tensors:
    """``function`` of x ``(..., n)`` and tensors ``(..., *rest)``, on a CPU some rows at a time; not differentiable."""
    batch = x.shape[:-1]
    rows, size = batch.numel(), max(1, IN_CACHE // max(1, x.shape[-1]))
    if rows <= size or x.device.type != "cpu":
        return function(x, *others)
    flat = (v.reshape(rows, *v.shape[len(batch) :]) for v in (x, *others))
    return tuple(v.view(batch + v.shape[1:]) for v in _one_by_one(function, size, *flat))


def _one_by_one(function: RowFunction, size: int, *arguments: Tensor) -> Tensors:
    parts = [function(*slab) for slab in zip(*(x.split(size) for x in arguments), strict=True)]
    return tuple(torch.cat(results) for results in zip(*parts, strict=True))


def in_slab() -> bool:
    """Whether a slab is being computed, which is not split again."""
    return getattr(_thread, "inside", False)


def slab_size(rows: int, elements: int, largest: int, most: int | None = MOST_SLABS) -> int:
    """Rows of a slab of at most ``largest`` elements, or more if there were too many slabs; all of similar size."""
    slabs = max(1, math.ceil(rows * elements / largest))
    slabs = slabs if most is None else min(slabs, most)
    return max(1, math.ceil(rows / slabs))


def _differentiable(arguments: Tensors) -> list[int]:
    return [i for i, x in enumerate(arguments) if x.is_floating_point()]


def _split(function: RowFunction, arguments: Tensors) -> tuple[Callable[..., Tensors], list[Tensor]]:
    """The function of the differentiable arguments only, and these arguments."""
    where = _differentiable(arguments)

    def of_differentiable(*inputs: Tensor) -> Tensors:
        given = dict(zip(where, inputs, strict=True))
        return function(*(given.get(i, x) for i, x in enumerate(arguments)))

    return of_differentiable, [arguments[i] for i in where]


def _pulled_back(function: RowFunction, count: int) -> RowFunction:
    """Maps the arguments, ``count`` of them, and the cotangents of the results to the cotangents of the arguments."""

    def pull_back(*arguments: Tensor) -> Tensors:
        of_differentiable, inputs = _split(function, arguments[:count])
        if not runs_on_cpu(*arguments):
            with for_transforms():
                results: Tensors = torch.func.vjp(of_differentiable, *inputs)[1](arguments[count:])
            return results
        further = torch.is_grad_enabled()  # this derivative is being differentiated
        with torch.enable_grad():  # plain autograd costs less than a transform of functions
            inputs = [x if further and x.requires_grad else x.detach().requires_grad_() for x in inputs]
            values = zip(of_differentiable(*inputs), arguments[count:], strict=True)
            outputs, cotangents = zip(*((y, g) for y, g in values if y.requires_grad), strict=True)
            return torch.autograd.grad(
                outputs, inputs, cotangents, create_graph=further, allow_unused=True, materialize_grads=True
            )

    return pull_back


def _pushed_forward(function: RowFunction, count: int) -> RowFunction:
    """Maps the arguments and the tangents of the differentiable ones to the tangents of the results."""

    def push_forward(*arguments: Tensor) -> Tensors:
        of_differentiable, inputs = _split(function, arguments[:count])
        with for_transforms():
            values, transposed = torch.func.vjp(of_differentiable, *inputs)[:2]
            zeros = [torch.zeros_like(y) for y in values]
            # The transposed map is linear, so its derivative is transposed again: torch.func.jvp does not nest in other
            # modes.
            results: Tensors = torch.func.vjp(lambda *g: transposed(g), *zeros)[1](arguments[count:])
        return results

    return push_forward


class _InSlabs(SavingFunction):
    @staticmethod
    def forward(function: RowFunction, size: int, *arguments: Tensor) -> Tensors:
        _thread.inside = True
        try:
            return _one_by_one(function, size, *arguments)
        finally:
            _thread.inside = False

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Any, ...]:
        arguments, (function, size) = ctx.saved_tensors, ctx.plan
        results = in_slabs(_pulled_back(function, len(arguments)), size, *arguments, *cotangents)
        gradients = dict(zip(_differentiable(arguments), results, strict=True))
        return None, None, *(gradients.get(i) for i in range(len(arguments)))


def _in_slabs_jvp(ctx: Any, saved: list[Tensor], *tangents: Any) -> Tensors:
    given = [
        torch.zeros_like(x) if tangent is None else tangent
        for x, tangent in zip(saved, tangents[2:], strict=True)
        if x.is_floating_point()
    ]
    function, size = ctx.plan
    return in_slabs(_pushed_forward(function, len(saved)), size, *saved, *given)


_apply = with_forward_mode(_InSlabs, _in_slabs_jvp)
