"""Rank metrics, such as recall and NDCG among the k best, as differentiable losses."""

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from khot._contents import looks_at_contents
from khot._distributed.boundary import of_rows
from khot._validation import check_choice, check_floating, check_function, check_scores, checked_count
from khot.kernels.exact.rows import compute_dtype
from khot.relaxations import lapsum_topk

from .shared import REDUCTIONS, Relaxation, check_like_scores, check_softness_for, describe


def topk_metric_loss(
    x: Tensor,
    relevance: Tensor,
    k: int,
    metric: str | Tensor = "ndcg",
    softness: float | Tensor = 1.0,
    relaxation: Relaxation = lapsum_topk,
    gain: str = "linear",
    reduction: str = "mean",
) -> Tensor:
    r"""One minus a rank metric at k, in which relaxed masks take the place of "among the j largest scores".

    An item of gain g at rank r adds :math:`d_r g` to a metric with discounts :math:`d_1 \ge \dots \ge d_k \ge 0` and
    :math:`d_{k+1} = 0`, so that the metric is a weighted sum of what the best j items have gained [1]:

    .. math:: L &= 1 - \frac{1}{Z} \sum_{j=1}^k (d_j - d_{j+1}) \langle g, y^{(j)} \rangle, \\
        y^{(j)} &= \mathrm{relaxation}(x, j, \mathrm{softness})

    ============== ======================== ======================================== =======================
    ``metric``     :math:`d_j`              :math:`g`                                :math:`Z`
    ============== ======================== ======================================== =======================
    "ndcg"         :math:`1 / \log_2(1+j)`  gain of the relevance                    largest possible sum
    a tensor (k,)  its entries              gain of the relevance                    largest possible sum
    "recall"       1                        1 if relevant                            number of relevant items
    "precision"    1                        1 if relevant                            k
    "mrr"          :math:`1 / j`            1 for the relevant item of highest score 1
    ============== ======================== ======================================== =======================

    Items are relevant if their relevance is positive. L lies in [0, 1]. As the softness falls to 0 it tends to one
    minus the metric, where equal scores count as the mean over their orders, as in scikit-learn's ``ndcg_score``. The
    reciprocal rank is that of the first relevant item alone (if several share its score, of one of them), so that other
    relevant items get a gradient only as its competitors.

    Scores of ``-inf`` are padding, whose relevance is ignored. A row may have fewer than k items; its precision is
    still a share of k. Rows without a relevant item have the loss 0 and do not count in the mean; scikit-learn counts
    their metric as 0. Sizes j at which the discount does not fall need no mask (recall needs one), and the others are
    one call of the relaxation, of O(k n) memory per row. Differentiable in ``x``, ``softness`` and discounts, but not
    in the relevance.

    Args:
        x: Scores (..., n) of the items.
        relevance: Relevance (..., n) of the items: nonnegative numbers of any real dtype, or bools.
        k: Number of ranks that count, at least 1. It may exceed n.
        metric: A name in the table, or discounts (k,) of a floating-point dtype that do not increase.
        softness: Positive softness, the third argument of the relaxation.
        relaxation: A relaxed top-k mask, called as ``relaxation(x, k, softness)`` with a tensor k.
        gain: "linear" for the relevance itself, "exp2" for :math:`2^{relevance} - 1`; for "ndcg" and discounts.
        reduction: "mean" or "sum" over the batch, or "none".

    Returns:
        Tensor of the batch shape, or a scalar, of the dtype of ``x``.

    References:
        [1] Järvelin, Kekäläinen (2002), "Cumulated gain-based evaluation of IR techniques", ACM TOIS 20(4).

    Example:
        >>> x, relevance = torch.tensor([3.0, 1.0, 2.0, 0.0]), torch.tensor([0, 1, 1, 0])
        >>> topk_metric_loss(x, relevance, 2, "recall", softness=0.01)
        tensor(0.5000)
    """
    k = check_settings(k, metric, relaxation, gain, reduction)
    summed = "sum" if reduction == "mean" else reduction
    losses = _losses(x, relevance, metric, softness, (k, relaxation, gain), summed)
    if reduction == "mean":
        losses = losses / _has_relevance(x, relevance, "sum").clamp(min=1)
    return losses.to(x.dtype)


@of_rows(rows=("x", "relevance"), batch_first=True)
def _has_relevance(x: Tensor, relevance: Tensor, reduction: str) -> Tensor:
    """1 for rows with a relevant item and 0 for others."""
    highest = relevance.masked_fill(x == -torch.inf, 0).amax(-1)
    return REDUCTIONS[reduction]((highest > 0).to(compute_dtype(x)))


