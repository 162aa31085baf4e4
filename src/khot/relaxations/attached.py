r"""Values and offsets of thresholds together with their derivatives, for a map whose thresholds are already known.

The operators of :mod:`khot.kernels.threshold` find the threshold t = anchor + offset * sigma and the values, but have
no derivatives. Two functions attach them: one to the values, one to the offset. Their formulas, in
:mod:`khot.kernels.threshold.derivatives`, contain the offset; when they are differentiated again, they use the offset
with its own derivatives. This gives derivatives of every order in both modes.
"""

from typing import Any, NamedTuple

from torch import Tensor
from torch.autograd import Function

from khot._contents import checks_contents
from khot._distributed.shards import Shards
from khot._torch_internals import alias
from khot.kernels import threshold
from khot.kernels.call import call_of, is_differentiated_again
from khot.kernels.exact.rows import Threshold
from khot.kernels.links.base import Link
from khot.kernels.operators.autograd import move_batch_first, with_forward_mode
from khot.kernels.threshold import exact
from khot.kernels.threshold.derivatives import MapRows, derivative, tangents
from khot.kernels.threshold.kinds import Kind
from khot.kernels.threshold.reductions import reductions

_Grads = tuple[Tensor | None, ...]


class Setting(NamedTuple):
    """A map without its arguments.

    Attributes:
        link: The link F.
        kind: The kind of map.
        softness: The name of the softness in error messages.
        shards: The processes that hold the other parts of the rows, or None if rows are whole.
    """

    link: Link
    kind: Kind
    softness: str
    shards: Shards | None = None

    def arguments(self, x: Tensor, k: Tensor, s: Tensor) -> tuple[Tensor, Tensor, Tensor, int, float, str, str, bool]:
        """The arguments of an operator that finds thresholds, all constants."""
        return x.detach(), k.detach(), s.detach(), *self.link.key, self.kind.name, self.softness, checks_contents(x)


class _Values(Function):
    """(x, k, s, y, a, c) -> y, the values of the map, with their derivatives in x, k and s."""

    @staticmethod
    def forward(x: Tensor, k: Tensor, s: Tensor, y: Tensor, anchor: Tensor, offset: Tensor, setting: Setting) -> Tensor:
        return alias(y)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, k, s, _, anchor, offset, ctx.setting = inputs
        ctx.save_for_backward(x, k, s, anchor, offset)
        ctx.save_for_forward(x, k, s, anchor, offset)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> _Grads:
        x, k, s, anchor, offset = ctx.saved_tensors
        setting: Setting = ctx.setting
        call = call_of(x, k, s, anchor, offset, grad)
        if not is_differentiated_again(call):
            options = *setting.link.key, setting.kind.name, ctx.needs_input_grad[2]
            if setting.shards is None:
                return *threshold.mask_derivative.within(call, x, s, anchor, offset, grad, *options), *(None,) * 4
            return *exact.mask_derivative_in_parts(x, s, anchor, offset, grad, *options, setting.shards), *(None,) * 4
        offset = offset_of(x, k, s, anchor, offset, setting, call=call)
        return *_derivative(ctx, x, s, Threshold(anchor, offset), grad, None), *(None,) * 4

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Any, int]:
        return values(*move_batch_first(info.batch_size, in_dims, args[:6]), args[6]), 0


class _Offset(Function):
    """(x, k, s, a, c) -> c, the offset of the threshold, with its derivatives in x, k and s."""

    @staticmethod
    def forward(x: Tensor, k: Tensor, s: Tensor, anchor: Tensor, offset: Tensor, setting: Setting) -> Tensor:
        return alias(offset)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        *tensors, ctx.setting = inputs
        ctx.save_for_backward(*tensors)
        ctx.save_for_forward(*tensors)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> _Grads:
        x, k, s, anchor, offset = ctx.saved_tensors
        setting: Setting = ctx.setting
        call = call_of(x, k, s, anchor, offset, grad)
        again = is_differentiated_again(call)
        if setting.shards is None and not again:
            options = *setting.link.key, setting.kind.name
            return *threshold.threshold_derivative.within(call, x, s, anchor, offset, grad, *options), *(None,) * 3
        if again:
            offset = offset_of(x, k, s, anchor, offset, setting, call=call)
        return *_derivative(ctx, x, s, Threshold(anchor, offset), None, grad), *(None,) * 3

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Any, int]:
        return offset_of(*move_batch_first(info.batch_size, in_dims, args[:5]), args[5]), 0


def _derivative(
    ctx: Any, x: Tensor, s: Tensor, at: Threshold, grad_y: Tensor | None, grad_offset: Tensor | None
) -> _Grads:
    grad_x, grad_k, grad_s = derivative(map_rows(x, s, at, ctx.setting), grad_y, grad_offset)
    needs_x, needs_k, needs_s = ctx.needs_input_grad[:3]
    return grad_x.to(x.dtype) if needs_x else None, grad_k if needs_k else None, grad_s if needs_s else None


def map_rows(x: Tensor, s: Tensor, at: Threshold, setting: Setting) -> MapRows:
    """The quantities that the derivatives need."""
    link, kind, _, shards = setting
    return MapRows.of(x, s.to(x.device), at, link, kind, reductions(shards))


def _tangents(ctx: Any, saved: list[Tensor], dx: Tensor | None, dk: Tensor | None, ds: Tensor | None) -> list[Tensor]:
    x, k, s, anchor, offset = saved
    if ctx.setting.shards is not None:
        raise NotImplementedError("sharded rows have no forward-mode derivatives: use backward()")
    at = Threshold(anchor, offset_of(x, k, s, anchor, offset, ctx.setting))
    dy, dc = tangents(map_rows(x, s, at, ctx.setting), dx, dk, ds)
    return [dy.to(x.dtype), dc]


def _jvp_of_values(ctx: Any, saved: list[Tensor], dx: Tensor, dk: Tensor, ds: Tensor, *_: None) -> Tensor:
    return _tangents(ctx, saved, dx, dk, ds)[0]


def _jvp_of_offset(ctx: Any, saved: list[Tensor], dx: Tensor, dk: Tensor, ds: Tensor, *_: None) -> Tensor:
    return _tangents(ctx, saved, dx, dk, ds)[1]


values = with_forward_mode(_Values, _jvp_of_values)
offset_of = with_forward_mode(_Offset, _jvp_of_offset)
