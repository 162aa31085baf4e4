"""The short way of hard modules on a CPU: one loop gives the entries that are kept, with no mask to multiply by."""

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
    """What a hard mask keeps.

    Attributes:
        values: The entries that are kept, and zeros; with the gradient of the entries.
        mask: Which are kept, as bools.
        smallest: The smallest positive score that is kept in each row; infinite where there is none.
    """

    values: Tensor
    mask: Tensor
    smallest: Tensor


class _Keep(Function):
    """The kept entries as a function of all: linear, so that the derivative is the same selection of the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, values: list[Tensor], mask: Tensor) -> Tensor:
        ctx.save_for_backward(mask)
        return values.pop()  # autograd makes them the result, so that to keep them here would be a circle

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (mask,) = ctx.saved_tensors
        return torch.where(mask, grad, torch.zeros((), dtype=grad.dtype, device=grad.device)), None, None


def keep_largest(x: Tensor, k: Any, dim: int | tuple[int, ...], by: str) -> Kept | None:
    """The k largest entries along an axis; None for calls that have to go the long way, wrong ones among them."""
    is_whole = not (k.is_floating_point() or k.dtype == torch.bool) if isinstance(k, Tensor) else is_int(k)
    call = call_of(x, k) if isinstance(k, Tensor) else call_of(x)
    if not (call.is_plain and call.shards is None and is_whole and x.numel() > 0):
        return None
    rows = as_rows(x.detach(), dim)
    choice = selection.keep_largest.choose(rows)
    if choice is None:  # in plain torch the long way takes less time
        return None
    batch = rows.shape[:-1]
    try:
        sizes = torch.as_tensor(k, dtype=torch.int64).expand(batch)
    except RuntimeError:
        return None
    values, mask, smallest = selection.keep_largest.by(choice, rows, sizes, by == "magnitude")
    if bool(smallest.isnan().any()):
        return None
    values, mask = as_axes(values, x, dim), as_axes(mask, x, dim)
    if x.requires_grad and torch.is_grad_enabled():
        values = apply_untransformed(_Keep, x, [values], mask)
    return Kept(values, mask, smallest)
