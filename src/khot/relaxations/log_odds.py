r"""Log-odds of a mask of ``sigmoid_topk``, also where the mask itself has rounded to 0 or 1.

Densities on the capped simplex are functions of the log-odds :math:`z = \operatorname{logit} y`, which y determines
only as long as both y and 1 - y have digits left. Whoever makes y from scores may therefore let it remember them:
:func:`log_odds` then starts from the scores.
"""

from typing import cast

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from khot._tracing import one_operation

from .mask_log_odds import mask_log_odds
from .sigmoid import sigmoid_topk

_ATTRIBUTE = "_khot_scores"


@one_operation
def sigmoid_topk_log_odds(x: Tensor, k: float | Tensor, temperature: float | Tensor = 1.0) -> Tensor:
    """``logit(sigmoid_topk(x, k, temperature))`` along the last dimension, accurate in both tails."""
    return cast(Tensor, mask_log_odds(sigmoid_topk, x, k, temperature)).to(x.dtype)


def log_volume(z: Tensor) -> Tensor:
    r"""The log-determinant :math:`\sum_i \log d_i - \log \sum_i d_i`, with :math:`d = \sigma(z) \sigma(-z)`.

    It is that of the first n - 1 entries of ``sigmoid_topk(x, k)`` with respect to those of x, the last held fixed.
    """
    log_slope = logsigmoid(z) + logsigmoid(-z)
    return log_slope.sum(-1) - log_slope.logsumexp(-1)


def inside(y: Tensor) -> Tensor:
    """Rounds to the nearest number inside (0, 1) what had rounded to 0 or 1; the gradient is that of y."""
    limits, value = torch.finfo(y.dtype), y.detach()
    return y + (value.clamp(limits.tiny, 1 - limits.eps / 2) - value)


def remember_scores(y: Tensor, x: Tensor, k: float | Tensor, temperature: float | Tensor = 1.0) -> None:
    """Lets this tensor, not its copies, remember that it is ``sigmoid_topk(x, k, temperature)`` up to rounding."""
    setattr(y, _ATTRIBUTE, ((x, k, temperature), _version(y)))


def log_odds(y: Tensor, wanted: Tensor | None = None) -> Tensor:
    """Float64 log-odds of y: of the scores that it remembers, unless it was written into, else of its entries.

    They are 0, without gradient, in rows that are not ``wanted``, whose entries may be anything.
    """
    if wanted is None:
        wanted = torch.ones_like(y[..., 0], dtype=torch.bool)
    scores, version = getattr(y, _ATTRIBUTE, (None, None))
    if scores is None or version != _version(y):
        return torch.where(wanted.unsqueeze(-1), y.double(), 0.5).logit()
    x, k, temperature = scores
    return sigmoid_topk_log_odds(x.double(), k, temperature).masked_fill(~wanted.unsqueeze(-1), 0.0)


def _version(y: Tensor) -> int:
    return 0 if y.is_inference() else y._version
