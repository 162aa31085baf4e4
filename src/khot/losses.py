r"""Loss functions of relaxed top-k maps.

Fenchel-Young losses [1]. Each sparse map is :math:`y(x) = \arg\max_y \langle x, y\rangle - \Omega(y)`, and

.. math:: L(x, t) = \Omega^*(x) + \Omega(t) - \langle x, t\rangle \ge 0, \qquad \nabla_x L = y(x) - t,

is zero where :math:`y(x) = t` and convex in x. With R(y) = (strength / p) sum abs(y)^p, the regulariser is

* ``mask``: R(y) on 0 <= y <= 1, sum y = k;
* ``signed``: R(y) on abs(y) <= 1, sum abs(y) <= k;
* ``magnitude``: R(y) + half the squared k-support norm of y, for any y.

Top-k cross-entropy [2] is the negative logarithm of the probability that the target is among the k largest, k drawn
from a distribution over the sizes.

References:
    [1] Blondel, Martins, Niculae (2020), "Learning with Fenchel-Young Losses", JMLR 21; for these maps Sander et al.
        (2023), "Fast, Differentiable and Sparse Top-k: a Convex Analysis Perspective".
    [2] Petersen, Kuehne, Borgelt, Deussen (2022), "Differentiable Top-k Classification Learning", arXiv:2206.07290.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn.functional import pad

from khot._distributed.boundary import of_rows
from khot._module import Module
from khot._validation import (
    check_choice,
    check_flag,
    check_function,
    check_positive_contents,
    check_scores,
    check_softness,
    check_strided,
    looks_at_contents,
)
from khot.kernels.exact.rows import compute_dtype
from khot.kernels.operators.autograd import with_forward_mode
from khot.relaxations import (
    lapsum_topk,
    sparse_topk,
    sparse_topk_magnitude,
    sparse_topk_signed,
)
from khot.relaxations.sparse import check_exponent

__all__ = ["FenchelYoungTopKLoss", "TopKCrossEntropy", "fenchel_young_topk_loss", "topk_cross_entropy"]


def __dir__() -> list[str]:
    return __all__


Relaxation = Callable[[Tensor, Any, Any], Tensor]

# How far the sum of a target may always be off, as in constraints.capped_simplex: that of a mask is, the further the
# scores are from the threshold.
SMALLEST_SLACK = 1e-6

_REDUCTIONS: dict[str, Callable[[Tensor], Tensor]] = {"none": lambda v: v, "mean": torch.mean, "sum": torch.sum}
_SPARSE_MAPS = {"mask": sparse_topk, "magnitude": sparse_topk_magnitude, "signed": sparse_topk_signed}


class _Conjugate(Function):
    """(f(x), x, strength, y, dR(y)/d strength) -> f(x) = max_y <x, y> - Omega(y), with the derivatives of the maximum.

    By the envelope theorem they are those at fixed y: y itself in x. Differentiated once more, y and R move with x.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(value: Tensor, x: Tensor, strength: Tensor, y: Tensor, penalty: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[3:])
        ctx.save_for_forward(*inputs[3:])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        y, penalty = ctx.saved_tensors
        return None, grad.unsqueeze(-1) * y, -grad * penalty, None, None


def _conjugate_jvp(
    ctx: Any, saved: list[Tensor], _: Tensor | None, dx: Tensor | None, dstrength: Tensor | None, *unused: Any
) -> Tensor:
    y, penalty = saved
    change = torch.zeros_like(penalty) if dx is None else (dx * y).sum(-1)
    return change if dstrength is None else change - dstrength * penalty


_conjugate = with_forward_mode(_Conjugate, _conjugate_jvp)


def _half_squared_k_support_norm(v: Tensor, k: float | Tensor) -> Tensor:
    """min over 0 <= z <= 1, sum z = k of sum v^2 / (2 z), along the last axis; Argyriou, Foygel, Srebro (2012).

    The r largest have z = 1 and the others, with sum s, z = v (k - r) / s, for the r where these z are at most 1. A
    wrong r in rounding is harmless: any feasible z is an upper bound.
    """
    descending = v.abs().sort(-1, descending=True).values
    largest_left = pad(descending, (0, 1))
    left = largest_left.flip(-1).cumsum(-1).flip(-1)  # entry r: the sum of all but the r largest
    taken = pad(descending.square().cumsum(-1), (1, 0))
    ranks = torch.arange(v.shape[-1] + 1, dtype=v.dtype, device=v.device)
    room = (k.unsqueeze(-1) if isinstance(k, Tensor) else k) - ranks
    spread = left.square() / torch.where(room > 0, room, 1)
    feasible = (room >= 0) & (left >= room * largest_left) & ((room > 0) | (left == 0))
    return torch.where(feasible, taken + spread, torch.inf).amin(-1) / 2


