r"""Log-odds of a mask made by ``sigmoid_topk``, accurate even where the mask itself has rounded to 0 or 1.

Densities on the capped simplex are functions of the log-odds :math:`z = \operatorname{logit} y`. These can be computed
from y only while both y and 1 - y have digits left. Code that makes y from scores may therefore remember the scores,
and :func:`log_odds` then starts from them.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from khot._host import on_host_without_float64
from khot.kernels.call import call_of

from .remembered import Sources
from .sigmoid import MAP

ROUNDING = 4  # units in the last place; 1.2 was the largest error seen in float32 masks


@on_host_without_float64
def sigmoid_topk_log_odds(x: Tensor, k: float | Tensor, temperature: float | Tensor = 1.0) -> Tensor:
    """``logit(sigmoid_topk(x, k, temperature))`` along the last dimension, accurate in both tails; 0 < k < n."""
    return MAP.distances(call_of(x, k, temperature), x, k, temperature)


def log_volume(z: Tensor) -> Tensor:
    r"""The log-determinant :math:`\sum_i \log d_i - \log \sum_i d_i`, with :math:`d = \sigma(z) \sigma(-z)`.

    This is the log-determinant of the first n - 1 entries of ``sigmoid_topk(x, k)`` with respect to those of x, with
    the last entry of x held fixed.
    """
    slope = log_slope(z)
    return slope.sum(-1) - slope.logsumexp(-1)


def log_slope(z: Tensor) -> Tensor:
    r""":math:`\log \sigma(z) \sigma(-z)`."""
    return 2 * logsigmoid(z) - z


def is_interior(y: Tensor) -> bool:
    """Whether all entries are strictly between 0 and 1."""
    if y.numel() == 0:
        return True
    lowest, highest = y.detach().aminmax()
    return lowest.item() > 0 and highest.item() < 1


def smallest_positive(dtype: torch.dtype) -> float:
    """The smallest positive number to use: the smallest normal one, except in float16, where many of these add up."""
    limits = torch.finfo(dtype)
    return limits.tiny * limits.eps if dtype == torch.float16 else limits.tiny


def inside(y: Tensor) -> Tensor:
    """Replaces entries that have rounded to 0 or 1 with the nearest number inside (0, 1); gradients pass unchanged."""
    value = y.detach()
    return y + (_clamped_inside(value, y.dtype) - value)


def _clamped_inside(y: Tensor, dtype: torch.dtype) -> Tensor:
    return y.clamp(smallest_positive(dtype), 1 - torch.finfo(dtype).eps / 2)


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value


_SCORES = Sources()


def remember_scores(y: Tensor, x: Tensor, k: float | Tensor, temperature: float | Tensor = 1.0) -> None:
    """Remembers that this tensor is ``sigmoid_topk(x, k, temperature)`` up to rounding."""
    _SCORES.remember(y, (x, k, temperature))


def log_odds(y: Tensor, wanted: Tensor | None = None) -> Tensor:
    """Float64 log-odds of y, from its scores if they are remembered, or else from its entries.

    They are 0, without gradient, in rows that are not ``wanted``, whose entries may be anything; None means that all
    rows are wanted.
    """
    source = _SCORES.find(y)
    if source is None:
        return _of_entries(y, wanted)
    made_from: Any = map(_detached, source.made_from) if source.is_constant else source.made_from
    x, *numbers = made_from
    z = sigmoid_topk_log_odds(x.double(), *numbers)
    if not source.is_certain:  # then the entries show whether they are still those of the mask
        z = torch.where(_rounds_to(z.detach(), y.detach()), z, _of_entries(y, wanted))
    return z if wanted is None else z.masked_fill(~wanted.unsqueeze(-1), 0.0)


def _of_entries(y: Tensor, wanted: Tensor | None) -> Tensor:
    y = y.double()
    return y.logit() if wanted is None else torch.where(wanted.unsqueeze(-1), y, 0.5).logit()


def _rounds_to(z: Tensor, y: Tensor) -> Tensor:
    """Whether each row of y is `inside` of the probabilities of log-odds z, up to rounding; ``(..., 1)``."""
    probs, eps = _clamped_inside(torch.sigmoid(z), y.dtype), torch.finfo(y.dtype).eps
    # The relative error that log-odds with a relative error of eps cause; the smallest numbers are further apart.
    rounding = ROUNDING * eps * (1 + z.abs()) * probs + smallest_positive(y.dtype)
    return ((y - probs).abs() <= rounding).all(-1, keepdim=True)
