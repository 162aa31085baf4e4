r"""Every map that a threshold makes, as a differentiable function of scores, sum and softness.

A :class:`ThresholdMap` finds the threshold t = anchor + offset * sigma and the values by an operator of
:mod:`khot.kernels.threshold`, which knows nothing of derivatives. Two functions attach these: one to the values, one to
the offset. Their derivatives, formulas in :mod:`khot.kernels.threshold.derivatives`, contain the offset, and where they
are differentiated again they take it with its own derivatives. So derivatives of every order and mode follow.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from khot._distributed.shards import Shards
from khot._torch_internals import alias, apply_untransformed
from khot._validation import check_k, check_scores, check_softness, checks_contents
from khot.kernels import threshold
from khot.kernels.autograd import move_batch_first, wants_gradient, with_forward_mode
from khot.kernels.call import Call, call_of, is_differentiated_again
from khot.kernels.links.base import Link
from khot.kernels.registry import Backend
from khot.kernels.rows import Threshold, compute_dtype, with_an_item
from khot.kernels.threshold import exact
from khot.kernels.threshold.derivatives import MapRows, derivative, tangents
from khot.kernels.threshold.kinds import LOG_MASK, MASK, Kind
from khot.kernels.threshold.reductions import reductions
from khot.kernels.threshold.reference import portable_mask

from .axes import as_axes, as_rows
from .boundary import with_call

NUMBERS = (float, int)

_Grads = tuple[Tensor | None, ...]


class Setting(NamedTuple):
    """What a map is but for its arguments.

    Attributes:
        link: The link F.
        kind: The kind of map.
        softness: What error messages call the softness.
        shards: Who holds the other parts of the rows; None where rows are whole.
    """

    link: Link
    kind: Kind
    softness: str
    shards: Shards | None = None


# ---- Derivatives


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
            options = setting.link.key, setting.kind.name, ctx.needs_input_grad[2]
            if setting.shards is None:
                return *threshold.mask_derivative.within(call, x, s, anchor, offset, grad, *options), *(None,) * 4
            return *exact.mask_derivative(x, s, anchor, offset, grad, *options, setting.shards), *(None,) * 4
        offset = _offset(x, k, s, anchor, offset, setting, call=call)
        return *_derivative(ctx, x, k, s, Threshold(anchor, offset), grad, None), *(None,) * 4

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Any, int]:
        return _values(*move_batch_first(info.batch_size, in_dims, args[:6]), args[6]), 0


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
            options = setting.link.key, setting.kind.name
            return *threshold.threshold_derivative.within(call, x, s, anchor, offset, grad, *options), *(None,) * 3
        if again:
            offset = _offset(x, k, s, anchor, offset, setting, call=call)
        return *_derivative(ctx, x, k, s, Threshold(anchor, offset), None, grad), *(None,) * 3

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Any, int]:
        return _offset(*move_batch_first(info.batch_size, in_dims, args[:5]), args[5]), 0


def _derivative(
    ctx: Any, x: Tensor, k: Tensor, s: Tensor, at: Threshold, grad_y: Tensor | None, grad_offset: Tensor | None
) -> _Grads:
    grad_x, grad_k, grad_s = derivative(_map_rows(x, k, s, at, ctx.setting), grad_y, grad_offset)
    needs_x, needs_k, needs_s = ctx.needs_input_grad[:3]
    return grad_x.to(x.dtype) if needs_x else None, grad_k if needs_k else None, grad_s if needs_s else None


def _map_rows(x: Tensor, k: Tensor, s: Tensor, at: Threshold, setting: Setting) -> MapRows:
    link, kind, _, shards = setting
    return MapRows.of(x, s.to(x.device), at, link, kind, reductions(shards), k.to(x.device))


def _tangents(ctx: Any, saved: list[Tensor], dx: Tensor | None, dk: Tensor | None, ds: Tensor | None) -> list[Tensor]:
    x, k, s, anchor, offset = saved
    if ctx.setting.shards is not None:
        raise NotImplementedError("rows that are cut over processes have no forward-mode derivatives: use backward()")
    at = Threshold(anchor, _offset(x, k, s, anchor, offset, ctx.setting))
    dy, dc = tangents(_map_rows(x, k, s, at, ctx.setting), dx, dk, ds)
    return [dy.to(x.dtype), dc]


_values = with_forward_mode(_Values, lambda ctx, saved, dx, dk, ds, *_: _tangents(ctx, saved, dx, dk, ds)[0])
_offset = with_forward_mode(_Offset, lambda ctx, saved, dx, dk, ds, *_: _tangents(ctx, saved, dx, dk, ds)[1])


# ---- Plain calls in which the scores alone may need a gradient, as in nearly all


class _Found(NamedTuple):
    """What is known of the thresholds of all rows, for the gradient.

    Attributes:
        k: A number, or one of each row.
        softness: Likewise.
        anchor: Of the thresholds, of each row.
        offset: Likewise.
        setting: What the map is.
        short: What finds the gradient at the least fixed cost, where k and the softness are numbers; else None.
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
        return [v.reshape(batch) if isinstance(v, Tensor) else row_scalar(v, x, batch, x.is_cuda) for v in numbers]


