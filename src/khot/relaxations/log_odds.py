r"""Log-odds of a mask of ``sigmoid_topk``, also where the mask itself has rounded to 0 or 1.

Densities on the capped simplex are functions of the log-odds :math:`z = \operatorname{logit} y`, which y determines
only as long as both y and 1 - y have digits left. Whoever makes y from scores may therefore let it remember them:
:func:`log_odds` then starts from the scores.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from khot._tracing import one_operation
from khot._validation import check_scores
from khot.kernels.links.logistic import LOGISTIC
from khot.kernels.rows import Threshold

from .engine import mask_and_threshold, mask_distances

_ATTRIBUTE = "_khot_scores"
ROUNDING = 1e-4  # in temperatures: more than a threshold in float32 is off by


class Memory(NamedTuple):
    """What a tensor remembers that is ``sigmoid_topk(scores, k, temperature)`` up to rounding.

    Attributes:
        scores: The scores.
        k: Sum of the mask.
        temperature: Softness of the mask.
        at: The threshold, as far as the mask was made with it.
        version: Of the tensor, which forgets when it is written into.
        source: What the scores were made of, by whoever wants to know it again.
    """

    scores: Tensor
    k: float | Tensor
    temperature: float | Tensor
    at: Threshold | None
    version: int
    source: Tensor | None


@one_operation
def sigmoid_topk_and_threshold(
    x: Tensor, k: float | Tensor, temperature: float | Tensor = 1.0
) -> tuple[Tensor, Tensor, Tensor]:
    """``sigmoid_topk(x, k, temperature)`` along the last dimension, with anchor and offset of its threshold."""
    check_scores(x, -1)
    return mask_and_threshold(x, k, temperature, link=LOGISTIC, name="temperature")


def sigmoid_topk_log_odds(x: Tensor, k: float | Tensor, temperature: float | Tensor = 1.0) -> Tensor:
    """``logit(sigmoid_topk(x, k, temperature))`` along the last dimension, accurate in both tails; 0 < k < n."""
    _, *at = sigmoid_topk_and_threshold(x, k, temperature)
    return mask_distances(x, k, temperature, Threshold(*at), link=LOGISTIC)


def log_volume(z: Tensor) -> Tensor:
    r"""The log-determinant :math:`\sum_i \log d_i - \log \sum_i d_i`, with :math:`d = \sigma(z) \sigma(-z)`.

    It is that of the first n - 1 entries of ``sigmoid_topk(x, k)`` with respect to those of x, the last held fixed.
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


def inside(y: Tensor) -> Tensor:
    """Rounds to the nearest number inside (0, 1) what had rounded to 0 or 1; the gradient is that of y."""
    limits, value = torch.finfo(y.dtype), y.detach()
    return y + (value.clamp(limits.tiny, 1 - limits.eps / 2) - value)


def remember_scores(
    y: Tensor,
    x: Tensor,
    k: float | Tensor,
    temperature: float | Tensor = 1.0,
    at: Threshold | None = None,
    source: Tensor | None = None,
) -> None:
    """Lets this tensor, not its copies, remember that it is ``sigmoid_topk(x, k, temperature)`` up to rounding.

    What is made without gradient remembers numbers without gradient.
    """
    if not torch.is_grad_enabled():
        x = x.detach()
        k, temperature = (v.detach() if isinstance(v, Tensor) else v for v in (k, temperature))
    setattr(y, _ATTRIBUTE, Memory(x, k, temperature, at, _version(y), source))


def memory_of(y: Tensor) -> Memory | None:
    """What y remembers, unless it was written into."""
    memory: Memory | None = getattr(y, _ATTRIBUTE, None)
    return memory if memory is not None and memory.version == _version(y) else None


def log_odds(y: Tensor, wanted: Tensor | None = None) -> Tensor:
    """Float64 log-odds of y: of the scores that it remembers, else of its entries.

    They are 0, without gradient, in rows that are not ``wanted``, whose entries may be anything; None wants all.
    """
    memory = memory_of(y)
    if memory is None:
        y = y.double()
        return y.logit() if wanted is None else torch.where(wanted.unsqueeze(-1), y, 0.5).logit()
    z = _remembered_log_odds(memory)
    return z if wanted is None else z.masked_fill(~wanted.unsqueeze(-1), 0.0)


def _remembered_log_odds(memory: Memory) -> Tensor:
    x, k, temperature, at, *_ = memory
    if at is None:
        return sigmoid_topk_log_odds(x.double(), k, temperature)
    z = mask_distances(x.double(), k, temperature, at, link=LOGISTIC)
    return z if x.dtype == torch.float64 else z - _rounding_of_threshold(z.detach(), k).unsqueeze(-1)


def _rounding_of_threshold(z: Tensor, k: float | Tensor) -> Tensor:
    """How far a threshold that was solved for in float32 is off, in temperatures: one Newton step in float64.

    The sum is taken against the number of z > 0, so that it has all its digits where the mask is almost hard.
    """
    above = z > 0
    rest = torch.sigmoid(-z.abs())  # of an entry to the nearest of 0 and 1
    excess = torch.where(above, -rest, rest).sum(-1) + (above.sum(-1) - k)
    step = excess / (rest * (1 - rest)).sum(-1)
    return torch.where(step.abs() < ROUNDING, step, 0.0)  # else there is no slope at all


def _version(y: Tensor) -> int:
    return 0 if y.is_inference() else y._version
