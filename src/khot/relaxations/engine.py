r"""All maps that are defined by a threshold, as differentiable functions of the scores, k and the softness.

A :class:`ThresholdMap` checks its arguments. A program for ONNX gets operations that ONNX has. A plain call with
numbers for k and the softness follows a recipe, which is looked up: its fixed costs matter. Everything else goes
through an operator that finds the values and the thresholds t = anchor + offset * sigma. Derivatives are the formulas
in :mod:`khot.kernels.threshold.derivatives`, which contain the offset. It is a result of the function, too, so that a
formula that is differentiated again uses it with its own derivatives: this gives derivatives of every order in both
modes.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.autograd import Function

from khot._contents import checks_contents
from khot._torch_internals import apply_untransformed, mark_as_outside_graphs, outside_graphs
from khot._validation import SOFTNESS_LIMITS, check_k, check_rows, check_softness
from khot.kernels import threshold
from khot.kernels.call import Call, call_of, is_differentiated_again
from khot.kernels.exact.reductions import WHOLE, Whole
from khot.kernels.exact.rows import Threshold, in_rows_of, numbers_of_rows, with_an_item
from khot.kernels.links.base import Link
from khot.kernels.operators.autograd import move_batch_first, wants_gradient, with_forward_mode
from khot.kernels.threshold import exact
from khot.kernels.threshold.derivatives import MapRows, derivative, tangents
from khot.kernels.threshold.kinds import LOG_MASK, Kind
from khot.kernels.threshold.portable import portable_mask

from .axes import as_axes, as_rows

Number = float | Tensor
NUMBERS = (float, int)


class Setting(NamedTuple):
    """A map without its arguments.

    A graph for all sizes makes a float of Python's an input where it is first read. If that is inside a Function, no
    other Function of the graph can read it (torch 2.13). Functions read no floats of modules or links, therefore:
    ``key`` is read before, and limits are integers.

    Attributes:
        link: The link F.
        key: What operators know it by.
        kind: The kind of map.
        softness: The name of the softness in error messages.
        over: Sums over the items of the rows, including those that other processes hold.
        checks: Whether bad contents raise an error.
        has_values: Whether the values are wanted, rather than only the thresholds.
    """

    link: Link
    key: tuple[int, float]
    kind: Kind
    softness: str
    over: Whole
    checks: bool
    has_values: bool


class ThresholdMap(NamedTuple):
    """A map that is defined by a threshold.

    Attributes:
        link: The link F.
        softness: The name of the softness in error messages.
        kind: The kind of map; see :mod:`khot.kernels.threshold.kinds`.
    """

    link: Link
    softness: str
    kind: Kind

    def logarithm(self, call: Call, x: Tensor, k: Number, softness: Number, dim: int | tuple[int, ...]) -> Tensor:
        """The logarithms of the values of a mask."""
        return ThresholdMap(self.link, self.softness, LOG_MASK).apply(call, x, k, softness, dim)

    def apply(self, call: Call, x: Tensor, k: Number, softness: Number, dim: int | tuple[int, ...]) -> Tensor:
        """The values along ``dim``, in a call of this kind."""
        if call.is_plain and call.over.is_whole and type(dim) is int and dim == -1 and _is_usual(x, k, softness):
            recipe = threshold.recipes.find(x, *self.link.key, self.kind.name)
            found = recipe and recipe.mask(x, k, softness)
            if found:
                y, at = found
                if not (x.requires_grad and torch.is_grad_enabled()):
                    return y
                result: Tensor = apply_untransformed(_OfScores, x, [y], (at, recipe, k, softness, self))
                return result
        check_rows(x, dim, joint=True)
        if dim in (-1, x.dim() - 1):
            return self._values(call, x, k, softness)
        return as_axes(self._values(call, as_rows(x, dim), k, softness), x, dim)

    def _values(self, call: Call, x: Tensor, k: Number, softness: Number) -> Tensor:
        self._check(call, x, k, softness)
        if call.writes_onnx:
            return portable_mask(x, k, softness, self.link, self.kind)
        if call.is_compiling and self.link.link_id is None:
            found: Tensor = _outside_graphs(call, self._values, x, k, softness)
            return found
        y = self._solved(call, x, k, softness, True)[0]
        return y if y.shape[-1] == x.shape[-1] else y[..., : x.shape[-1]]

    def distances(self, call: Call, x: Tensor, k: Number, softness: Number) -> Tensor:
        """The argument z of the mask F(z) along the last axis; differentiable as the mask is."""
        at, s, items = self._threshold(call, x, k, softness)
        here, seen = call.over.seen(s, at.offset)
        z = self.kind.distances(items, Threshold(at.anchor, seen), here, self.link)
        return z if z.shape[-1] == x.shape[-1] else z[..., : x.shape[-1]]

    def threshold(self, call: Call, x: Tensor, k: Number, softness: Number) -> Tensor:
        """The threshold t of the mask F((x - t) / s) along the last axis, in float64; differentiable as the mask is."""
        at, s, _ = self._threshold(call, x, k, softness)
        return at.anchor + at.offset * s

    def _threshold(self, call: Call, x: Tensor, k: Number, softness: Number) -> tuple[Threshold, Tensor, Tensor]:
        self._check(call, x, k, softness)
        if call.is_compiling and self.link.link_id is None:
            result: tuple[Threshold, Tensor, Tensor] = _outside_graphs(call, self._threshold, x, k, softness)
            return result
        _, at, s, items = self._solved(call, x, k, softness, False)
        s = numbers_of_rows(x, s)  # operators take a number from the host, but the formulas of callers do not
        return Threshold(at[0].detach(), at[1]), s, items

    def _solved(
        self, call: Call, x: Tensor, k: Number, s: Number, has_values: bool
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Values, thresholds, the softness, and the scores.

        If rows are sharded and this process has no items, the scores get a masked item.
        """
        k, s = (in_rows_of(x, v, x.is_cuda and call.is_plain) for v in (k, s))  # kernels take numbers from the host
        items = x if call.over.is_whole else with_an_item(x, 0.0 if self.kind.absolute else -torch.inf)
        number, q = self.link.key
        key = number, float(q)  # read here and not in a Function: see `Setting`
        setting = Setting(self.link, key, self.kind, self.softness, call.over, checks_contents(x), has_values)
        return *solved(items, k, s, setting, call), s, items

    def _check(self, call: Call, x: Tensor, k: Number, softness: Number) -> None:
        """Checks whole rows. Sharded rows are checked elsewhere, where all processes see the result."""
        if call.over.is_whole:
            check_k(k, x, x.shape[:-1], x.shape[-1])
            check_softness(self.softness, softness, x, x.shape[:-1])


