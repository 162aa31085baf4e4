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

from khot._distributed.boundary import of_rows
from khot._distributed.shards import Shards
from khot._torch_internals import alias, is_eager_everywhere, is_plain
from khot._validation import check_k, check_scores, check_softness, checks_contents
from khot.kernels import threshold
from khot.kernels.autograd import move_batch_first, with_forward_mode
from khot.kernels.call import Call, call_of
from khot.kernels.links.base import Link
from khot.kernels.rows import Threshold, with_an_item
from khot.kernels.threshold import exact
from khot.kernels.threshold.derivatives import MapRows, derivative, tangents
from khot.kernels.threshold.kinds import LOG_MASK, MASK, Kind
from khot.kernels.threshold.reductions import reductions
from khot.kernels.threshold.reference import portable_mask

from .axes import as_axes, as_rows

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
        return y.clone() if torch.compiler.is_compiling() else alias(y)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, k, s, _, anchor, offset, ctx.setting = inputs
        ctx.save_for_backward(x, k, s, anchor, offset)
        ctx.save_for_forward(x, k, s, anchor, offset)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> _Grads:
        x, k, s, anchor, offset = ctx.saved_tensors
        setting: Setting = ctx.setting
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            options = setting.link.key, setting.kind.name, ctx.needs_input_grad[2]
            if setting.shards is None:
                return *threshold.mask_derivative(x, s, anchor, offset, grad, *options), *(None,) * 4
            return *exact.mask_derivative(x, s, anchor, offset, grad, *options, setting.shards), *(None,) * 4
        offset = _offset(x, k, s, anchor, offset, setting)
        return *_derivative(ctx, x, k, s, Threshold(anchor, offset), grad, None), *(None,) * 4

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Any, int]:
        return _values(*move_batch_first(info.batch_size, in_dims, args[:6]), args[6]), 0


class _Offset(Function):
    """(x, k, s, a, c) -> c, the offset of the threshold, with its derivatives in x, k and s."""

    @staticmethod
    def forward(x: Tensor, k: Tensor, s: Tensor, anchor: Tensor, offset: Tensor, setting: Setting) -> Tensor:
        return offset.clone() if torch.compiler.is_compiling() else alias(offset)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        *tensors, ctx.setting = inputs
        ctx.save_for_backward(*tensors)
        ctx.save_for_forward(*tensors)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> _Grads:
        x, k, s, anchor, offset = ctx.saved_tensors
        setting: Setting = ctx.setting
        if setting.shards is None and (torch.compiler.is_compiling() or not torch.is_grad_enabled()):
            options = setting.link.key, setting.kind.name
            return *threshold.threshold_derivative(x, s, anchor, offset, grad, *options), *(None,) * 3
        if torch.is_grad_enabled():
            offset = _offset(x, k, s, anchor, offset, setting)
        return *_derivative(ctx, x, k, s, Threshold(anchor, offset), None, grad), *(None,) * 3

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Any, int]:
        return _offset(*move_batch_first(info.batch_size, in_dims, args[:5]), args[5]), 0


def _derivative(
    ctx: Any, x: Tensor, k: Tensor, s: Tensor, at: Threshold, grad_y: Tensor | None, grad_offset: Tensor | None
) -> _Grads:
    link, kind, _, shards = ctx.setting
    rows = MapRows.of(x, s.to(x.device), at, link, kind, reductions(shards), k.to(x.device))
    grad_x, grad_k, grad_s = derivative(rows, grad_y, grad_offset)
    needs_x, needs_k, needs_s = ctx.needs_input_grad[:3]
    return grad_x.to(x.dtype) if needs_x else None, grad_k if needs_k else None, grad_s if needs_s else None


