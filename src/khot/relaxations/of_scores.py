"""Plain calls, in which only the scores may need a gradient. Nearly all calls are plain, so fixed costs matter here."""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from khot._torch_internals import apply_untransformed
from khot.kernels import threshold
from khot.kernels.call import call_of, is_differentiated_again
from khot.kernels.exact.rows import Threshold, in_rows_of
from khot.kernels.threshold.derivatives import derivative

from .attached import Setting, map_rows, offset_of

NUMBERS = (float, int)


class _Found(NamedTuple):
    """What the gradient needs to know about the thresholds of all rows.

    Attributes:
        k: A number, or one for each row.
        softness: Likewise.
        anchor: The anchors of the thresholds, one for each row.
        offset: The offsets of the thresholds, one for each row.
        setting: The map.
        short: A function that finds the gradient at the least fixed cost if k and the softness are numbers; else None.
    """

    k: float | Tensor
    softness: float | Tensor
    anchor: Tensor
    offset: Tensor
    setting: Setting
    short: Any

    def of_rows(self, x: Tensor) -> list[Tensor]:
        """k, softness, anchor and offset of each row, in the shape of the batch."""
        batch, numbers = x.shape[:-1], self[:4]
        return [v.reshape(batch) if isinstance(v, Tensor) else in_rows_of(x, v, x.is_cuda) for v in numbers]


class _OfScores(Function):
    """The values as a function of only the scores."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, values: list[Tensor], found: _Found) -> Tensor:
        ctx.save_for_backward(*((x,) if found.short else (x, found.k, found.softness)))
        ctx.found = found
        return values.pop()  # autograd makes them the result; keeping a reference here would form a cycle

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (x, *_), found = ctx.saved_tensors, ctx.found  # raises if one of them was written to
        link, kind, _, _ = found.setting
        call = call_of(grad)
        if is_differentiated_again(call):
            k, s, anchor, offset = found.of_rows(x)
            at = Threshold(anchor, offset_of(x, k, s, anchor, offset, found.setting, call=call))
            grad_x = derivative(map_rows(x, s, at, found.setting), grad, None)[0]
            return grad_x.to(x.dtype), None, None
        if call.is_plain and found.short is not None:
            grad_x = found.short.gradient(x, found.softness, found.anchor, found.offset, grad, link, kind)
            if grad_x is not None:
                return grad_x.to(x.dtype), None, None
        _, s, anchor, offset = found.of_rows(x)
        options = *link.key, kind.name, False
        return threshold.mask_derivative.within(call, x, s, anchor, offset, grad, *options)[0], None, None


def of_scores(x: Tensor, k: float | Tensor, softness: float | Tensor, setting: Setting) -> Tensor:
    """The values of a plain call."""
    choice = threshold.mask.choose(x, setting.link, setting.kind)
    short = threshold.plain.named(choice.name) if choice and type(k) in NUMBERS and type(softness) in NUMBERS else None
    solved = short and short.mask(x, float(k), float(softness), setting.link, setting.kind)
    if solved is None:  # no short way exists, or a row is left to the exact path
        short, k, softness = None, *(in_rows_of(x, v, x.is_cuda).detach() for v in (k, softness))
        solved = threshold.mask.by(choice, *setting.arguments(x, k, softness))
    y, anchor, offset = solved
    y = y.to(x.dtype)
    if not (x.requires_grad and torch.is_grad_enabled()):
        return y
    result: Tensor = apply_untransformed(_OfScores, x, [y], _Found(k, softness, anchor, offset, setting, short))
    return result