@of_rows(rows=("x", "target"), batch_first=True)
def fenchel_young_topk_loss(
    x: Tensor,
    target: Tensor,
    k: float | Tensor,
    strength: float | Tensor = 1.0,
    p: float = 2.0,
    kind: str = "mask",
    reduction: str = "mean",
    unbounded: bool = False,
) -> Tensor:
    r"""Fenchel-Young loss of a sparse top-k map y: convex in x, with gradient ``y(x) - target``.

    .. math:: L(x, t) = \Omega^*(x) + \Omega(t) - \langle x, t\rangle \ge 0, \qquad
        \Omega^*(x) = \max_y \langle x, y\rangle - \Omega(y)

    with the maximiser :func:`sparse_topk`, :func:`sparse_topk_magnitude` or :func:`sparse_topk_signed`, whose
    regulariser :math:`\Omega` is given above (``khot.losses``). Zero where y(x) = target. Differentiable in ``x``, as
    often as the map is once more, and once in ``target`` and ``strength``; ``k`` is taken as a constant.

    Args:
        x: Real scores (..., n); for ``kind="mask"``, ``-inf`` excludes an entry, whose target is then 0.
        target: Tensor like ``x``, finite, in the domain of the map: for "mask" in [0, 1] with sum ``k`` (k-hot, or
            soft), for "signed" in [-1, 1] with a sum of absolute values up to ``k``, for "magnitude" anything. Sums may
            be off by the rounding of the target's dtype.
        k: As of the map.
        strength: Positive weight of the regulariser.
        p: Exponent of the regulariser, a Python number, ``1 < p <= 2``.
        kind: Which of the maps: "mask", "magnitude" or "signed".
        reduction: "mean" or "sum" over the batch, or "none".
        unbounded: Take any target, and leave out :math:`\Omega(t)`, which for a target outside the domain is infinite.
            It is the setting of [1], with a one-hot target and k = 3. The gradient is the same, but for a mask whose
            target does not sum to k the loss has no lower bound: it changes by ``(k - target.sum()) c`` for ``x + c``.

    Returns:
        Tensor of the batch shape, or a scalar, of the dtype of ``x``.

    Raises:
        ValueError: If the target is not like ``x`` or outside the domain, or an argument is out of range. Contents of
            tensors are looked at as :mod:`khot.relaxations` says.
        TypeError: If an argument has the wrong type or dtype.

    References:
        [1] Sander et al. (2023), "Fast, Differentiable and Sparse Top-k: a Convex Analysis Perspective".

    Example:
        >>> x = torch.tensor([2.0, 0.5, 0.0], requires_grad=True)
        >>> loss = fenchel_young_topk_loss(x, torch.tensor([1.0, 0.0, 1.0]), 2)
        >>> loss
        tensor(0.5625, grad_fn=...)
        >>> torch.autograd.grad(loss, x)[0]
        tensor([ 0.0000,  0.7500, -0.7500])
    """
    _check_settings(kind, reduction, unbounded)
    check_scores(x, -1)
    check_softness("strength", strength, x, x.shape[:-1], advice="")
    _check_shape_of_target(target, x)
    rounding = max(_rounding(x.dtype), _rounding(target.dtype))
    dtype, x = x.dtype, x.to(compute_dtype(x))
    y, target, infinite = _SPARSE_MAPS[kind](x, k, strength, p), target.to(x.dtype), x.isinf()
    if looks_at_contents(x, y, target):
        _check_entries_of_target(target, y, infinite)
        if not unbounded and kind != "magnitude":
            _check_target(target, k, kind, rounding)
    strength = torch.as_tensor(strength, dtype=x.dtype, device=x.device).expand(x.shape[:-1])

    if kind == "mask":  # sums of y are exactly k: what x is measured from cancels, and its digits with it
        centre = x.detach().masked_fill(infinite, 0).mean(-1, keepdim=True)
        x = x - centre
        offset = centre.squeeze(-1) * (k - target.sum(-1))
    x = x.masked_fill(infinite, 0)

    def penalty(v: Tensor) -> Tensor:
        return v.abs().pow(p).sum(-1) / p

    def norm(v: Tensor) -> Tensor | float:
        return _half_squared_k_support_norm(v, k) if kind == "magnitude" else 0.0

    if kind == "magnitude":  # by Euler's theorem <x, y> = strength p R(y) + 2 norm(y), of which no part cancels
        exact = y.detach().double()
        value = (strength.detach() * (p - 1) * penalty(exact) + norm(exact)).to(x.dtype)
    else:
        value = ((x * y).sum(-1) - strength * penalty(y)).detach()
    losses = _conjugate(value, x, strength, y, penalty(y)) - (x * target).sum(-1)
    if not unbounded:
        losses = losses + strength * penalty(target) + norm(target)
    elif kind == "mask":
        losses = losses + offset
    return _REDUCTIONS[reduction](losses).to(dtype)


