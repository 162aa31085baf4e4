r"""Order sampling of ordinary rows in at most 40 large operations, as accelerators need it: log P(S).

With M the units of the k largest positions, and for logistic noise,

.. math:: P(S) = e^{\sum_S \vartheta_i - \sum_M \vartheta_i}
    \int \prod_{i \in M} F_i \prod_{i \notin M} (1 - F_i) \sum_{j \in S} (1 - F_j) \, ds.

For the logarithms of exponential variables of rates w, with W the rate of all units outside S,
:math:`P(S) = \int e^{s - e^s} \prod_{i \in S} (1 - e^{-e^s w_i / W}) \, ds`, over the same times for all rows. The
other integrals extend over the times at which the expected number of arrivals makes k of them possible, by Chernoff's
bounds, which one look at a grid finds. The rule is the trapezoidal one; its nodes are constants to autograd.

Rows are ordinary if they have one size between 1 and n - 1, and positions that are finite and not too far apart.
Otherwise, inside transforms and in forward mode, functions return None, and :mod:`.order_sampling` needs more steps.
"""

import functools
import math
from typing import Any, NamedTuple, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from khot._contents import can_look
from khot._shapes import broadcast_shapes
from khot._torch_internals import eager_dispatcher, in_forward_mode, is_transformed
from khot.kernels import selection
from khot.kernels.operators.autograd import has_derivative
from khot.kernels.order_sampling.noises import LOG_EXPONENTIAL, LOGISTIC, Noise

DEPTH = 36.0  # an integral ends, and a count is ignored, where its share is e^-36
FARTHEST = 24.0, 160.0  # distance of positions in ordinary rows on a CPU, where more nodes cost too much, and elsewhere
FARTHEST_AHEAD = 600.0  # distance of a member from all units outside the set, if ranks are exponential
FINE = 4  # points of the grid per unit of time
MOST_POSITIONS = 2**20  # positions of all rows; a grid has about a hundred points for each
WORK, FEW = 192, 160  # members times nodes, at most so many for each unit; rows of fewer units count as FEW
OUTSIDE = 1e300  # lowers positions so far that their exponentials are 0


def constants(device: torch.device, *arrays: Any) -> list[Tensor]:
    """Tensors that may be kept: also inside a transform or in inference mode they belong to neither."""
    with torch.inference_mode(False), eager_dispatcher():
        return [torch.from_numpy(np.asarray(x)).to(device) for x in arrays]


def _most(expected: float) -> float:
    """A bound that a Poisson variable practically never exceeds, and the largest mean for which it holds."""
    return expected + DEPTH + math.sqrt(DEPTH**2 + 2 * DEPTH * expected)


def expected_counts(n: int, k: int) -> tuple[float, float]:
    """The smallest and the largest expected number of arrivals with which k are possible."""
    left = n - k
    least = max(k * math.exp(-1 - DEPTH / k), n - _most(left))
    return least, min(_most(k), n - left * math.exp(-1 - DEPTH / left))


def _density(curvature: float) -> float:
    """Nodes per unit of time for integrands that are analytic to a height of pi / 2 and bend by at most this much."""
    return math.hypot(DEPTH / math.pi**2, math.sqrt(DEPTH * curvature / 2) / math.pi)


@functools.lru_cache(maxsize=64)
def _grid(n: int, k: int, spread: int, device: torch.device) -> list[Tensor]:
    """Times; the one before them; and minus the expected counts with which k is possible, likely and impossible."""
    low = math.log(k / n) - 1 - DEPTH / k
    high = spread + math.log(n / (n - k)) + 1 + DEPTH / (n - k)
    time, (least, most) = np.arange(low, high + 1 / FINE, 1 / FINE), expected_counts(n, k)
    return constants(device, time[:, None, None], time[:1] - 1 / FINE, -np.array([least, k, most])[:, None, None])


@functools.lru_cache(maxsize=512)
def _fractions(count: int, device: torch.device) -> Tensor:
    return constants(device, np.linspace(0, 1, count)[:, None])[0]


# -F at a position and a time that add up to z.
CAME = {LOGISTIC: lambda z: z.sigmoid().neg(), LOG_EXPONENTIAL: lambda z: z.exp().neg().expm1()}


class Times(NamedTuple):
    """When k arrivals are possible."""

    node: Tensor  # (nodes, R), at equal distances
    width: Tensor  # (R,), of all nodes
    middle: Tensor  # (R,), when k arrivals are likely