class _OfScores(Function):
    """The values as a function of the scores alone."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, values: list[Tensor], found: _Found) -> Tensor:
        ctx.save_for_backward(x)
        ctx.found = found
        return values.pop()  # of which autograd makes the result: to keep them here would be a circle

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (x,), found = ctx.saved_tensors, ctx.found
        link, kind, _, _ = found.setting
        call = call_of(grad)
        if is_differentiated_again(call):
            k, s, anchor, offset = found.of_rows(x)
            at = Threshold(anchor, _offset(x, k, s, anchor, offset, found.setting, call=call))
            grad_x = derivative(_map_rows(x, k, s, at, found.setting), grad, None)[0]
            return grad_x.to(x.dtype), None, None
        if call.is_plain and found.short is not None:
            items = _items(x)
            g = grad.to(items.dtype).contiguous()
            grad_x = found.short.gradient(items, found.softness, found.anchor, found.offset, g, link, kind)
            if grad_x is not None:
                return grad_x.to(x.dtype), None, None
        _, s, anchor, offset = found.of_rows(x)
        options = link.key, kind.name, False
        return threshold.mask_derivative.within(call, x, s, anchor, offset, grad, *options)[0], None, None


def _of_scores(x: Tensor, k: float | Tensor, softness: float | Tensor, setting: Setting) -> Tensor:
    """The values of a plain call."""
    choice = threshold.mask.choose(x, setting.link, setting.kind)
    y, found = _solved_shortly(choice, x, k, softness, setting) or _solved_by(choice, x, k, softness, setting)
    result: Tensor = apply_untransformed(_OfScores, x, [y], found) if wants_gradient(x) else y
    return result


def _solved_shortly(
    choice: Backend | None, x: Tensor, k: float | Tensor, softness: float | Tensor, setting: Setting
) -> tuple[Tensor, _Found] | None:
    """At the least fixed cost: where the backend can, and finds that it did not leave a row to the exact path."""
    if choice is None or type(k) not in NUMBERS or type(softness) not in NUMBERS:
        return None
    short = threshold.plain.of_backend(choice.name, x, setting.link, setting.kind)
    solved = short and short.mask(_items(x), float(k), float(softness), setting.link, setting.kind)
    if solved is None:
        return None
    y, anchor, offset = solved
    return y.to(x.dtype), _Found(k, softness, anchor, offset, setting, short)


def _solved_by(
    choice: Backend | None, x: Tensor, k: float | Tensor, softness: float | Tensor, setting: Setting
) -> tuple[Tensor, _Found]:
    k, s = (row_scalar(v, x, x.shape[:-1], x.is_cuda).detach() for v in (k, softness))
    y, anchor, offset = threshold.mask.by(choice, *_arguments(x, k, s, setting))
    return y, _Found(k, s, anchor, offset, setting, None)


def _items(x: Tensor) -> Tensor:
    """The scores as contiguous numbers of the dtype in which they are computed."""
    dtype = compute_dtype(x)
    return x if x.dtype == dtype and x.is_contiguous() else x.detach().to(dtype).contiguous()


# ---- Maps


class ThresholdMap(NamedTuple):
    """A map that a threshold makes.

    Attributes:
        link: The link F.
        softness: What error messages call the softness.
        kind: The kind of map, see :mod:`khot.kernels.threshold.kinds`.
    """

    link: Link
    softness: str
    kind: Kind = MASK

    def logarithm(
        self, call: Call, x: Tensor, k: float | Tensor, softness: float | Tensor, dim: int | tuple[int, ...]
    ) -> Tensor:
        """The logarithms of the values of a mask."""
        return self._replace(kind=LOG_MASK)(call, x, k, softness, dim)

    def __call__(
        self, call: Call, x: Tensor, k: float | Tensor, softness: float | Tensor, dim: int | tuple[int, ...]
    ) -> Tensor:
        """The values along ``dim``, in a call of this kind."""
        check_scores(x, dim, joint=True, reads_layouts=call.reads_layouts)
        if dim in (-1, x.dim() - 1):
            return self._values(call, x, k, softness)
        return as_axes(self._values(call, as_rows(x, dim), k, softness), x, dim)

    def _values(self, call: Call, x: Tensor, k: float | Tensor, softness: float | Tensor) -> Tensor:
        self._check(call, x, k, softness)
        if call.writes_onnx:
            return portable_mask(x, k, softness, self.link, self.kind)
        n, setting = x.shape[-1], Setting(self.link, self.kind, self.softness, call.shards)
        if call.is_plain and call.shards is None and not wants_gradient(k, softness):
            return _of_scores(x, k, softness, setting)
        x, k, s = _tensors(call, x, k, softness, 0.0 if self.kind.absolute else -torch.inf)
        y = _values(x, k, s, *_solved(call, x, k, s, setting), setting, call=call)
        return y if y.shape[-1] == n else y[..., :n]

    def distances(self, call: Call, x: Tensor, k: float | Tensor, softness: float | Tensor) -> Tensor:
        """The z of the mask F(z) along the last axis; differentiable as the mask is."""
        x, _, s, anchor, offset, setting, n = self._threshold(call, x, k, softness)
        here, seen = reductions(setting.shards).seen(s, offset)
        z = self.kind.distances(x, Threshold(anchor, seen), here, self.link)
        return z if z.shape[-1] == n else z[..., :n]

    def threshold(self, call: Call, x: Tensor, k: float | Tensor, softness: float | Tensor) -> Tensor:
        """The float64 t of the mask F((x - t) / s) along the last axis; differentiable as the mask is."""
        _, _, s, anchor, offset, _, _ = self._threshold(call, x, k, softness)
        return anchor + offset * s

    def _threshold(
        self, call: Call, x: Tensor, k: float | Tensor, softness: float | Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Setting, int]:
        self._check(call, x, k, softness)
        n, setting = x.shape[-1], Setting(self.link, self.kind, self.softness, call.shards)
        x, k, s = _tensors(call, x, k, softness, -torch.inf)
        arguments = _arguments(x, k, s, setting)
        if call.shards is None:
            anchor, offset = threshold.threshold.within(call, *arguments)
        else:
            anchor, offset = exact.threshold(*arguments, call.shards)
        return x, k, s, anchor, _offset(x, k, s, anchor, offset, setting, call=call), setting, n

    def _check(self, call: Call, x: Tensor, k: float | Tensor, softness: float | Tensor) -> None:
        """Of whole rows; parts of rows are checked where all processes can tell."""
        if call.shards is None:
            batch, layouts = x.shape[:-1], call.reads_layouts
            check_k(k, x, batch, x.shape[-1], reads_layouts=layouts)
            check_softness(self.softness, softness, x, batch, reads_layouts=layouts)


def _tensors(
    call: Call, x: Tensor, k: float | Tensor, softness: float | Tensor, masked: float
) -> tuple[Tensor, Tensor, Tensor]:
    """x, k and the softness; with an item that is masked, where rows are cut and this process has none."""
    on_host = x.is_cuda and not call.is_compiling
    k, softness = (row_scalar(value, x, x.shape[:-1], on_host) for value in (k, softness))
    return x if call.shards is None else with_an_item(x, masked), k, softness


def _solved(call: Call, x: Tensor, k: Tensor, s: Tensor, setting: Setting) -> tuple[Tensor, Tensor, Tensor]:
    """Values, anchors and offsets, all constants."""
    arguments = _arguments(x, k, s, setting)
    found: tuple[Tensor, Tensor, Tensor] = (
        threshold.mask.within(call, *arguments) if setting.shards is None else exact.mask(*arguments, setting.shards)
    )
    return found


def _arguments(x: Tensor, k: Tensor, s: Tensor, setting: Setting) -> tuple[Tensor, Tensor, Tensor, str, str, str, bool]:
    """Those of the operators, constants."""
    options = setting.link.key, setting.kind.name, setting.softness, checks_contents(x)
    return x.detach(), k.detach(), s.detach(), *options


def row_scalar(value: float | Tensor, x: Tensor, batch: torch.Size, on_host: bool) -> Tensor:
    """A number for each row; one ``on_host`` for all rows stays there, which saves an accelerator a launch."""
    if isinstance(value, Tensor):
        return value.to(x.device, torch.float64).expand(batch)
    if on_host:
        return torch.full((), value, dtype=torch.float64, device="cpu").expand(batch)
    return x.new_full(batch, value, dtype=torch.float64)  # in graphs a DTensor, if x is one


@with_call(in_parts=True)
def capped_simplex_map(
    _call: Call,
    x: Tensor,
    k: float | Tensor,
    scale: float | Tensor = 1.0,
    *,
    link: Link,
    dim: int | tuple[int, ...] = -1,
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
    return ThresholdMap(link, "scale")(_call, x, k, scale, dim)
