"""A nearest-neighbour loss for learned features."""

import torch
from torch import Tensor

from khot._contents import is_finite, looks_at_contents
from khot._host import has_float64
from khot._validation import (
    check_choice,
    check_floating,
    check_function,
    check_positive_contents,
    check_strided,
    checked_positive,
)
from khot.kernels.exact.rows import compute_dtype
from khot.relaxations import transport_topk

from .shared import REDUCTIONS, Relaxation, check_softness_for, describe


def knn_loss(
    query: Tensor,
    keys: Tensor,
    query_labels: Tensor,
    key_labels: Tensor,
    k: float | Tensor,
    softness: float | Tensor,
    relaxation: Relaxation = transport_topk,
    reduction: str = "mean",
) -> Tensor:
    r"""The negative logarithm of the share of a query's k relaxed nearest neighbours that have its label.

    .. math:: L_q &= -\log \frac{1}{k} \sum_{j : \ell_j = \ell_q} A_{qj}, \\
        A_q &= \mathrm{relaxation}(-\lVert f_q - f_j \rVert^2, k, \mathrm{softness})

    The loss trains the network that computes the features. Queries whose label no key has are left out: their loss is
    0, and they do not count in the mean. Computed in logarithms if the relaxation has one, so that neighbours far
    beyond the threshold keep their gradient; for other masks, shares below the smallest normal number count as that
    number, without gradient. Differentiable in the features, ``k`` and ``softness``.

    Args:
        query: Features (..., queries, d).
        keys: Features (..., keys, d).
        query_labels: Labels (..., queries) of an integer type.
        key_labels: Labels (..., keys).
        k: Number of neighbours, positive; broadcasts with (..., queries).
        softness: Third argument of the relaxation, on the scale of squared distances.
        relaxation: A relaxed top-k mask, called as ``relaxation(x, k, softness)``.
        reduction: "mean" or "sum" over the queries, or "none".

    Returns:
        Tensor (..., queries), or a scalar, of the dtype of ``query``.

    Raises:
        ValueError: If squared distances overflow.

    References:
        [1] Xie et al. (2020), "Differentiable Top-k with Optimal Transport", NeurIPS, section 4.1.

    Example:
        >>> keys, key_labels = torch.tensor([[0.0], [1.0], [4.0]]), torch.tensor([0, 0, 1])
        >>> knn_loss(torch.tensor([[0.5], [3.0]]), keys, torch.tensor([0, 1]), key_labels, 2, 0.5, reduction="none")
        tensor([0.0000, 0.6931])
    """
    check_function("relaxation", relaxation, "(x, k, softness)")
    check_choice("reduction", reduction, REDUCTIONS)
    _check_features(query, keys)
    _check_labels("query_labels", query_labels, query)
    _check_labels("key_labels", key_labels, keys)
    dtype = torch.promote_types(compute_dtype(query), compute_dtype(keys))
    scores = -_squared_distances(query.to(dtype), keys.to(dtype))
    check_strided("softness", softness)
    check_softness_for(scores, softness)
    checked_positive("k", k, scores.shape[:-1])
    check_positive_contents("k", k)
    same = query_labels.unsqueeze(-1) == key_labels.unsqueeze(-2)  # (..., queries, keys)
    has_neighbour, logs = same.any(-1), _logs_of_sums(scores, same, k, softness, relaxation)
    size = torch.as_tensor(k, dtype=logs.dtype, device=logs.device)
    losses = torch.where(has_neighbour, size.log() - logs, 0.0)
    is_mean, count = reduction == "mean", has_neighbour.sum().clamp(min=1)
    return (losses.sum() / count if is_mean else REDUCTIONS[reduction](losses)).to(query.dtype)


def _logs_of_sums(
    scores: Tensor, same: Tensor, k: float | Tensor, softness: float | Tensor, relaxation: Relaxation
) -> Tensor:
    """Logarithms of the sums of the mask over the keys of the same label, (..., queries)."""
    logarithm = getattr(relaxation, "logarithm", None)
    if logarithm is None:
        total = (relaxation(scores, k, softness) * same).sum(-1)
        return total.clamp(min=torch.finfo(total.dtype).tiny).log()
    open_rows = same | ~same.any(-1, keepdim=True)  # a row without any entry would have a gradient of NaN
    logs: Tensor = logarithm(scores, k, softness)
    return logs.masked_fill(~open_rows, -torch.inf).logsumexp(-1)


def _squared_distances(query: Tensor, keys: Tensor) -> Tensor:
    """(..., queries, keys), in the dtype of the features.

    Between features that are close to each other and far from the mean, squares minus twice a product lose more digits
    than float32 has. So they are computed in float64, or from differences, which take d times the memory.
    """
    if has_float64(query):
        wide_query, wide_keys = query.double(), keys.double()
        centre = wide_keys.detach().mean(-2, keepdim=True)  # an offset that all features share then costs no digits
        wide_query, wide_keys = wide_query - centre, wide_keys - centre
        squares = wide_query.square().sum(-1, keepdim=True) + wide_keys.square().sum(-1).unsqueeze(-2)
        distances = (squares - 2 * wide_query @ wide_keys.mT).clamp(min=0).to(query.dtype)
    else:
        distances = (query.unsqueeze(-2) - keys.unsqueeze(-3)).square().sum(-1)
    if looks_at_contents(distances) and not is_finite(distances) and not distances.isfinite().all():
        raise ValueError(
            f"`query` and `keys` must have squared distances within the range of {distances.dtype}, but they overflow"
        )
    return distances


def _check_features(query: Tensor, keys: Tensor) -> None:
    for name, value in (("query", query), ("keys", keys)):
        check_floating(name, value)
        if value.dim() < 2:
            raise ValueError(f"`{name}` must have shape (..., items, features), but is {describe(value)}")
        if looks_at_contents(value) and not is_finite(value) and not value.isfinite().all():
            raise ValueError(f"`{name}` must be finite, but contains {value[~value.isfinite()][0].item()}")
    if query.shape[:-2] != keys.shape[:-2] or query.shape[-1] != keys.shape[-1]:
        raise ValueError(
            f"`keys` must have the batch shape and the number of features of `query`, {tuple(query.shape)}, but is "
            f"{describe(keys)}"
        )


def _check_labels(name: str, labels: object, features: Tensor) -> None:
    check_strided(name, labels)
    if not isinstance(labels, Tensor) or labels.is_floating_point() or labels.is_complex():
        raise TypeError(f"`{name}` must be an integer tensor of labels, but is {describe(labels)}")
    if labels.shape != features.shape[:-1]:
        raise ValueError(f"`{name}` must have the shape {tuple(features.shape[:-1])}, but is {describe(labels)}")