def _tangents(ctx: Any, saved: list[Tensor], dx: Tensor | None, dk: Tensor | None, ds: Tensor | None) -> list[Tensor]:
    x, k, s, anchor, offset = saved
    if ctx.setting.shards is not None:
        raise NotImplementedError("rows that are cut over processes have no forward-mode derivatives: use backward()")
    at = Threshold(anchor, _offset(x, k, s, anchor, offset, ctx.setting))
    rows = MapRows.of(x, s.to(x.device), at, ctx.setting.link, ctx.setting.kind, k=k.to(x.device))
    dy, dc = tangents(rows, dx, dk, ds)
    return [dy.to(x.dtype), dc]


_values = with_forward_mode(_Values, lambda ctx, saved, dx, dk, ds, *_: _tangents(ctx, saved, dx, dk, ds)[0])
_offset = with_forward_mode(_Offset, lambda ctx, saved, dx, dk, ds, *_: _tangents(ctx, saved, dx, dk, ds)[1])


# ---- Calls on data with numbers for k and the softness, as nearly all are, at the least fixed cost


class _Found(NamedTuple):
    """What such a call has found: y, the thresholds of all rows, its numbers, and what finds the gradient."""

    y: Tensor
    anchor: Tensor
    offset: Tensor
    k: float
    softness: float
    setting: Setting
    gradient: Any


