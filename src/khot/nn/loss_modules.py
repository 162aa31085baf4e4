"""The losses of khot.losses as modules.

Their numbers, except for the k of a metric, may be assigned at any time; tensors are checked when a loss is called.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.nn import Parameter

from khot._module import Module
from khot._validation import check_choice, check_function
from khot.losses import fenchel_young_topk_loss, topk_cross_entropy, topk_metric_loss
from khot.losses.cross_entropy import as_weights
from khot.losses.fenchel_young import check_settings
from khot.losses.rank_metric import check_settings as check_metric
from khot.losses.shared import REDUCTIONS, Relaxation
from khot.relaxations import lapsum_topk
from khot.relaxations.sparse import check_exponent


class FenchelYoungTopKLoss(Module):
    """:func:`fenchel_young_topk_loss` as a module, called with ``(x, target)``; a ``Parameter`` as strength is learned.

    The constructor takes the other arguments of the function.

    Attributes:
        k: Number of labels, a number or a tensor. It may be assigned at any time.
        strength: Strength of the regulariser, a number, a tensor or a parameter.

    Example:
        >>> FenchelYoungTopKLoss(2)(torch.tensor([2.0, 0.5, 0.0]), torch.tensor([1.0, 0.0, 1.0]))
        tensor(0.5625)
    """

    _numbers = ("k", "strength")

    def __init__(
        self,
        k: float | Tensor,
        *,
        strength: float | Tensor = 1.0,
        p: float = 2.0,
        kind: str = "mask",
        reduction: str = "mean",
        unbounded: bool = False,
    ) -> None:
        super().__init__()
        check_settings(kind, reduction, unbounded)
        check_exponent(p)
        self.k, self.strength, self.p = k, strength, p
        self._start = _values_of_parameters(k=k, strength=strength)
        self.kind, self.reduction, self.unbounded = kind, reduction, unbounded

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return fenchel_young_topk_loss(
            x, target, self._number("k"), self._number("strength"), self.p, self.kind, self.reduction, self.unbounded
        )

    def extra_repr(self) -> str:
        shown = f"k={self.k}, strength={self.strength}, p={self.p}, kind={self.kind!r}, reduction={self.reduction!r}"
        return f"{shown}, unbounded=True" if self.unbounded else shown


class TopKCrossEntropyLoss(Module):
    """:func:`topk_cross_entropy` as a module, called with ``(x, target)``; a ``Parameter`` as softness is learned.

    The constructor takes the other arguments of the function.

    Example:
        >>> TopKCrossEntropyLoss([1.0])(torch.zeros(2, 4), torch.tensor([0, 3])).exp()
        tensor(4.)
    """

    _numbers = ("softness",)

    def __init__(
        self,
        p_k: Sequence[float] | Tensor,
        *,
        relaxation: Relaxation = lapsum_topk,
        softness: float | Tensor = 1.0,
        reduction: str = "mean",
    ) -> None:
        super().__init__()
        as_weights(p_k)  # validates the argument early
        check_function("relaxation", relaxation, "(x, k, softness)")
        check_choice("reduction", reduction, REDUCTIONS)
        self.p_k, self.relaxation, self.softness, self.reduction = p_k, relaxation, softness, reduction
        self._start = _values_of_parameters(p_k=p_k, softness=softness)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return topk_cross_entropy(x, target, self.p_k, self.relaxation, self._number("softness"), self.reduction)

    def extra_repr(self) -> str:
        shown = f"p_k={self.p_k}, relaxation={_name(self.relaxation)}, softness={self.softness}"
        return f"{shown}, reduction={self.reduction!r}"


class TopKMetricLoss(Module):
    """:func:`topk_metric_loss` as a module, called with ``(x, relevance)``; a ``Parameter`` as softness is learned.

    The constructor takes the other arguments of the function.

    Attributes:
        k: Number of positions that the metric looks at, an int.
        softness: Softness of the masks, a number, a tensor or a parameter. It may be assigned at any time.

    Example:
        >>> TopKMetricLoss(2, metric="recall", softness=0.01)(torch.tensor([3.0, 1.0, 2.0]), torch.tensor([0, 1, 1]))
        tensor(0.5000)
    """

    _numbers = ("softness",)

    def __init__(
        self,
        k: int,
        *,
        metric: str | Tensor = "ndcg",
        softness: float | Tensor = 1.0,
        relaxation: Relaxation = lapsum_topk,
        gain: str = "linear",
        reduction: str = "mean",
    ) -> None:
        super().__init__()
        self.k = check_metric(k, metric, relaxation, gain, reduction)
        self.metric, self.softness, self.relaxation = metric, softness, relaxation
        self.gain, self.reduction = gain, reduction
        self._start = _values_of_parameters(metric=metric, softness=softness)

    def forward(self, x: Tensor, relevance: Tensor) -> Tensor:
        of_module = self.relaxation, self.gain, self.reduction
        return topk_metric_loss(x, relevance, self.k, self.metric, self._number("softness"), *of_module)

    def extra_repr(self) -> str:
        shown = f"k={self.k}, metric={self.metric!r}, softness={self.softness}, relaxation={_name(self.relaxation)}"
        return f"{shown}, gain={self.gain!r}, reduction={self.reduction!r}"


def _name(relaxation: Relaxation) -> str:
    return getattr(relaxation, "__name__", repr(relaxation))


def _values_of_parameters(**settings: Any) -> dict[str, float | Tensor]:
    return {name: value.detach().clone() for name, value in settings.items() if isinstance(value, Parameter)}