def _describe(value: object) -> str:
    if isinstance(value, Tensor):
        return f"one of shape {tuple(value.shape)}, {value.dtype}"
    return f"a {type(value).__name__}"


def _check_shape_of_target(target: Any, x: Tensor) -> None:
    check_strided("target", target)
    if not isinstance(target, Tensor) or target.shape != x.shape:
        raise ValueError(f"`target` must be a tensor of the shape {tuple(x.shape)} of `x`, but is {_describe(target)}")
    if target.is_complex():
        raise TypeError(f"`target` must be real, but is {_describe(target)}")


def _check_entries_of_target(target: Tensor, y: Tensor, infinite: Tensor) -> None:
    """Finite entries, and where scores are infinite those of the mask y."""
    if not bool(target.isfinite().all()):
        raise ValueError(f"`target` must be finite, but contains {target[~target.isfinite()][0]}")
    if bool((infinite & (target != y)).any()):
        raise ValueError("`target` must be 0 where `x` is -inf and 1 where it is +inf")


def _check_settings(kind: Any, reduction: Any, unbounded: Any) -> None:
    if not isinstance(kind, str) or kind not in _SPARSE_MAPS:
        raise ValueError(f"`kind` must be one of {', '.join(map(repr, _SPARSE_MAPS))}, but got {kind!r}")
    check_choice("reduction", reduction, _REDUCTIONS)
    check_flag("unbounded", unbounded)


def _rounding(dtype: torch.dtype) -> float:
    """By how much of its size a sum may be off for entries in this dtype; half types are computed in another."""
    if not dtype.is_floating_point:
        return 0.0
    eps = torch.finfo(dtype).eps
    return eps if dtype.itemsize == 2 else 64 * eps


def _check_target(target: Tensor, k: float | Tensor, kind: str, rounding: float) -> None:
    lowest = 0 if kind == "mask" else -1
    excess = target.abs().double().sum(-1) - k
    size = (
        k.double().abs() if isinstance(k, Tensor) else torch.full((), abs(k), dtype=torch.float64, device=target.device)
    )
    slack = (rounding * (1 + size)).clamp(min=SMALLEST_SLACK)
    if bool(((target < lowest) | (target > 1)).any()):
        raise ValueError(
            f"`target` must lie in [{lowest}, 1] for kind={kind!r}, but ranges over [{target.min()}, {target.max()}]"
        )
    if bool((excess > slack).any()) or (kind == "mask" and bool((excess < -slack).any())):
        rule = "sum to k" if kind == "mask" else "have absolute values that sum to at most k"
        raise ValueError(
            f"`target` must {rule} for kind={kind!r}, but its sums differ from k={k} by up to "
            f"{excess.abs().max().item():.3g}; pass `unbounded=True` to leave out the infinite constant"
        )


