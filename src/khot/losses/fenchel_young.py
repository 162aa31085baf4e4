"""Fenchel-Young losses of the sparse top-k maps; :mod:`khot.losses` explains the mathematics."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn.functional import pad

from khot._contents import looks_at_contents
from khot._distributed.boundary import of_rows
from khot._validation import check_choice, check_flag, check_scores, check_softness
from khot.kernels.exact.rows import compute_dtype
from khot.kernels.operators.autograd import with_forward_mode
from khot.relaxations import sparse_topk, sparse_topk_magnitude, sparse_topk_signed

from .shared import REDUCTIONS, check_like_scores

# The error that the sum of a target may always have, as in constraints.capped_simplex. The sum of a mask has a larger
# error the farther the scores are from the threshold.
SMALLEST_SLACK = 1e-6

_SPARSE_MAPS = {"mask": sparse_topk, "magnitude": sparse_topk_magnitude, "signed": sparse_topk_signed}


class _Conjugate(Function):
    """(f(x), x, strength, y, dR(y)/d strength) -> f(x) = max_y <x, y> - Omega(y), with the derivatives of the maximum.

    By the envelope theorem these are the derivatives at fixed y: y itself in x. At second order, y and R vary with x.
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

    The r largest have z = 1, and the others, with sum s, have z = v (k - r) / s; r is such that these z are at most 1.
    A value of r that is wrong due to rounding is harmless: any feasible z is an upper bound.
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

    .. math:: L(x, t) &= \Omega^*(x) + \Omega(t) - \langle x, t\rangle \ge 0, \\
        \Omega^*(x) &= \max_y \langle x, y\rangle - \Omega(y)

    where the maximiser is :func:`sparse_topk`, :func:`sparse_topk_magnitude` or :func:`sparse_topk_signed`, whose
    regulariser :math:`\Omega` is given in :mod:`khot.losses`. It is zero where y(x) = target. It is differentiable in
    ``x``, once more often than the map, and once in ``target`` and ``strength``; ``k`` is treated as a constant.

    Args:
        x: Real scores (..., n); for ``kind="mask"``, ``-inf`` excludes an entry, whose target must be 0.
        target: Finite tensor like ``x``, in the domain of the map: for "mask" in [0, 1] with sum ``k`` (k-hot, or
            soft), for "signed" in [-1, 1] with a sum of absolute values up to ``k``, for "magnitude" without
            restriction. Sums may be off by the rounding error of the target's dtype.
        k: See the map.
        strength: Positive weight of the regulariser.
        p: Exponent of the regulariser, a Python number, ``1 < p <= 2``.
        kind: Which of the maps: "mask", "magnitude" or "signed".
        reduction: "mean" or "sum" over the batch, or "none".
        unbounded: Accept any target, and leave out :math:`\Omega(t)`, infinite outside the domain: the setting of [1],
            with a one-hot target and k = 3. The gradient is the same. The loss of a mask whose target does not sum to k
            has no lower bound: it changes by ``(k - target.sum()) c`` for ``x + c``.

    Returns:
        Tensor of the batch shape, or a scalar, of the dtype of ``x``.

    References:
        [1] Sander et al. (2023), "Fast, Differentiable and Sparse Top-k: a Convex Analysis Perspective".

    Example:
        >>> fenchel_young_topk_loss(torch.tensor([2.0, 0.5, 0.0]), torch.tensor([1.0, 0.0, 1.0]), 2)
        tensor(0.5625)
    """
    check_settings(kind, reduction, unbounded)
    check_scores(x, -1)
    check_softness("strength", strength, x, x.shape[:-1], advice="")
    check_like_scores("target", target, x)
    k = k.detach() if isinstance(k, Tensor) else k  # a constant: some of the terms below would have derivatives in it
    scores = x.to(compute_dtype(x))
    y = _SPARSE_MAPS[kind](scores, k, strength, p)
    if looks_at_contents(scores, y, target):
        _check_target(target, scores, y, k, "magnitude" if unbounded else kind, x.dtype)
    wide = torch.float64  # products and sums of float32 numbers do not overflow in it, which might give inf - inf
    strength = torch.as_tensor(strength, dtype=wide, device=x.device).expand(x.shape[:-1])
    losses = _LOSSES[kind](scores.to(wide), y.to(wide), target.to(wide), k, strength, p, unbounded)
    return REDUCTIONS[reduction](losses).to(x.dtype)


def _penalty(v: Tensor, p: float) -> Tensor:
    return v.abs().pow(p).sum(-1) / p


def _magnitude_losses(
    x: Tensor, y: Tensor, target: Tensor, k: float | Tensor, strength: Tensor, p: float, unbounded: bool
) -> Tensor:
    """Losses of magnitudes: by Euler's theorem <x, y> = strength p R(y) + 2 norm(y), without cancellation."""
    penalty = _penalty(y, p)
    value = (strength * (p - 1) * penalty + _half_squared_k_support_norm(y, k)).detach()
    losses = _conjugate(value, x, strength, y, penalty) - (x * target).sum(-1)
    if unbounded:
        return losses
    return losses + strength * _penalty(target, p) + _half_squared_k_support_norm(target, k)


