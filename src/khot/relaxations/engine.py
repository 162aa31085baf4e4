r"""All maps that are defined by a threshold, with one ordered list of ways to compute them.

A :class:`ThresholdMap` checks its arguments and takes the first way that suits the call. A program for ONNX gets
operations that ONNX has. A plain call finds the values at once, with a gradient in the scores. Every other call (in
graphs, under transforms, on sharded rows) asks an operator for thresholds and attaches all derivatives.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from khot._torch_internals import is_exporting, mark_as_outside_graphs, outside_graphs
from khot._validation import check_k, check_scores, check_softness, described
from khot.kernels import threshold
from khot.kernels.call import Call, call_of
from khot.kernels.exact.rows import Threshold, in_rows_of, numbers_of_rows, with_an_item
from khot.kernels.links.base import Link
from khot.kernels.operators.autograd import wants_gradient
from khot.kernels.threshold import exact
from khot.kernels.threshold.kinds import LOG_MASK, MASK, Kind
from khot.kernels.threshold.portable import portable_mask
from khot.kernels.threshold.reductions import reductions

from .attached import Setting, offset_of, values
from .axes import as_axes, as_rows
from .boundary import with_call
from .of_scores import of_scores


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

    def logarithm(
        self, call: Call, x: Tensor, k: float | Tensor, softness: float | Tensor, dim: int | tuple[int, ...]
    ) -> Tensor:
        """The logarithms of the values of a mask."""
        return ThresholdMap(self.link, self.softness, LOG_MASK).apply(call, x, k, softness, dim)

    def apply(
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
        if call.is_compiling and self.link.link_id is None:
            found: Tensor = _outside_graphs(self._values, x, k, softness)
            return found
        n, setting = x.shape[-1], Setting(self.link, self.kind, self.softness, call.shards)
        if call.is_plain and call.shards is None and not wants_gradient(k, softness):
            return of_scores(x, k, softness, setting)
        x, k, s = _tensors(call, x, k, softness, 0.0 if self.kind.absolute else -torch.inf)
        y = values(x, k, s, *_solved(call, x, k, s, setting), setting, call=call)
        return y if y.shape[-1] == n else y[..., :n]

    def distances(self, call: Call, x: Tensor, k: float | Tensor, softness: float | Tensor) -> Tensor:
        """The argument z of the mask F(z) along the last axis; differentiable as the mask is."""
        x, _, s, anchor, offset, setting, n = self._threshold(call, x, k, softness)
        here, seen = reductions(setting.shards).seen(s, offset)
        z = self.kind.distances(x, Threshold(anchor, seen), here, self.link)
        return z if z.shape[-1] == n else z[..., :n]

    def threshold(self, call: Call, x: Tensor, k: float | Tensor, softness: float | Tensor) -> Tensor:
        """The threshold t of the mask F((x - t) / s) along the last axis, in float64; differentiable as the mask is."""
        _, _, s, anchor, offset, _, _ = self._threshold(call, x, k, softness)
        return anchor + offset * s

    def _threshold(
        self, call: Call, x: Tensor, k: float | Tensor, softness: float | Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Setting, int]:
        self._check(call, x, k, softness)
        if call.is_compiling and self.link.link_id is None:
            result: tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Setting, int] = _outside_graphs(
                self._threshold, x, k, softness
            )
            return result
        n, setting = x.shape[-1], Setting(self.link, self.kind, self.softness, call.shards)
        x, k, s = _tensors(call, x, k, softness, -torch.inf)
        arguments = setting.arguments(x, k, s)
        if call.shards is None:
            anchor, offset = threshold.threshold.within(call, *arguments)
        else:
            anchor, offset = exact.threshold_in_parts(*arguments, call.shards)
        s = numbers_of_rows(x, s)  # operators take a number from the host, but the formulas of callers do not
        return x, k, s, anchor, offset_of(x, k, s, anchor, offset, setting, call=call), setting, n

    def _check(self, call: Call, x: Tensor, k: float | Tensor, softness: float | Tensor) -> None:
        """Checks whole rows. Sharded rows are checked elsewhere, where all processes see the result."""
        if call.shards is None:
            batch, layouts = x.shape[:-1], call.reads_layouts
            check_k(k, x, batch, x.shape[-1], reads_layouts=layouts)
            check_softness(self.softness, softness, x, batch, reads_layouts=layouts)


def _computed_eagerly(method: Callable[..., Any], x: Tensor, k: float | Tensor, softness: float | Tensor) -> Any:
    return outside_graphs(lambda: method(call_of(x, k, softness), x, k, softness))


_END_OF_GRAPH = mark_as_outside_graphs(
    _computed_eagerly, "graphs contain links of khot only: without fullgraph=True this mask is computed eagerly"
)


def _outside_graphs(method: Callable[..., Any], x: Tensor, k: float | Tensor, softness: float | Tensor) -> Any:
    """What a method of a map gives for a link that graphs cannot contain."""
    if is_exporting():
        raise ValueError(
            "an exported program contains links of khot only, but the link of this mask is another one: export a mask "
            "of khot, or a program for ONNX"
        )
    return _END_OF_GRAPH(method, x, k, softness)


def _tensors(
    call: Call, x: Tensor, k: float | Tensor, softness: float | Tensor, masked: float
) -> tuple[Tensor, Tensor, Tensor]:
    """x, k and the softness. If rows are sharded and this process has no items, x gets one masked item.

    Kernels take single numbers from the host. In forward mode, their tangents would be on the host, too.
    """
    on_host = x.is_cuda and call.is_plain
    k, softness = (in_rows_of(x, value, on_host) for value in (k, softness))
    return x if call.shards is None else with_an_item(x, masked), k, softness


def _solved(call: Call, x: Tensor, k: Tensor, s: Tensor, setting: Setting) -> tuple[Tensor, Tensor, Tensor]:
    """Values, anchors and offsets, all constants."""
    arguments = setting.arguments(x, k, s)
    found: tuple[Tensor, Tensor, Tensor] = (
        threshold.mask.within(call, *arguments)
        if setting.shards is None
        else exact.mask_in_parts(*arguments, setting.shards)
    )
    return found


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

    The relaxed masks of this library, except for :func:`successive_softmax_topk`, are this map with a link of their
    own; pass a :class:`Link` to make another one. The map keeps the order of ``x``, is invariant to ``x + c``, and
    tends to the k-hot top-k as ``scale -> 0`` (a link with compact support reaches it). It is differentiable in ``x``,
    ``k`` and ``scale``, in reverse and forward mode, as often as F is. The root finder takes O(n) time per step (3 to 6
    steps on ordinary rows) and does not sort. The backward pass needs ``x`` and two numbers per row.

    Args:
        x: Scores with ``n`` entries along ``dim``; ``-inf`` excludes an entry, ``inf`` selects it.
        k: Sum of the result, ``0 <= k <= n``.
        scale: Positive softness.
        link: The link function. A compiled graph ends at a link of your own, and the mask is computed eagerly; an
            exported program cannot have one, except for ONNX.
        dim: Axis of the ground set, or axes that together form one ground set.

    Returns:
        Tensor like ``x``, in ``[0, 1]``, summing to ``k`` along ``dim``.

    Raises:
        TypeError: If ``link`` is not a :class:`Link`.
        ValueError: If ``k`` or ``scale`` is out of range, ``x`` contains NaN, or fewer than ``k`` entries are
            unmasked. See :mod:`khot.relaxations`.

    References:
        [1] Struski et al. (2025), "LapSum - One Method to Differentiate Them All", section 3, for general F.

    Example:
        >>> capped_simplex_map(torch.tensor([0.0, 1.0, 2.0]), 1.5, link=Logistic())
        tensor([0.2689, 0.5000, 0.7311])
    """
    if not isinstance(link, Link):
        raise TypeError(f"`link` must be a khot.relaxations.Link, but got {described(link, Link)}")
    return ThresholdMap(link, "scale", MASK).apply(_call, x, k, scale, dim)