@of_rows(numbers=("target",), batch_first=True)
def topk_cross_entropy(
    x: Tensor,
    target: Tensor,
    p_k: Sequence[float] | Tensor,
    relaxation: Relaxation = lapsum_topk,
    softness: float | Tensor = 1.0,
    reduction: str = "mean",
) -> Tensor:
    r"""Cross-entropy of "the target is among the k largest scores", with k drawn from ``p_k``.

    .. math:: L = -\log \sum_{j=1}^K p_j\, y^{(j)}_\mathrm{target}, \qquad y^{(j)} = \mathrm{relaxation}(x, j,
        \mathrm{softness})

    Position 0 of ``p_k`` is the weight of k = 1, of the top-1 loss. Computed in logarithms where the relaxation has
    one (:func:`lapsum_topk`, :func:`sigmoid_topk`), so that targets far below the threshold keep their gradient; of
    another mask, entries below the smallest normal number count as that number, with no gradient, which bounds the
    loss at 87 (float32) or 708. Of a target whose score is ``-inf`` the logarithms make the loss infinite, as torch's
    cross-entropy is, with no gradient. All sizes are evaluated in one call, those of weight zero in none.
    Differentiable in ``x``, ``softness`` and ``p_k``.

    Args:
        x: Scores (..., n) of the classes.
        target: Class indices (...), int64.
        p_k: K weights, not negative, at most n, usually of sum 1: numbers or a tensor. K = 1 asks for the best only.
        relaxation: A relaxed top-k mask, called as ``relaxation(x, k, softness)`` with a tensor k.
        softness: Positive.
        reduction: "mean" or "sum" over the batch, or "none".

    Returns:
        Tensor of the batch shape, or a scalar.

    Raises:
        ValueError: If shapes do not match, a class is out of range or ``p_k`` has no positive or a negative weight.
            Contents of tensors are looked at as :mod:`khot.relaxations` says.
        TypeError: If ``target`` does not hold int64 indices.

    References:
        [1] Petersen, Kuehne, Borgelt, Deussen (2022), "Differentiable Top-k Classification Learning",
            arXiv:2206.07290.

    Example:
        >>> x = torch.tensor([[2.0, 1.0, 0.0], [0.0, 1.0, 2.0]])
        >>> topk_cross_entropy(x, torch.tensor([0, 0]), [0.5, 0.5], reduction="none")
        tensor([0.2549, 1.4915])
    """
    check_function("relaxation", relaxation, "(x, k, softness)")
    check_choice("reduction", reduction, _REDUCTIONS)
    check_scores(x, -1)
    check_softness("softness", softness, x, x.shape[:-1], advice="")  # which the relaxation knows by another name
    check_positive_contents("softness", softness)
    _check_classes(target, x)
    weights, sizes = _weights_and_sizes(p_k, x)

    dtype, scores = x.dtype, x.to(compute_dtype(x)).expand(len(sizes), *x.shape)
    column = (-1, *(1,) * target.dim())
    logarithm = getattr(relaxation, "logarithm", None)
    if logarithm is None:
        mask = relaxation(scores, sizes.view(column), softness)
        logs = mask.clamp(min=torch.finfo(mask.dtype).tiny).log()
    else:
        logs = logarithm(scores, sizes.view(column), softness)
    logs = logs.gather(-1, target.expand(len(sizes), *target.shape).unsqueeze(-1)).squeeze(-1)
    weights = weights.to(logs.dtype).view(column)
    impossible = (logs.detach() == -torch.inf).all(0)
    logs = logs.masked_fill(impossible, 0.0)
    highest = logs.detach().masked_fill(weights <= 0, -torch.inf).amax(0)
    # A weight of 0 that may be learnt can belong to a size that is likelier by more than a float holds.
    ratio = (logs - highest).clamp(max=math.log(torch.finfo(logs.dtype).max) - 1).exp()
    losses = (-(weights * ratio).sum(0).log() - highest).masked_fill(impossible, torch.inf)
    return _REDUCTIONS[reduction](losses).to(dtype)


def _check_classes(target: Any, x: Tensor) -> None:
    check_strided("target", target)
    if not isinstance(target, Tensor) or target.dtype != torch.int64:
        raise TypeError(f"`target` must be an int64 tensor of class indices, but is {_describe(target)}")
    if target.shape != x.shape[:-1]:
        raise ValueError(f"`target` must have the batch shape {tuple(x.shape[:-1])} of `x`, but is {_describe(target)}")
    n = x.shape[-1]
    if looks_at_contents(target) and target.numel() and not bool(((target >= 0) & (target < n)).all()):
        raise ValueError(f"`target` must lie in [0, {n - 1}], but ranges over [{target.min()}, {target.max()}]")