def _signed_losses(
    x: Tensor, y: Tensor, target: Tensor, k: float | Tensor, strength: Tensor, p: float, unbounded: bool
) -> Tensor:
    value = ((x * y).sum(-1) - strength * _penalty(y, p)).detach()
    losses = _conjugate(value, x, strength, y, _penalty(y, p)) - (x * target).sum(-1)
    return losses if unbounded else losses + strength * _penalty(target, p)


def _mask_losses(
    x: Tensor, y: Tensor, target: Tensor, k: float | Tensor, strength: Tensor, p: float, unbounded: bool
) -> Tensor:
    """y sums to exactly k, so subtracting a constant from x changes nothing and saves digits."""
    infinite = x.isinf()
    centre = x.detach().masked_fill(infinite, 0).mean(-1, keepdim=True)
    losses = _signed_losses((x - centre).masked_fill(infinite, 0), y, target, k, strength, p, unbounded)
    return losses + centre.squeeze(-1) * (k - target.sum(-1)) if unbounded else losses


_LOSSES = {"mask": _mask_losses, "signed": _signed_losses, "magnitude": _magnitude_losses}


def _check_target(target: Tensor, x: Tensor, y: Tensor, k: float | Tensor, domain: str, dtype: torch.dtype) -> None:
    """Checks for finite entries in the domain of the map that agree with the mask y where scores are infinite.

    Sums may be off by the rounding of the target's dtype, and by that of ``dtype``, in which x was given.
    """
    rounding, target = max(_rounding(dtype), _rounding(target.dtype)), target.to(x.dtype)
    if not bool(target.isfinite().all()):
        raise ValueError(f"`target` must be finite, but contains {target[~target.isfinite()][0]}")
    if bool((x.isinf() & (target != y)).any()):
        raise ValueError("`target` must be 0 where `x` is -inf and 1 where it is +inf")
    if domain != "magnitude":
        _check_sums_of_target(target, k, domain, rounding)


def check_settings(kind: Any, reduction: Any, unbounded: Any) -> None:
    """Checks the arguments that are not tensors."""
    check_choice("kind", kind, _SPARSE_MAPS)
    check_choice("reduction", reduction, REDUCTIONS)
    check_flag("unbounded", unbounded)


def _rounding(dtype: torch.dtype) -> float:
    """The relative error that a sum of entries in this dtype may have; half types are computed in another dtype."""
    if not dtype.is_floating_point:
        return 0.0
    eps = torch.finfo(dtype).eps
    return eps if dtype.itemsize == 2 else 64 * eps


def _check_sums_of_target(target: Tensor, k: float | Tensor, kind: str, rounding: float) -> None:
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