def _is_usual(x: Any, k: Any, softness: Any) -> bool:
    """Whether scores are a valid tensor, and k and the softness valid numbers."""
    limits = SOFTNESS_LIMITS.get(x.dtype) if isinstance(x, Tensor) and x.numel() and x.dim() else None
    if limits is None or type(k) not in NUMBERS or type(softness) not in NUMBERS:
        return False
    return bool(0 <= k <= x.shape[-1] and limits[0] <= softness <= limits[1])


def _computed_eagerly(method: Callable[..., Any], x: Tensor, k: float | Tensor, softness: float | Tensor) -> Any:
    return outside_graphs(lambda: method(call_of(x, k, softness), x, k, softness))


_END_OF_GRAPH = mark_as_outside_graphs(
    _computed_eagerly, "graphs contain links of khot only: without fullgraph=True this mask is computed eagerly"
)


def _outside_graphs(
    call: Call, method: Callable[..., Any], x: Tensor, k: float | Tensor, softness: float | Tensor
) -> Any:
    """The result of a method of a map for a link that graphs cannot contain."""
    if call.is_exporting:
        raise ValueError(
            "an exported program contains links of khot only, but the link of this mask is another one: export a mask "
            "of khot, or a program for ONNX"
        )
    return _END_OF_GRAPH(method, x, k, softness)


def solved(x: Tensor, k: Tensor, s: Tensor, setting: Setting, call: Call) -> tuple[Tensor, Tensor]:
    """The values, and anchors and offsets (2, *batch), as functions of x (..., n) and of k and the softness (...)."""
    found: tuple[Tensor, Tensor]
    if not call.is_plain:
        found = _apply(x, k, s, setting, call, call=call)
    elif wants_gradient(x, k, s):
        found = apply_untransformed(_Solved, x, k, s, setting, call)
    else:
        found = _Solved.forward(x, k, s, setting, call)
    return found


