"""Top-k cross-entropy: the negative logarithm of the probability that the target is among the k largest."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from khot._contents import looks_at_contents
from khot._distributed.boundary import of_rows
from khot._validation import check_choice, check_function, check_scores, check_strided
from khot.kernels.exact.rows import compute_dtype
from khot.relaxations import lapsum_topk

from .shared import REDUCTIONS, Relaxation, check_softness_for, describe


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

    .. math:: L &= -\log \sum_{j=1}^K p_j\, y^{(j)}_\mathrm{target}, \\
        y^{(j)} &= \mathrm{relaxation}(x, j, \mathrm{softness})

    Position 0 of ``p_k`` is the weight of k = 1, the top-1 loss. The computation is in logarithms if the relaxation has
    one (:func:`lapsum_topk`, :func:`sigmoid_topk`), so that targets far below the threshold keep their gradient. For
    other masks, entries below the smallest normal number count as that number, without gradient, which bounds the loss
    at 87 (float32) or 708. A target with a score of ``-inf`` makes the logarithmic loss infinite, without gradient, as
    in torch's cross-entropy. All sizes are evaluated in one call; those of weight zero are skipped. Differentiable in
    ``x``, ``softness`` and ``p_k``.

    Args:
        x: Scores (..., n) of the classes.
        target: Class indices (...), int64.
        p_k: K nonnegative weights, K at most n, usually with sum 1: numbers or a tensor. K = 1 is the top-1 loss.
        relaxation: A relaxed top-k mask, called as ``relaxation(x, k, softness)`` with a tensor k.
        softness: Positive softness, the third argument of the relaxation.
        reduction: "mean" or "sum" over the batch, or "none".

    Returns:
        Tensor of the batch shape, or a scalar.

    References:
        [1] Petersen, Kuehne, Borgelt, Deussen (2022), "Differentiable Top-k Classification Learning",
            arXiv:2206.07290.

    Example:
        >>> x = torch.tensor([[2.0, 1.0, 0.0], [0.0, 1.0, 2.0]])
        >>> topk_cross_entropy(x, torch.tensor([0, 0]), [0.5, 0.5], reduction="none")
        tensor([0.2549, 1.4915])
    """
    check_function("relaxation", relaxation, "(x, k, softness)")
    check_choice("reduction", reduction, REDUCTIONS)
    check_scores(x, -1)
    check_softness_for(x, softness)
    _check_classes(target, x)
    weights, sizes = _weights_and_sizes(p_k, x)
    logs = _logs_of_target(x.to(compute_dtype(x)), target, sizes, relaxation, softness)
    weights = weights.to(logs.dtype).view(-1, *(1,) * target.dim())
    return REDUCTIONS[reduction](-_log_of_sum(weights, logs)).to(x.dtype)


def _logs_of_target(
    x: Tensor, target: Tensor, sizes: Tensor, relaxation: Relaxation, softness: float | Tensor
) -> Tensor:
    """Logarithms of the target's entry in the mask of each size, ``(sizes, *batch)``."""
    scores, k = x.expand(len(sizes), *x.shape), sizes.view(-1, *(1,) * target.dim())
    logarithm = getattr(relaxation, "logarithm", None)
    if logarithm is None:
        mask = relaxation(scores, k, softness)
        logs = mask.clamp(min=torch.finfo(mask.dtype).tiny).log()
    else:
        logs = logarithm(scores, k, softness)
    return logs.gather(-1, target.expand(len(sizes), *target.shape).unsqueeze(-1)).squeeze(-1)


def _log_of_sum(weights: Tensor, logs: Tensor) -> Tensor:
    """Logarithm of the weighted sum of exponentials over the first axis, without gradient where all of them are 0."""
    impossible = (logs.detach() == -torch.inf).all(0)
    logs = logs.masked_fill(impossible, 0.0)
    highest = logs.detach().masked_fill(weights <= 0, -torch.inf).amax(0)
    # A size whose learnable weight is 0 may be so much more likely that the ratio would overflow.
    ratio = (logs - highest).clamp(max=math.log(torch.finfo(logs.dtype).max) - 1).exp()
    return ((weights * ratio).sum(0).log() + highest).masked_fill(impossible, -torch.inf)


def _check_classes(target: Any, x: Tensor) -> None:
    check_strided("target", target)
    if not isinstance(target, Tensor) or target.dtype != torch.int64:
        raise TypeError(f"`target` must be an int64 tensor of class indices, but is {describe(target)}")
    if target.shape != x.shape[:-1]:
        raise ValueError(f"`target` must have the batch shape {tuple(x.shape[:-1])} of `x`, but is {describe(target)}")
    n = x.shape[-1]
    if looks_at_contents(target) and target.numel() and not bool(((target >= 0) & (target < n)).all()):
        raise ValueError(f"`target` must lie in [0, {n - 1}], but ranges over [{target.min()}, {target.max()}]")


def as_weights(p_k: Any, device: torch.device | None = None) -> Tensor:
    """The weights of the sizes 1, 2, ... as a tensor."""
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
    """The weights and their sizes, without those of weight zero if this can be read and no derivative is needed."""
    weights = as_weights(p_k, x.device)
    if weights.dim() != 1 or not 1 <= len(weights) <= x.shape[-1]:
        raise ValueError(f"`p_k` must have between 1 and n={x.shape[-1]} weights, but has shape {tuple(weights.shape)}")
    sizes = torch.arange(1, len(weights) + 1, device=x.device)
    if looks_at_contents(weights):
        if not bool((weights >= 0).all()) or not 0 < weights.sum() < torch.inf:
            raise ValueError(f"`p_k` must be weights >= 0, not all zero, but got {p_k}")
        if not weights.requires_grad:
            used = weights > 0
            weights, sizes = weights[used], sizes[used]
    return weights, sizes
