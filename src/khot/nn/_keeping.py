"""The fast path of hard modules on a CPU: one loop returns the kept entries, without a mask to multiply by."""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from khot._torch_internals import apply_untransformed
from khot._validation import is_int
from khot.kernels import selection
from khot.kernels.call import call_of
from khot.relaxations.axes import as_axes, as_rows


class Kept(NamedTuple):
    """The entries that a hard mask keeps.

    Attributes:
        values: The kept entries, with their gradient, and zeros or another number.
        mask: Which entries are kept, as bools.
        smallest: The smallest positive score that is kept in each row; infinite if there is none.
    """

    values: Tensor
    mask: Tensor
    smallest: Tensor


class _KeepForSoftmax(Function):
    """The kept entries, with ``-inf`` for the others, whose gradient is 0 already: no softmax depends on them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, values: list[Tensor]) -> Tensor:
        return values.pop()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _Keep(Function):
    """The kept entries as a function of all. It is linear, so the derivative is the same selection of the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, values: list[Tensor], mask: Tensor) -> Tensor:
        ctx.save_for_backward(mask)
        return values.pop()  # autograd makes them the result; keeping a reference here would form a cycle

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (mask,) = ctx.saved_tensors
        if grad.is_contiguous():
            mask = mask.contiguous()  # along another axis it has a layout in which the selection would be slower
        return torch.where(mask, grad, torch.zeros((), dtype=grad.dtype, device=grad.device)), None, None


def keep_largest(x: Tensor, k: Any, dim: int | tuple[int, ...], by: str, for_softmax: bool = False) -> Kept | None:
    """The k largest entries along an axis; None for calls that need the general path, including invalid ones.

    ``for_softmax`` puts ``-inf`` in place of the other entries, instead of 0; only a softmax may use these values.
    """
    is_tensor = isinstance(k, Tensor)
    if is_tensor:
        is_whole, call = not (k.is_floating_point() or k.dtype == torch.bool), call_of(x, k)
    else:
        is_whole, call = type(k) is int or is_int(k), call_of(x)
    if not (call.is_plain and is_whole and x.numel() > 0):
        return None
    rows = x.detach() if dim == -1 else as_rows(x.detach(), dim)
    keep = selection.keep_largest.find(rows)
    if keep is None:  # in plain torch the general path is faster
        return None
    if is_tensor:
        if k.device != x.device:  # the general path raises the error
            return None
        try:
            k = k.long().expand(rows.shape[:-1])
        except RuntimeError:
            return None
    found = keep(rows, k, by == "magnitude", -math.inf if for_softmax else 0.0)
    if found is None:
        return None
    values, mask, smallest = found
    if dim != -1:
        values, mask = as_axes(values, x, dim), as_axes(mask, x, dim)
    if x.requires_grad and torch.is_grad_enabled():
        given = (_KeepForSoftmax, x, [values]) if for_softmax else (_Keep, x, [values], mask)
        values = apply_untransformed(*given)
    return Kept(values, mask, smallest)