class _Solved(Function):
    """(x, k, s) -> the values, empty if they are not wanted, and the thresholds."""

    @staticmethod
    def forward(x: Tensor, k: Tensor, s: Tensor, setting: Setting, call: Call) -> tuple[Tensor, Tensor]:
        _, key, kind, softness, over, checks, has_values = setting
        arguments = x.detach(), k.detach(), s.detach(), *key, kind.name, softness, checks, has_values
        if over.is_whole:
            y, anchor, offset = threshold.mask.within(call, *arguments)
        else:
            y, anchor, offset = exact.mask(*arguments, over=over)
        return y, torch.stack((anchor, offset))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        x, _, s, ctx.setting, call = inputs
        ctx.save_for_backward(x, s, output[1])
        if not call.is_plain:
            ctx.save_for_forward(x, s, output[1])
        if not call.is_compiling:
            ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, grad_at: Tensor | None) -> tuple[Tensor | None, ...]:
        if grad is None and grad_at is None:
            return (None,) * 5
        x, s, at = ctx.saved_tensors
        call, setting = call_of(x, s, at, grad, grad_at), ctx.setting
        if call.is_compiling and setting.has_values:  # a graph computes no second derivatives
            grad_at = None
        found = _gradients(
            x, s, at, grad if setting.has_values else None, grad_at, setting, call, ctx.needs_input_grad[2]
        )
        return *(v if needed else None for v, needed in zip(found, ctx.needs_input_grad[:3], strict=True)), None, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Any, Any]:
        (x, k, s), setting = move_batch_first(info.batch_size, in_dims, args[:3]), args[3]
        found = solved(x, k, s, setting._replace(checks=False), call_of(x, k, s))
        return found, (0, 1)


def _gradients(
    x: Tensor,
    s: Tensor,
    at: Tensor,
    grad: Tensor | None,
    grad_at: Tensor | None,
    setting: Setting,
    call: Call,
    with_scale: bool,
) -> Any:
    """The gradient in x, k and s from the gradients of the values and of the thresholds; one of these may be None."""
    over = setting.over
    if is_differentiated_again(call) or (not over.is_whole and grad_at is not None):
        rows = _map_rows(x, s, at, setting)
        grad_x, grad_k, grad_s = derivative(rows, grad, None if grad_at is None else grad_at[1])
        return grad_x.to(x.dtype), grad_k, grad_s
    options = *setting.key, setting.kind.name, with_scale

    def pulled_back(grad: Tensor, s: Tensor) -> Any:
        if over.is_whole:
            return threshold.mask_derivative.within(call, x, s, at[0], at[1], grad, *options)
        return exact.mask_derivative(x, s, at[0], at[1], grad, *options, over=over)

    if grad_at is None:
        return pulled_back(cast(Tensor, grad), s)
    of_thresholds = pulled_back(grad_at[1], numbers_of_rows(x, s))  # which no kernel of an accelerator computes
    return of_thresholds if grad is None else map(torch.add, pulled_back(grad, s), of_thresholds)


def _map_rows(x: Tensor, s: Tensor, at: Tensor, setting: Setting) -> MapRows:
    """The quantities that the derivatives need; the offsets, but not the anchors, are differentiable."""
    here = Threshold(at[0].detach(), at[1])
    return MapRows.of(x, numbers_of_rows(x, s), here, setting.link, setting.kind, setting.over)


def _jvp(ctx: Any, saved: list[Tensor], dx: Tensor | None, dk: Tensor | None, ds: Tensor | None, *_: None) -> Any:
    (x, s, at), setting = saved, ctx.setting
    if not setting.over.is_whole:
        raise NotImplementedError("sharded rows have no forward-mode derivatives: use backward()")
    dy, dc = tangents(_map_rows(x, s, at, setting), dx, dk, ds)
    dy = dy.to(x.dtype) if setting.has_values else x.new_zeros((*x.shape[:-1], 0))
    return dy, torch.stack((torch.zeros_like(dc), dc))


_apply = with_forward_mode(_Solved, _jvp)


class _OfScores(Function):
    """The values that a recipe has found, as a function of the scores alone.

    It keeps the thresholds as they are, which takes a tenth less time than tensors among the results. A derivative that
    is differentiated again solves for them once more.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: list[Tensor], rest: tuple[Any, ...]) -> Tensor:
        ctx.save_for_backward(x)
        ctx.rest = rest
        return y.pop()  # autograd makes them the result; keeping a reference here would form a circle

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (x,), (at, recipe, k, s, of) = ctx.saved_tensors, ctx.rest  # raises if x was written to
        call = call_of(grad)
        again = is_differentiated_again(call)
        if call.is_plain and not again:
            grad_x = recipe.gradient(x, s, at, grad)
            if grad_x is not None:
                return grad_x, None, None
        k, s = (in_rows_of(x, v, x.is_cuda and call.is_plain) for v in (k, s))
        setting = Setting(of.link, of.link.key, of.kind, of.softness, WHOLE, False, False)
        if again:
            at = solved(x, k, s, setting, call)[1]
        else:
            at = torch.stack([torch.as_tensor(v).view(x.shape[:-1]) for v in at])
        return _gradients(x, s, at, grad, None, setting, call, False)[0], None, None
