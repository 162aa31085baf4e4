r"""The map behind every relaxed top-k mask, as a differentiable function of scores, sum and softness.

Forward: :math:`y_i = F(z_i),\ z_i = (x_i - t)/s,\ t = a + cs` with the anchor a and the offset c from
:mod:`khot.kernels.threshold`.

Derivatives, by the implicit function theorem, with slopes :math:`w_i = F'(z_i)`, their shares
:math:`\omega_i = w_i / \sum_j w_j` and :math:`v_i = (dx_i - z_i\,ds)/s`:

.. math:: dy_i = w_i (v_i - \langle\omega, v\rangle) + \omega_i\,dk, \qquad
    dc = \langle\omega, v\rangle - c\,ds/s - dk / \textstyle\sum w .

They are written in differentiable operations of x, s and c, and c is itself an output of the function, so derivatives
of every order follow; a is a constant. From y they could not be had: 1 - y has lost its digits wherever an item is
almost certainly in.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from khot._distributed.boundary import of_rows
from khot._distributed.placements import is_dtensor
from khot._distributed.shards import shards_of_rows
from khot._torch_internals import is_eager_everywhere, is_plain, writes_onnx
from khot._validation import check_k, check_scores, check_softness, checks_contents
from khot.kernels import threshold
from khot.kernels.autograd import move_batch_first, with_forward_mode
from khot.kernels.links.base import Link
from khot.kernels.registry import is_eager
from khot.kernels.rows import Threshold, distances, distances_of
from khot.kernels.threshold.derivative import (
    balanced,
    centred,
    derivative,
    levers,
    local_shape,
    mask_values,
    shares,
    sum_moves_threshold,
)

from .axes import as_axes, as_rows
from .in_graphs import mask_in_graph, threshold_in_graph
from .in_parts import distances_of_parts, mask_of_parts
from .portable import portable_mask

NUMBERS = (float, int)

_Grads = tuple[Tensor | None, ...]


def _is_first() -> bool:
    """Whether nobody takes the derivative of this derivative."""
    return torch.compiler.is_compiling() or not torch.is_grad_enabled()


class _CappedSimplexMap(Function):
    """(x, k, s) -> (y or log y, a, c) for x of shape (..., n), float64 k and s of shape (...)."""

    @staticmethod
    def forward(
        x: Tensor, k: Tensor, scale: Tensor, link: Link, log: bool, softness: str, check: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        arguments = (x, k, scale, link.key, log, softness, check)
        if is_eager(x, k, scale) or threshold.mask.fuses(*arguments):
            return threshold.mask(*arguments)
        k, scale = k.to(x.device), scale.to(x.device)
        anchor, offset = threshold.threshold(x, k, scale, link.key, softness, check)
        return mask_values(x, scale, Threshold(anchor, offset), link, log), anchor, offset

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
        x, k, scale, ctx.link, ctx.log, *_ = inputs
        ctx.mark_non_differentiable(output[1])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, k, scale, *output[1:])
        ctx.save_for_forward(x, k, scale, *output[1:])

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor | None, _: None, grad_offset: Tensor | None) -> _Grads:
        x, k, scale, anchor, offset = ctx.saved_tensors
        needs_x, needs_k, needs_scale = ctx.needs_input_grad[:3]
        link, log = ctx.link, ctx.log
        # The common case, a plain first derivative, goes a short way; everything else needs differentiable operations.
        if grad_y is not None and grad_offset is None and _is_first():
            arguments = (x, scale, anchor, offset, grad_y, link.key, log, needs_scale)
            if is_eager(x, scale, anchor, offset, grad_y) or threshold.mask_derivative.fuses(*arguments):
                return *threshold.mask_derivative(*arguments), *(None,) * 4
        at = Threshold(anchor, offset)
        grad_x, grad_k, grad_scale = derivative(
            x, scale.to(x.device), at, grad_y, grad_offset, link, log, k, needs_scale
        )
        return (
            grad_x.to(x.dtype) if needs_x else None,
            grad_k if needs_k else None,
            grad_scale if needs_scale else None,
            *(None,) * 4,
        )

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Any, Any]:
        x, k, scale = move_batch_first(info.batch_size, in_dims, args[:3])
        link, log, softness, _ = args[3:]
        return _apply(x, k, scale, link, log, softness, False), (0, 0, 0)


def _jvp(
    ctx: Any, saved: list[Tensor], dx: Tensor | None, dk: Tensor | None, dscale: Tensor | None, *_: Any
) -> tuple[Tensor, None, Tensor]:
    x, k, scale, anchor, offset = saved
    scale, link = scale.to(x.device), ctx.link
    shape = local_shape(link, x, scale, Threshold(anchor, offset), ctx.log, k)
    z, share, slope, density = shape[:4]
    moved = torch.zeros_like(z) if dx is None else dx.to(z.dtype)
    if dscale is not None:
        moved = moved - levers(z, x) * dscale.to(z.dtype).unsqueeze(-1)
    moved = moved * scale.reciprocal().to(z.dtype).unsqueeze(-1)
    rest, mean = centred(moved, share)
    by_k = None if dk is None else dk * sum_moves_threshold(density, z, link)
    shift = mean.double() if by_k is None else mean.double() - by_k
    if ctx.log:
        slope = shape.log_derivative(link)
        dy = slope * rest
        if dk is not None and by_k is not None:  # above the threshold by the share, which knows underflowing slopes
            above = shape.per_share(share, link) * dk.to(z.dtype).unsqueeze(-1)
            dy = dy + torch.where(z > 0, above, slope * by_k.to(z.dtype).unsqueeze(-1))
        dy = dy.masked_fill(x == -torch.inf, 0)
    else:
        dy = balanced(slope * rest, share)
        if dk is not None:
            dy = dy + share * dk.to(z.dtype).unsqueeze(-1)
    return dy.to(x.dtype), None, shift if dscale is None else shift - offset * (dscale / scale)


_apply = with_forward_mode(_CappedSimplexMap, _jvp)


class _Plain(NamedTuple):
    """What a plain call has found: y, the thresholds of all rows; its numbers; and what finds the gradient."""

    y: Tensor
    anchor: Tensor
    offset: Tensor
    k: float
    scale: float
    link: Link
    log: bool
    gradient: Any


class _PlainMap(Function):
    """The mask as a function of scores alone, k and s being numbers, which it is nearly always: at the least cost.

    Derivatives of its derivative are those of :class:`_CappedSimplexMap`, which solves for the threshold again.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, found: _Plain) -> Tensor:
        ctx.save_for_backward(x)
        ctx.found = found
        return found.y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (x,), found = ctx.saved_tensors, ctx.found
        if torch.is_grad_enabled():
            numbers = (row_scalar(v, x, x.shape[:-1], False) for v in (found.k, found.scale))
            y, _, _ = _apply(x, *numbers, found.link, found.log, "", False)
            return torch.autograd.grad(y, x, grad, create_graph=True)[0], None
        if is_plain(grad) and is_eager_everywhere():
            g = grad.to(x.dtype).contiguous()
            kind = "log_mask" if found.log else "mask"
            grad_x = found.gradient(x, found.scale, found.anchor, found.offset, g, found.link, kind)
            if grad_x is not None:
                return grad_x, None
        at, scale = _at(x, found)
        return derivative(x, scale, at, grad, None, found.link, found.log)[0].to(x.dtype), None