@of_rows(rows=("x", "relevance"), batch_first=True)
def _losses(
    x: Tensor, relevance: Tensor, metric: str | Tensor, softness: float | Tensor, settings: Any, reduction: str
) -> Tensor:
    """The losses, at least in float32, because a sum of many would overflow in half precision."""
    k, relaxation, gain = settings
    check_scores(x, -1)
    check_softness_for(x, softness)
    check_like_scores("relevance", relevance, x)
    if x.shape[-1] == 0:
        raise ValueError(f"`x` must have at least one item to rank, but got shape {tuple(x.shape)}")
    scores, is_padding = x.to(compute_dtype(x)), x.detach() == -torch.inf
    relevance = relevance.detach().to(scores.dtype).masked_fill(is_padding, 0)
    if looks_at_contents(relevance) and relevance.numel():
        lowest, highest = (bound.item() for bound in relevance.aminmax())
        if not 0 <= lowest <= highest < math.inf:
            raise ValueError(f"`relevance` must be finite and at least 0, but ranges over [{lowest}, {highest}]")
    weights, sizes = _weights_and_sizes(metric, min(k, x.shape[-1]), x)
    weights, column = weights.to(scores.dtype), (-1, *(1,) * (x.dim() - 1))
    if isinstance(metric, str) and metric != "ndcg":
        gains = _of_highest(scores.detach(), relevance) if metric == "mrr" else (relevance > 0).to(scores.dtype)
        most = {"mrr": 1, "precision": k}.get(metric, gains.sum(-1))
    else:
        gains = _relative_gains(relevance, gain)
        most = gains.topk(min(k, x.shape[-1])).values.cumsum(-1)[..., sizes - 1] @ weights
    sizes = torch.minimum(sizes.view(column), x.shape[-1] - is_padding.sum(-1))
    masks = relaxation(scores.expand(len(sizes), *scores.shape), sizes, softness)
    total = (weights.view(column) * (masks * gains).sum(-1)).sum(0)
    has_gain = gains.amax(-1) > 0  # rows without a relevant item would otherwise have 0 / 0 and a gradient of NaN
    return REDUCTIONS[reduction](torch.where(has_gain, (1 - total / torch.where(has_gain, most, 1)).clamp(min=0), 0))


def _relative_gains(relevance: Tensor, gain: str) -> Tensor:
    """The gains over a number for each row, which cancels in the metric, so that no gain or sum of gains overflows."""
    largest = relevance.amax(-1, keepdim=True)
    if gain == "linear":
        return relevance / torch.where(largest > 0, largest, 1)
    return torch.exp2(relevance - largest) * -torch.expm1(-math.log(2) * relevance)


def _of_highest(scores: Tensor, relevance: Tensor) -> Tensor:
    """1 for the relevant item of the highest score; of several, each has an equal share."""
    candidates = scores.masked_fill(relevance <= 0, -torch.inf)
    is_highest = (relevance > 0) & (candidates == candidates.amax(-1, keepdim=True))
    return is_highest / is_highest.sum(-1, keepdim=True).clamp(min=1)


def _weights_and_sizes(metric: str | Tensor, k: int, x: Tensor) -> tuple[Tensor, Tensor]:
    """The masks that a metric at k needs: their weights, by how much the discount falls after rank j, and sizes j."""
    sizes = torch.arange(1, k + 1, device=x.device)
    if isinstance(metric, Tensor):
        discounts = metric[:k].to(x.device, compute_dtype(x))
    elif metric == "ndcg":
        discounts = 1 / (sizes + 1).double().log2()
    elif metric == "mrr":
        discounts = 1 / sizes.double()
    else:
        return torch.ones_like(sizes[:1]), sizes[-1:]
    weights = discounts - pad(discounts[1:], (0, 1))
    if isinstance(metric, Tensor) and looks_at_contents(metric) and not metric.requires_grad:
        weights, sizes = weights[weights > 0], sizes[weights > 0]
    return weights, sizes


def check_settings(k: Any, metric: Any, relaxation: Any, gain: Any, reduction: Any) -> int:
    """Checks the arguments that describe the metric, and returns k as a Python int."""
    size = checked_count("k", k)
    check_function("relaxation", relaxation, "(x, k, softness)")
    check_choice("gain", gain, ("linear", "exp2"))
    check_choice("reduction", reduction, REDUCTIONS)
    if not isinstance(metric, Tensor):
        check_choice("metric", metric, ("ndcg", "recall", "precision", "mrr"))
        return size
    check_floating("metric", metric)
    if metric.shape != (size,):
        raise ValueError(f"`metric` must be discounts of shape (k,) with k={size}, but is {describe(metric)}")
    if looks_at_contents(metric):
        falls = metric.detach() - pad(metric.detach()[1:], (0, 1))
        if not (bool((falls >= 0).all()) and 0 < metric[0] < math.inf):
            raise ValueError(f"`metric` must be discounts >= 0 that do not increase, not all zero, but got {metric}")
    return size
