r"""Attention in which every query attends to its k most similar keys.

Let A be a top-k mask of each row of scores :math:`S = Q K^\top / \sqrt{d}`. The result is softmax(S + log A) V.
Equivalently, the mask multiplies the terms of the softmax, which also works for zeros:

.. math:: \text{weights}_{ij} = A_{ij} e^{S_{ij}} / {\textstyle\sum_l} A_{il} e^{S_{il}}.
"""

import math
from numbers import Integral
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import dropout

from khot._contents import looks_at_contents
from khot._validation import (
    check_flag,
    check_floating,
    check_function,
    check_softness,
    check_strided,
    checked_int,
    checked_positive,
    checked_real,
    checked_share,
    expanded,
    in_wide_dtype,
)
from khot.kernels.exact.rows import compute_dtype
from khot.relaxations import sigmoid_topk, topk_mask

from ._masking import Relaxation, at_most


def topk_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    k: float | Tensor,
    *,
    softness: float | Tensor | None = None,
    relaxation: Relaxation = sigmoid_topk,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    dropout_p: float = 0.0,
    scale: float | None = None,
) -> Tensor:
    r"""Attention of every query to its k most similar keys: hard, or relaxed by adding log A to the logits [1].

    .. math:: & \mathrm{softmax}\!\left(S + \log A\right) V, \quad S = \text{scale} \cdot Q K^\top, \\
        & A = \mathrm{relaxation}(S, k, \text{softness})

    Arguments and result are those of :func:`torch.nn.functional.scaled_dot_product_attention`; with a hard mask and k =
    S the two are equal. Without a softness A is the hard mask: keys beyond the k-th get neither weight nor gradient,
    and ties go to earlier keys. Queries that may attend to fewer than k keys attend to all of these, and get 0 if there
    are none. Differentiable if the relaxation is.

    Args:
        query: ``(..., L, d)``.
        key: ``(..., S, d)``.
        value: ``(..., S, e)``.
        k: Number of keys per query, an integer for a hard mask. A tensor broadcasts with ``(..., L)``.
        softness: Third argument of the relaxation, on the scale of the logits; None for the hard mask.
        relaxation: Relaxed mask, called as ``relaxation(x, k, softness)``.
        attn_mask: Bools, True where a query may attend to a key, or numbers to add to the logits, ``-inf`` where it may
            not; broadcasts with ``(..., L, S)``.
        is_causal: Whether to exclude later keys.
        dropout_p: Probability that a weight is dropped.
        scale: Factor of the dot products; by default :math:`1 / \sqrt{d}`.

    Returns:
        Tensor ``(..., L, e)`` of the dtype of ``query``.

    References:
        [1] Xie et al. (2020), "Differentiable Top-k with Optimal Transport", NeurIPS, section 4.3.
        [2] Gupta et al. (2021), "Memory-efficient transformers via top-k attention", arXiv:2106.06899.

    Example:
        >>> topk_attention(torch.eye(2), torch.eye(2), torch.tensor([[3.0], [5.0]]), 1)
        tensor([[3.],
                [5.]])
    """
    _check_tensors(query, key, value, attn_mask)
    check_function("relaxation", relaxation, "(x, k, softness)")
    check_flag("is_causal", is_causal)
    checked_share("dropout_p", dropout_p)
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else float(checked_real("scale", scale))
    dtype = compute_dtype(query)
    scores = _masked((query.to(dtype) * scale) @ key.to(dtype).mT, attn_mask, is_causal)
    sizes = _sizes(k, scores, is_causal, attn_mask is not None, softness is None)
    weights = (_weights if attn_mask is None else _weights_of_some)(scores, sizes, softness, relaxation)
    weights = dropout(weights, dropout_p) if dropout_p > 0 else weights
    return (weights @ value.to(dtype)).to(query.dtype)


def _weights_of_some(scores: Tensor, sizes: Any, softness: float | Tensor | None, relaxation: Relaxation) -> Tensor:
    """:func:`_weights`, with zeros for queries that may attend to no key, whose softmax would be NaN."""
    allowed = (scores > -torch.inf).any(-1, keepdim=True)
    sizes = torch.where(allowed.squeeze(-1), sizes, torch.ones_like(sizes))
    return _weights(scores.masked_fill(~allowed, 0.0), sizes, softness, relaxation) * allowed