class _PlainDistances(Function):
    """The z of :class:`_PlainMap`, from which the mask was found."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, found: _Plain) -> Tensor:
        z = distances_of(x, *_at(x, found))
        ctx.save_for_backward(x, z)
        ctx.found = found
        return z

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (x, z), found = ctx.saved_tensors, ctx.found
        if torch.is_grad_enabled():
            again = _distances(x, found.k, found.scale, found.link, "", False)
            return torch.autograd.grad(again, x, grad, create_graph=True)[0], None
        at, scale = _at(x, found)
        pull = shares(z, x, scale, at, found.link).mul_(grad.sum(-1, keepdim=True))
        return (grad - pull).mul_(1 / found.scale), None


def _at(x: Tensor, found: _Plain) -> tuple[Threshold, Tensor]:
    """Threshold and scale as tensors."""
    anchor, offset = (v.reshape(x.shape[:-1]) for v in (found.anchor, found.offset))
    return Threshold(anchor, offset), row_scalar(found.scale, x, x.shape[:-1], False)


def _plain_map(x: Tensor, k: Any, scale: Any, link: Link, log: bool) -> Tensor | None:
    """The mask, if this is a plain call that a backend has a short way for."""
    found = _solved_plainly(x, k, scale, link, log)
    if found is None or not (x.requires_grad and torch.is_grad_enabled()):
        return found and found.y
    return _PlainMap.apply(x, found)


def _solved_plainly(x: Tensor, k: Any, scale: Any, link: Link, log: bool) -> _Plain | None:
    if torch.compiler.is_compiling() or type(k) not in NUMBERS or type(scale) not in NUMBERS:
        return None
    if not x.is_contiguous() or x.dtype not in (torch.float32, torch.float64):
        return None
    if not (is_plain(x) and is_eager_everywhere()):
        return None
    short = threshold.plain.find(x, link, log)
    solved: Any = short and short.mask(x, float(k), float(scale), link, "log_mask" if log else "mask")
    if solved is None:
        return None
    y, anchor, offset = solved
    return _Plain(y, anchor, offset, k, scale, link, log, short.gradient)


def row_scalar(value: float | Tensor, x: Tensor, batch: torch.Size, on_host: bool) -> Tensor:
    """A number for each row; one ``on_host`` for all rows stays there, which saves an accelerator a launch."""
    if isinstance(value, Tensor):
        return value.to(x.device, torch.float64).expand(batch)
    if on_host:
        return torch.full((), value, dtype=torch.float64, device="cpu").expand(batch)
    if torch.compiler.is_compiling():
        return x.new_full(batch, value, dtype=torch.float64)  # a DTensor, if x is one
    return torch.full(batch, value, dtype=torch.float64, device=x.device)


def relaxed_mask(
    x: Tensor,
    k: float | Tensor,
    softness: float | Tensor,
    dim: int | tuple[int, ...],
    *,
    link: Link,
    name: str,
    log: bool = False,
) -> Tensor:
    """The relaxed top-k mask of a link, or its logarithm; ``name`` is what error messages call the softness."""
    check_scores(x, dim, joint=True)
    if dim in (-1, x.dim() - 1):
        return _mask_of_rows(x, k, softness, link, name, log)
    return as_axes(_mask_of_rows(as_rows(x, dim), k, softness, link, name, log), x, dim)


def _mask_of_rows(x: Tensor, k: float | Tensor, softness: float | Tensor, link: Link, name: str, log: bool) -> Tensor:
    if not torch.compiler.is_compiling() and (shards := shards_of_rows()) is not None:
        return mask_of_parts(x, k, softness, link, name, log, shards)[0]
    batch, n = x.shape[:-1], x.shape[-1]
    check_k(k, x, batch, n)
    check_softness(name, softness, x, batch)
    if torch.compiler.is_compiling() and writes_onnx():
        return portable_mask(x, k, softness, link, log)
    y = _plain_map(x, k, softness, link, log)
    if y is not None:
        return y
    on_host = x.is_cuda and not torch.compiler.is_compiling()
    k, softness = (row_scalar(value, x, batch, on_host) for value in (k, softness))
    if torch.compiler.is_compiling() and is_dtensor(x):
        return mask_in_graph(x, k, softness, link, log, name)
    y, _, _ = _apply(x, k, softness, link, log, name, checks_contents(x))
    return y


def mask_distances(x: Tensor, k: float | Tensor, softness: float | Tensor, *, link: Link, name: str) -> Tensor:
    """The z of the relaxed mask F(z) along the last axis; differentiable as the mask is."""
    check_scores(x, -1)
    if not torch.compiler.is_compiling() and (shards := shards_of_rows()) is not None:
        return distances_of_parts(x, k, softness, link, name, shards)
    check_k(k, x, x.shape[:-1], x.shape[-1])
    check_softness(name, softness, x, x.shape[:-1])
    found = _solved_plainly(x, k, softness, link, False)
    if found is None:
        return _distances(x, k, softness, link, name, checks_contents(x))
    if x.requires_grad and torch.is_grad_enabled():
        return _PlainDistances.apply(x, found)
    return distances_of(x, *_at(x, found))


def mask_threshold(x: Tensor, k: float | Tensor, softness: float | Tensor, *, link: Link, name: str) -> Tensor:
    """The float64 t of the relaxed mask F((x - t) / s) along the last axis; differentiable as the mask is."""
    if not torch.compiler.is_compiling() and (shards := shards_of_rows()) is not None:
        return mask_of_parts(x, k, softness, link, name, False, shards)[1]
    check_k(k, x, x.shape[:-1], x.shape[-1])
    check_softness(name, softness, x, x.shape[:-1])
    k, scale = (row_scalar(value, x, x.shape[:-1], False) for value in (k, softness))
    if torch.compiler.is_compiling() and is_dtensor(x):
        return threshold_in_graph(x, k, scale, link, name)
    _, anchor, offset = _apply(x, k, scale, link, False, name, checks_contents(x))
    return anchor + offset * scale


def _distances(x: Tensor, k: float | Tensor, softness: float | Tensor, link: Link, name: str, check: bool) -> Tensor:
    k, scale = (row_scalar(value, x, x.shape[:-1], False) for value in (k, softness))
    _, anchor, offset = _apply(x, k, scale, link, False, name, check)
    return distances(x, Threshold(anchor, offset), scale)


@of_rows(in_parts=True)
def capped_simplex_map(
    x: Tensor, k: float | Tensor, scale: float | Tensor = 1.0, *, link: Link, dim: int | tuple[int, ...] = -1
) -> Tensor:
    r"""Relaxes top-k by a shifted, increasing link function F (third argument: ``scale``; ``dim`` by keyword).

    .. math:: y_i = F((x_i - t)/s), \qquad t \text{ such that } \sum_i y_i = k

    Every relaxed mask of this library is this map with a link of its own; pass a :class:`Link` to make another. Keeps
    the order of ``x`` and is invariant to ``x + c``; tends to the k-hot top-k as ``scale -> 0`` (for a link with
    compact support it gets there). Differentiable in ``x``, ``k`` and ``scale``, forwards and backwards, as often as F
    is. O(n) time per step of the root finder (3 to 6 on ordinary rows), no sort; saves ``x`` and two numbers per row.

    Args:
        x: Scores with ``n`` entries along ``dim``; ``-inf`` excludes an entry, ``inf`` selects it.
        k: Sum of the result, ``0 <= k <= n``.
        scale: Positive softness.
        link: The link function. ``torch.compile`` takes any, made inside or outside of the compiled function; an
            exported program only one that has a name, see :class:`Link`.
        dim: Axis of the ground set, or axes that are one ground set together.

    Returns:
        Tensor like ``x``, in ``[0, 1]``, summing to ``k`` along ``dim``.

    Raises:
        ValueError: If ``k`` or ``scale`` is out of range, ``x`` contains NaN, or fewer than ``k`` entries are left
            unmasked. Details: :mod:`khot.relaxations`.

    References:
        [1] Struski et al. (2025), "LapSum - One Method to Differentiate Them All", section 3, for general F.

    Example:
        >>> capped_simplex_map(torch.tensor([0.0, 1.0, 2.0]), 1.5, link=Logistic())
        tensor([0.2689, 0.5000, 0.7311])
    """
    if not isinstance(link, Link):
        raise TypeError(f"`link` must be a khot.relaxations.Link, but got {link!r}")
    return relaxed_mask(x, k, scale, dim, link=link, name="scale")
