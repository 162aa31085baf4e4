r"""Which experts a token takes, and with which weights: two separate steps.

Both start from scores s of the logits x. The k largest of c = s + bias are chosen, as constants. The weights of the
chosen set S come from the scores alone, :math:`w_e = s_e / \sum_{j \in S} s_j`, whatever the bias was.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, softplus

from khot._contents import looks_at_contents
from khot._distributed.placements import as_dtensor, is_dtensor
from khot._validation import (
    check_choice,
    check_flag,
    check_floating,
    check_strided,
    checked_int,
    checked_real,
    expanded,
    is_int,
)
from khot.kernels.exact.rows import compute_dtype
from khot.relaxations import topk_mask

from ._masking import places_of_largest
from .topk import Selection

Scores = str | Callable[[Tensor], Tensor]
Groups = tuple[int, ...]
NAMED = ("softmax", "sigmoid", "sqrtsoftplus")


def route(
    logits: Tensor,
    k: int | None = None,
    *,
    scores: Scores = "softmax",
    bias: Tensor | None = None,
    groups: Groups | None = None,
    indices: Tensor | None = None,
    renormalize: bool = True,
    eps: float = 0.0,
    scale: float | Tensor = 1.0,
) -> Selection:
    r"""Chooses k experts for each token and weighs them: the routers of most mixtures of experts [1-4].

    With scores s of the logits, the chosen set S has the k largest :math:`c_e = s_e + b_e`, and

    .. math:: w_e = \text{scale} \cdot s_e / \bigl({\textstyle\sum_{j \in S}} s_j + \text{eps}\bigr), \quad e \in S,

    or scale times :math:`s_e` without renormalisation. The bias moves the choice, not the weights, and has no gradient.
    Among equal c, as by rounding beside a large bias, the larger score is chosen, and then the earlier expert. An
    expert with a logit of ``-inf`` is closed: it has weight 0, and is taken only if there are fewer than k others. With
    ``eps=0``, renormalised weights of a named score are computed from its logarithm, so that scores may underflow.
    Half precision is computed in float32 and rounded once.

    Args:
        logits: ``(..., experts)``.
        k: Number of experts per token; by default that of ``indices``.
        scores: "softmax"; "sigmoid"; "sqrtsoftplus", which is :math:`\sqrt{\log(1 + e^x)}`; or a function of the
            logits ``(..., experts)`` with nonnegative values of the same shape.
        bias: Added to the scores for the choice; broadcasts with the logits.
        groups: ``(number, kept)`` or ``(number, kept, best)`` [2]: neighbouring experts form ``number`` groups of equal
            size. The score of a group is the sum of its ``best`` largest c (by default 2), and only the experts of the
            ``kept`` best groups can be chosen.
        indices: Experts ``(..., k)`` that replace the choice, such as those of another run or of a table, without
            ``bias`` and ``groups``. They are int32 or int64, and different for each token.
        renormalize: Whether the weights of a token sum to ``scale``, up to ``eps``.
        eps: Added to the sum of the chosen scores, at least 0.
        scale: Factor of the weights, a number or a tensor that broadcasts with ``(..., k)``.

    Returns:
        Weights ``(..., k)`` of the dtype of the logits, and experts, int64, in increasing order unless given.

    References:
        [1] Shazeer et al. (2017), "Outrageously large neural networks", arXiv:1701.06538.
        [2] DeepSeek-AI (2024), "DeepSeek-V3 technical report", arXiv:2412.19437, Eq. (13-16).
        [3] Wang et al. (2024), "Auxiliary-loss-free load balancing for mixture-of-experts", arXiv:2408.15664, Eq. (3).
        [4] Muennighoff et al. (2024), "OLMoE: open mixture-of-experts language models", arXiv:2409.02060.

    Example:
        >>> logits = torch.tensor([[2.0, 1.0, 0.0], [0.0, 3.0, 3.0]])  # two tokens, three experts
        >>> route(logits, 2)
        Selection(values=tensor([[0.7311, 0.2689],
                [0.5000, 0.5000]]), indices=tensor([[0, 1],
                [1, 2]]))
    """
    check_floating("logits", logits, are_scores=True)
    if logits.dim() == 0:
        raise ValueError("`logits` must have shape (..., experts), but got a scalar")
    if looks_at_contents(logits) and bool(logits.isnan().any()):
        raise ValueError("`logits` must not contain NaN")
    check_words(scores, eps)
    check_flag("renormalize", renormalize)
    wide = logits.to(compute_dtype(logits))
    if indices is None:
        size = _checked_size(k, logits)
        groups = None if groups is None else groups_of(checked_groups(groups), logits.shape[-1], size)
        if bias is not None:
            check_floating("bias", bias)
            bias = expanded("bias", bias.detach(), logits.shape)
        key = key_of_choice(wide, size, scores, bias, groups)
        indices = places_of_largest(key, size, may_exclude=True)  # closed experts fill up
        closed = None if bias is None and groups is None else key.gather(-1, indices) == -torch.inf
    elif bias is not None or groups is not None:
        raise ValueError("`indices` replaces the choice, so that `bias` and `groups` have no effect: leave them out")
    else:
        indices, closed = checked_indices(indices, k, logits), None
    by_logarithm = renormalize and eps == 0 and isinstance(scores, str)
    chosen = (wide if by_logarithm else scores_of(wide, scores)).gather(-1, indices)
    if closed is not None:
        chosen = chosen.masked_fill(closed, -torch.inf if by_logarithm else 0)
    if by_logarithm:
        weights = probabilities(log_scores_of(chosen, scores))
    else:
        weights = over_their_sum(chosen, eps) if renormalize else chosen
    factor = expanded("scale", scale, weights.shape) if isinstance(scale, Tensor) else checked_real("scale", scale)
    return Selection((weights * factor).to(logits.dtype), indices)


# Scores


def scores_of(logits: Tensor, scores: Scores) -> Tensor:
    """The scores s, 0 for closed experts."""
    if isinstance(scores, str):
        if scores == "sqrtsoftplus":
            return log_scores_of(logits, scores).exp()  # the gradient is finite where the score is 0
        return logits.sigmoid() if scores == "sigmoid" else probabilities(logits)
    closed = is_closed(logits)
    s: Any = scores(logits.masked_fill(closed, 0))
    if not isinstance(s, Tensor) or s.shape != logits.shape:
        got = tuple(s.shape) if isinstance(s, Tensor) else type(s).__name__
        raise ValueError(f"`scores` must return a tensor of shape {tuple(logits.shape)}, but got {got}")
    found: Tensor = s.masked_fill(logits == -torch.inf, 0)
    return found


def log_scores_of(logits: Tensor, scores: Scores) -> Tensor:
    """The logarithms of named scores, of a softmax up to a constant."""
    if scores == "softmax":
        return logits
    if scores == "sigmoid":
        return logsigmoid(logits)
    small = -37  # where log(1 + e^x) = e^x in double precision
    return 0.5 * torch.where(logits < small, logits, softplus(logits.clamp(min=small)).log())


def is_closed(logits: Tensor) -> Tensor:
    """Which tokens have no expert because all their logits are ``-inf``, (..., tokens, 1)."""
    return (logits == -torch.inf).all(-1, keepdim=True)


def probabilities(logits: Tensor) -> Tensor:
    """The softmax, and zeros for a token without an expert, where a softmax and its gradient are NaN."""
    closed = is_closed(logits)
    return logits.masked_fill(closed, 0).softmax(-1).masked_fill(closed, 0)


def over_their_sum(weights: Tensor, eps: float = 0.0) -> Tensor:
    """The weights of each token, which then sum to 1; zeros for a token without experts."""
    total = weights.sum(-1, keepdim=True)
    total = total + eps if eps else total
    # Zeros are divided by 1, since a gradient divided by the smallest number may be infinite.
    return weights / total.clamp(min=torch.finfo(weights.dtype).tiny).masked_fill(total == 0, 1)


# Choices


def candidates(logits: Tensor, scores: Scores, bias: Tensor | None, groups: Groups | None) -> Tensor:
    """c = s + bias, the largest of which are chosen; ``-inf`` for closed experts, and for groups that are not kept."""
    c = scores_of(logits, scores)
    if is_dtensor(c) and bias is not None:
        spread: Any = c
        bias = as_dtensor("bias", bias, "logits", spread.device_mesh)
    c = (c if bias is None else c + bias).masked_fill(logits == -torch.inf, -torch.inf)
    if groups is None:
        return c
    number, kept, best = groups
    members = c.view(*c.shape[:-1], number, c.shape[-1] // number)
    largest = members.detach().gather(-1, places_of_largest(members, best, may_exclude=True))
    if best > 2:  # a sum of three rounds by their order, and groups with the same scores are equal
        largest = largest.sort(-1).values
    of_groups = largest.masked_fill(largest == -torch.inf, 0).sum(-1)
    of_groups = of_groups.masked_fill(largest.amax(-1) == -torch.inf, -torch.inf)
    return members.masked_fill(topk_mask(of_groups, kept).unsqueeze(-1) == 0, -torch.inf).flatten(-2)


def key_of_choice(
    logits: Tensor, k: int | Tensor, scores: Scores, bias: Tensor | None, groups: Groups | None
) -> Tensor:
    """Scores of the experts for the choice of the k largest; ``-inf`` for experts that cannot be chosen."""
    logits, is_named = logits.detach(), isinstance(scores, str)
    if is_named and bias is None and groups is None:
        return logits  # named scores increase with the logits, and round
    c = candidates(logits, scores, bias, groups)
    if bias is None:
        return logits.masked_fill(c == -torch.inf, -torch.inf) if is_named else c
    # Beside a large bias different scores may have equal sums: those at the limit are compared by the scores alone.
    limit = c.masked_fill(topk_mask(c, k) == 0, torch.inf).amin(-1, keepdim=True)
    finer = logits if is_named else scores_of(logits, scores)
    tied = torch.where(c == limit.masked_fill(limit == -torch.inf, torch.nan), finer, -torch.inf)
    return tied.masked_fill(c > limit, torch.inf)


# Checks


def check_words(scores: Any, eps: Any) -> None:
    """Checks the scores, a name or a function, and eps."""
    if not callable(scores):
        check_choice("scores", scores, NAMED)
    if not 0 <= checked_real("eps", eps) < torch.inf:
        raise ValueError(f"`eps` must be finite and at least 0, but got {eps}")


def checked_groups(groups: Any) -> Groups:
    """The groups as a tuple of ints."""
    if not isinstance(groups, (tuple, list)) or len(groups) not in (2, 3) or not all(map(is_int, groups)):
        raise TypeError(f"`groups` must be (number, kept) or (number, kept, best), ints, but got {groups!r}")
    number, kept, *best = groups
    if not 1 <= kept <= number or min(best, default=1) < 1:
        raise ValueError(f"`groups` must satisfy 1 <= kept <= number and best >= 1, but got {tuple(groups)}")
    return tuple(map(int, groups))


def groups_of(groups: Groups, experts: int, k: float | Tensor) -> Groups | None:
    """(number, kept, best) for so many experts; None if all groups are kept, since they then change nothing."""
    number, kept = groups[:2]
    if experts % number:
        raise ValueError(f"`groups` must divide the {experts} experts into groups of equal size, but got {number}")
    size = experts // number
    best = groups[2] if len(groups) == 3 else min(2, size)
    if best > size:
        raise ValueError(f"`groups` must not score more experts than a group has, {size}, but got best={best}")
    if not isinstance(k, Tensor) and k > kept * size:
        raise ValueError(f"`k` must not exceed the {kept * size} experts of the {kept} kept groups, but got k={k}")
    return None if kept == number else (number, kept, best)


def checked_indices(indices: Any, k: Any, logits: Tensor) -> Tensor:
    """Given experts as int64, (..., k) with the leading axes of the logits."""
    check_strided("indices", indices)
    if not isinstance(indices, Tensor) or indices.dtype not in (torch.int64, torch.int32):
        got = indices.dtype if isinstance(indices, Tensor) else type(indices).__name__
        raise TypeError(f"`indices` must be a tensor of int64 or int32, but got {got}")
    if indices.dim() == 0 or (k is not None and checked_int("k", k) != indices.shape[-1]):
        raise ValueError(f"`indices` must have shape (..., k), but got {tuple(indices.shape)} with k={k}")
    experts = logits.shape[-1]
    if looks_at_contents(indices) and bool(((indices < 0) | (indices >= experts)).any()):
        raise ValueError(f"`indices` must lie in [0, {experts - 1}], but got {indices.min()} to {indices.max()}")
    return expanded("indices", indices.long(), logits.shape[:-1] + indices.shape[-1:])


def _checked_size(k: Any, logits: Tensor) -> int:
    size = checked_int("k", k, "an int, since all tokens get the same number of experts; `indices` may replace it")
    if not 0 <= size <= logits.shape[-1]:
        raise ValueError(f"`k` must lie in [0, {logits.shape[-1]}], the number of experts, but got {k}")
    return size