def _weights(scores: Tensor, sizes: Any, softness: float | Tensor | None, relaxation: Relaxation) -> Tensor:
    """The softmax of the scores over the keys of the mask, hard or relaxed."""
    if softness is None:
        return scores.masked_fill(topk_mask(scores.detach(), sizes) == 0, -torch.inf).softmax(-1)
    check_softness("softness", softness, scores, scores.shape[:-1], advice="")
    weights = relaxation(scores, sizes, softness) * scores.softmax(-1)
    return weights / weights.sum(-1, keepdim=True)


def _masked(scores: Tensor, attn_mask: Tensor | None, is_causal: bool) -> Tensor:
    """The scores, with ``-inf`` where a query may not attend to a key."""
    if attn_mask is not None:
        if attn_mask.dtype == torch.bool:
            scores = scores.masked_fill(~attn_mask, -torch.inf)
        else:
            scores = scores + attn_mask.to(scores.dtype)
    if is_causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(later, -torch.inf)
    return scores


def _sizes(k: Any, scores: Tensor, is_causal: bool, has_mask: bool, is_hard: bool) -> Any:
    """The number of keys that each query attends to: k, or all that it may attend to if these are fewer."""
    queries, keys = scores.shape[-2:]
    if not isinstance(k, Tensor):
        if is_hard or isinstance(k, Integral):
            k = checked_int("k", k, "an int for a hard mask")
        else:
            k = checked_positive("k", k, torch.Size())
        if k <= 0:
            raise ValueError(f"`k` must be positive, but got {k}")
        k = at_most(k, keys, scores.device)
        if not (is_causal or has_mask):
            return k
        k = torch.as_tensor(k, device=scores.device, dtype=torch.int64 if is_hard else scores.dtype)
    elif is_hard and (k.is_floating_point() or k.is_complex() or k.dtype == torch.bool):
        raise TypeError(f"`k` must be an int or an integer tensor for a hard mask, but got {k.dtype}")
    elif looks_at_contents(k) and not bool((in_wide_dtype(k) > 0).all()):
        raise ValueError(f"`k` must be positive, but got {k.min().item():g}")
    k = expanded("k", in_wide_dtype(k.to(scores.device)), scores.shape[:-1])
    if has_mask:
        return k.minimum((scores > -torch.inf).sum(-1).to(k.dtype))
    if is_causal:
        return k.minimum(torch.arange(1, queries + 1, dtype=k.dtype, device=k.device).clamp(max=keys))
    return k.clamp(max=keys)


def _check_tensors(query: Any, key: Any, value: Any, attn_mask: Any) -> None:
    for name, given in (("query", query), ("key", key), ("value", value)):
        check_floating(name, given)
        if given.dim() < 2:
            raise ValueError(f"`{name}` must have shape (..., tokens, features), but got {tuple(given.shape)}")
        if given.dtype != query.dtype:
            raise TypeError(f"`{name}` must have the dtype {query.dtype} of `query`, but has {given.dtype}")
    if query.shape[-1] != key.shape[-1]:
        raise ValueError(f"`key` must have the {query.shape[-1]} features of `query`, but got {tuple(key.shape)}")
    if key.shape[-2] != value.shape[-2]:
        raise ValueError(f"`value` must have the {key.shape[-2]} tokens of `key`, but got {tuple(value.shape)}")
    batch = _batch_shape(query, key, value)
    if attn_mask is None:
        return
    check_strided("attn_mask", attn_mask)
    if not isinstance(attn_mask, Tensor) or not (attn_mask.dtype == torch.bool or attn_mask.is_floating_point()):
        raise TypeError(f"`attn_mask` must be a tensor of bools or of floating-point numbers, but got {attn_mask!r}")
    wanted = (*batch, query.shape[-2], key.shape[-2])
    try:
        torch.broadcast_shapes(attn_mask.shape, wanted)
    except RuntimeError:
        raise ValueError(f"`attn_mask` must broadcast to {wanted}, but got {tuple(attn_mask.shape)}") from None


def _batch_shape(query: Tensor, key: Tensor, value: Tensor) -> torch.Size:
    """The leading axes, such as batch and heads, to which all three broadcast."""
    shapes = [x.shape[:-2] for x in (query, key, value)]
    try:
        return torch.broadcast_shapes(*shapes)
    except RuntimeError:
        got = ", ".join(str(tuple(shape)) for shape in shapes)
        raise ValueError(
            "`query`, `key` and `value` must have leading axes that broadcast, such as batch and heads, but got "
            f"{got}; if heads of queries share keys and values, repeat these: key.repeat_interleave(heads, -3)"
        ) from None