@torch.no_grad()
def times(noise: Noise, theta: Tensor, k: int) -> Times | None:
    """The :class:`Times` for positions up to 0; None if some are too far from it."""
    spread, n = -theta.amin().item(), theta.shape[-1]
    if not spread <= FARTHEST[theta.device.type != "cpu"]:
        return None
    time, before, expected = _grid(n, k, math.ceil(spread), theta.device)
    place = (CAME[noise](time + theta).sum(-1) > expected).sum(1)
    first, middle, last = torch.add(before, place, alpha=1 / FINE).unbind(0)
    width = last - first
    count = int(width.amax().item() * _density(min(k + 3 * math.sqrt(k), 0.65 * n) + 3)) + 2
    return Times(torch.lerp(first, last, _fractions(count, theta.device)), width, middle)


def is_ordinary(theta: Tensor, k: int | Tensor, *others: Tensor) -> bool:
    """Whether these can be rows of one size, whose positions may be looked at."""
    may_look = not (is_transformed() or in_forward_mode()) and can_look(theta, *others)
    return may_look and isinstance(k, int) and 0 < k < theta.shape[-1] and 0 < theta.numel() <= MOST_POSITIONS


def centred(theta: Tensor) -> Tensor:
    """Positions ``(R, n)`` relative to the largest of their row."""
    rows = theta.double().reshape(-1, theta.shape[-1])
    return rows - rows.detach().amax(-1, keepdim=True)


def log_prob(noise: Noise, theta: Tensor, k: int | Tensor, value: Tensor) -> Tensor | None:
    """Log-probability of k-hot values ``(*sample, *batch, n)``; None also if these have derivatives."""
    shape, constant = broadcast_shapes(theta.shape, value.shape), not has_derivative(value, torch.is_grad_enabled())
    if not (constant and shape.numel() and is_ordinary(theta, k, value)):
        return None
    theta = theta if shape[len(shape) - theta.ndim :] == theta.shape else theta.expand(shape)
    values = value.double().expand(shape).reshape(-1, theta.shape[:-1].numel(), shape[-1])
    found = LOG_PROBS[noise](centred(theta), cast(int, k), values)
    return None if found is None else found.view(shape[:-1])


def _log_prob_logistic(theta: Tensor, k: int, value: Tensor) -> Tensor | None:
    """:func:`log_prob` for logistic noise, positions ``(R, n)`` and values ``(S, R, n)``."""
    found = times(LOGISTIC, theta, k)
    if found is None:
        return None
    ahead, step = found.node.neg()[..., None] - theta, found.width / (len(found.node) - 1)
    first = selection.topk_mask(theta.detach(), theta.new_full(theta.shape[:-1], k, dtype=torch.int64), False)
    log_chance = F.logsigmoid(ahead * (1 - 2 * first)).sum(-1)
    missing = torch.einsum("gr,grn->rn", log_chance.softmax(0), ahead.sigmoid())
    rate, moved = torch.einsum("srn,rn->sr", value, missing), torch.einsum("srn,rn->sr", value - first, theta)
    return log_chance.logsumexp(0) + (rate * step).log() + moved


@functools.lru_cache(maxsize=64)
def _exponential_rule(k: int, device: torch.device) -> tuple[Tensor, Tensor, float]:
    """Minus e^s and s - e^s at the nodes of any row, and the logarithm of the step between them."""
    low, high = -DEPTH, math.log(_most(k + 1))
    s, step = np.linspace(low, high, math.ceil((high - low) * _density(k + 1)), retstep=True)
    up, rise = constants(device, -np.exp(s)[:, None, None, None], (s - np.exp(s))[:, None, None])
    return up, rise, math.log(step)


def _log_prob_log_exponential(theta: Tensor, k: int, value: Tensor) -> Tensor | None:
    up, rise, log_step = _exponential_rule(k, theta.device)
    if k * len(up) > WORK * max(theta.shape[-1], FEW):
        return None
    theta = theta.expand(value.shape)
    others = torch.sub(theta, value, alpha=OUTSIDE).logsumexp(-1, keepdim=True)
    ahead = theta.gather(-1, selection.topk_indices(value, k, *selection.bounds_of(value), True, -1, False)) - others
    if not ahead.detach().abs().amax().item() <= FARTHEST_AHEAD:
        return None
    return ((up * ahead.exp()).expm1().neg().log().sum(-1) + rise).logsumexp(0) + log_step


LOG_PROBS = {LOGISTIC: _log_prob_logistic, LOG_EXPONENTIAL: _log_prob_log_exponential}