def _as_weights(p_k: Any, device: torch.device | None = None) -> Tensor:
    if isinstance(p_k, Tensor):
        check_strided("p_k", p_k)
        if p_k.is_complex() or p_k.dtype == torch.bool:
            raise TypeError(f"`p_k` must be real, but got a tensor of dtype {p_k.dtype}")
        return p_k if device is None else p_k.to(device)
    try:
        return torch.tensor(p_k, dtype=torch.float64, device=device or "cpu")
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(f"`p_k` must be a sequence of numbers or a tensor, but got {p_k!r}") from None


def _weights_and_sizes(p_k: Sequence[float] | Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """The weights and their subset sizes, without those of weight zero where that can be seen and has no derivative."""
    weights = _as_weights(p_k, x.device)
    if weights.dim() != 1 or not 1 <= len(weights) <= x.shape[-1]:
        raise ValueError(f"`p_k` must hold between 1 and n={x.shape[-1]} weights, but has shape {tuple(weights.shape)}")
    sizes = torch.arange(1, len(weights) + 1, device=x.device)
    if looks_at_contents(weights):
        if not bool((weights >= 0).all()) or not 0 < weights.sum() < torch.inf:
            raise ValueError(f"`p_k` must be weights >= 0, not all zero, but got {p_k}")
        if not weights.requires_grad:
            used = weights > 0
            weights, sizes = weights[used], sizes[used]
    return weights, sizes


class FenchelYoungTopKLoss(Module):
    """:func:`fenchel_young_topk_loss` as a module, called with ``(x, target)``; a ``Parameter`` as strength is learnt.

    Its arguments are the others of the function.

    Raises:
        TypeError: If an argument has the wrong type; of ``k`` and ``strength`` when it is called.
        ValueError: If one is out of range; the same.

    Example:
        >>> FenchelYoungTopKLoss(2)(torch.tensor([2.0, 0.5, 0.0]), torch.tensor([1.0, 0.0, 1.0]))
        tensor(0.5625)
    """

    numbers = ("k", "strength")

    def __init__(
        self,
        k: float | Tensor,
        strength: float | Tensor = 1.0,
        p: float = 2.0,
        kind: str = "mask",
        reduction: str = "mean",
        unbounded: bool = False,
    ) -> None:
        super().__init__()
        _check_settings(kind, reduction, unbounded)
        check_exponent(p)
        self.k, self.strength, self.p = k, strength, p
        self.kind, self.reduction, self.unbounded = kind, reduction, unbounded

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return fenchel_young_topk_loss(
            x,
            target,
            self.number("k"),
            self.number("strength"),
            self.p,
            self.kind,
            self.reduction,
            self.unbounded,
        )

    def extra_repr(self) -> str:
        shown = f"k={self.k}, strength={self.strength}, p={self.p}, kind={self.kind!r}, reduction={self.reduction!r}"
        return f"{shown}, unbounded=True" if self.unbounded else shown


class TopKCrossEntropy(Module):
    """:func:`topk_cross_entropy` as a module, called with ``(x, target)``; a ``Parameter`` as softness is learnt.

    Its arguments are the others of the function.

    Raises:
        TypeError: If an argument has the wrong type; of ``softness`` when it is called.
        ValueError: If ``reduction`` is none of the three; of ``p_k`` and ``softness`` when it is called.

    Example:
        >>> TopKCrossEntropy([1.0])(torch.zeros(2, 4), torch.tensor([0, 3])).exp()
        tensor(4.)
    """

    numbers = ("softness",)

    def __init__(
        self,
        p_k: Sequence[float] | Tensor,
        relaxation: Relaxation = lapsum_topk,
        softness: float | Tensor = 1.0,
        reduction: str = "mean",
    ) -> None:
        super().__init__()
        _as_weights(p_k)  # whose errors are due now
        check_function("relaxation", relaxation, "(x, k, softness)")
        check_choice("reduction", reduction, _REDUCTIONS)
        self.p_k, self.relaxation, self.softness, self.reduction = p_k, relaxation, softness, reduction

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return topk_cross_entropy(x, target, self.p_k, self.relaxation, self.number("softness"), self.reduction)

    def extra_repr(self) -> str:
        name = getattr(self.relaxation, "__name__", repr(self.relaxation))
        return f"p_k={self.p_k}, relaxation={name}, softness={self.softness}, reduction={self.reduction!r}"