class _OfScores(Function):
    """The values as a function of the scores alone; derivatives of the derivative are those of :class:`_Values`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, found: _Found) -> Tensor:
        ctx.save_for_backward(x)
        ctx.found = found
        return found.y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (x,), found = ctx.saved_tensors, ctx.found
        setting, batch = found.setting, x.shape[:-1]
        again = torch.is_grad_enabled()  # this derivative is to be differentiated
        if is_plain(grad) and is_eager_everywhere() and not again:
            g = grad.to(x.dtype).contiguous()
            grad_x = found.gradient(x, found.softness, found.anchor, found.offset, g, setting.link, setting.kind)
            if grad_x is not None:
                return grad_x, None
        k, s = (row_scalar(v, x, batch, False) for v in (found.k, found.softness))
        anchor, offset = (v.reshape(batch) for v in (found.anchor, found.offset))
        with torch.enable_grad():
            x = x if again else x.detach().requires_grad_()
            y = _values(x, k, s, found.y.detach(), anchor, offset, setting)
        return torch.autograd.grad(y, x, grad, create_graph=again)[0], None


def _found_plainly(call: Call, x: Tensor, k: Any, softness: Any, setting: Setting) -> _Found | None:
    if not call.is_plain or type(k) not in NUMBERS or type(softness) not in NUMBERS:
        return None
    if not x.is_contiguous() or x.dtype not in (torch.float32, torch.float64):
        return None
    short: Any = threshold.plain.find(x, setting.link, setting.kind)
    found = short and short.mask(x, float(k), float(softness), setting.link, setting.kind)
    if found is None:
        return None
    y, anchor, offset = found
    return _Found(y, anchor, offset, k, softness, setting, short.gradient)


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

    def logarithm(self, x: Tensor, k: float | Tensor, softness: float | Tensor, dim: int | tuple[int, ...]) -> Tensor:
        """The logarithms of the values of a mask."""
        return self._replace(kind=LOG_MASK)(x, k, softness, dim)

    def __call__(self, x: Tensor, k: float | Tensor, softness: float | Tensor, dim: int | tuple[int, ...]) -> Tensor:
        """The values along ``dim``."""
        check_scores(x, dim, joint=True)
        if dim in (-1, x.dim() - 1):
            return self._values(x, k, softness)
        return as_axes(self._values(as_rows(x, dim), k, softness), x, dim)

    def _values(self, x: Tensor, k: float | Tensor, softness: float | Tensor) -> Tensor:
        call, n = call_of(x, k, softness), x.shape[-1]
        if call.shards is None:
            self._check(x, k, softness)
        if call.writes_onnx:
            return portable_mask(x, k, softness, self.link, self.kind)
        setting = Setting(self.link, self.kind, self.softness, call.shards)
        found = None if call.shards is not None else _found_plainly(call, x, k, softness, setting)
        if found is not None:
            return _OfScores.apply(x, found) if x.requires_grad and torch.is_grad_enabled() else found.y
        x, k, s = _tensors(call, x, k, softness, 0.0 if self.kind.absolute else -torch.inf)
        y = _values(x, k, s, *_solved(x, k, s, setting), setting)
        return y if y.shape[-1] == n else y[..., :n]

    def distances(self, x: Tensor, k: float | Tensor, softness: float | Tensor) -> Tensor:
        """The z of the mask F(z) along the last axis; differentiable as the mask is."""
        x, _, s, anchor, offset, setting, n = self._threshold(x, k, softness)
        here, seen = reductions(setting.shards).seen(s, offset)
        z = self.kind.distances(x, Threshold(anchor, seen), here, self.link)
        return z if z.shape[-1] == n else z[..., :n]

    def threshold(self, x: Tensor, k: float | Tensor, softness: float | Tensor) -> Tensor:
        """The float64 t of the mask F((x - t) / s) along the last axis; differentiable as the mask is."""
        _, _, s, anchor, offset, _, _ = self._threshold(x, k, softness)
        return anchor + offset * s

    def _threshold(
        self, x: Tensor, k: float | Tensor, softness: float | Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Setting, int]:
        call, n = call_of(x, k, softness), x.shape[-1]
        if call.shards is None:
            self._check(x, k, softness)
        setting = Setting(self.link, self.kind, self.softness, call.shards)
        x, k, s = _tensors(call, x, k, softness, -torch.inf)
        arguments = x.detach(), k.detach(), s.detach(), self.link.key, self.kind.name, self.softness, checks_contents(x)
        if call.shards is None:
            anchor, offset = threshold.threshold(*arguments)
        else:
            anchor, offset = exact.threshold(*arguments, call.shards)
        return x, k, s, anchor, _offset(x, k, s, anchor, offset, setting), setting, n

    def _check(self, x: Tensor, k: float | Tensor, softness: float | Tensor) -> None:
        check_k(k, x, x.shape[:-1], x.shape[-1])
        check_softness(self.softness, softness, x, x.shape[:-1])


def _tensors(
    call: Call, x: Tensor, k: float | Tensor, softness: float | Tensor, masked: float
) -> tuple[Tensor, Tensor, Tensor]:
    """x, k and the softness; with an item that is masked, where rows are cut and this process has none."""
    on_host = x.is_cuda and not call.is_compiling
    k, softness = (row_scalar(value, x, x.shape[:-1], on_host) for value in (k, softness))
    return x if call.shards is None else with_an_item(x, masked), k, softness


def _solved(x: Tensor, k: Tensor, s: Tensor, setting: Setting) -> tuple[Tensor, Tensor, Tensor]:
    """Values, anchors and offsets, all constants."""
    options = setting.link.key, setting.kind.name, setting.softness, checks_contents(x)
    arguments = x.detach(), k.detach(), s.detach(), *options
    found: tuple[Tensor, Tensor, Tensor] = (
        threshold.mask(*arguments) if setting.shards is None else exact.mask(*arguments, setting.shards)
    )
    return found


def row_scalar(value: float | Tensor, x: Tensor, batch: torch.Size, on_host: bool) -> Tensor:
    """A number for each row; one ``on_host`` for all rows stays there, which saves an accelerator a launch."""
    if isinstance(value, Tensor):
        return value.to(x.device, torch.float64).expand(batch)
    if on_host:
        return torch.full((), value, dtype=torch.float64, device="cpu").expand(batch)
    if torch.compiler.is_compiling():
        return x.new_full(batch, value, dtype=torch.float64)  # a DTensor, if x is one
    return torch.full(batch, value, dtype=torch.float64, device=x.device)


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
    return ThresholdMap(link, "scale")(x, k, scale, dim)
