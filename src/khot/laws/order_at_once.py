r"""Order sampling of ordinary rows in at most 40 large operations, as accelerators need it, and for smooth noise.

With M the units of the k largest positions, and for logistic noise,

.. math:: P(S) = e^{\sum_S \vartheta_i - \sum_M \vartheta_i}
    \int \prod_{i \in M} F_i \prod_{i \notin M} (1 - F_i) \sum_{j \in S} (1 - F_j) \, ds.

For the logarithms of exponential variables of rates w, with W the rate of all units outside S,
:math:`P(S) = \int e^{s - e^s} \prod_{i \in S} (1 - e^{-e^s w_i / W}) \, ds`. And with
:math:`\varphi_i = 1 - F_i + F_i z` and :math:`T = z^{1 - k} \prod_i \varphi_i` at points z of the unit circle,

.. math:: u_i = P(N_{-i} = k - 1) = \operatorname{mean} \frac{T}{\varphi_i}, \qquad
    \pi_i = \int F_i \Big( \sum_j f_j u_j + f_i u_i \Big) ds, \qquad
    (J g)_i = \int f_i \operatorname{mean} \frac{T}{\varphi_i}
    \Big( g_i \sum_j \frac{f_j}{\varphi_j} - \sum_j \frac{f_j g_j}{\varphi_j} \Big) ds,

where :math:`N_{-i}` is the number of the other units that have arrived, and J is the Jacobian, which is symmetric.

All integrals are computed by the trapezoidal rule. The first and the last ones extend over the times at which the
expected number of arrivals makes k of them possible, by Chernoff's bounds. These are found by one look at a grid. The
nodes are constants to autograd.

Rows are ordinary if they have one size between 1 and n - 1, and positions that are finite and not too far apart. Where
a row is not, inside transforms and in forward mode, the functions return None, and :mod:`.order_sampling` computes the
integrals in more steps.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from khot._contents import can_look
from khot._torch_internals import in_forward_mode
from khot._tracing import broadcast_shapes
from khot.kernels.order_sampling.noises import LOG_EXPONENTIAL, LOGISTIC, Noise

DEPTH = 36.0  # an integral ends, and a count is ignored, where its share is e^-36
FARTHEST, FARTHEST_AHEAD = 160.0, 600.0  # distances between positions of ordinary rows
FINE = 4  # points of the grid per unit of time
OUTSIDE = 1e300  # lowers positions so far that their exponentials are 0
ELEMENTS = 5 * 10**6, 2**26  # complex numbers held at a time in each of a few tensors, on a CPU and elsewhere


def _constants(device: torch.device, *arrays: Any) -> list[Tensor]:
    """Tensors that may be kept: also in inference mode they do not belong to it."""
    with torch.inference_mode(False):
        return [torch.from_numpy(np.asarray(x)).to(device) for x in arrays]


def _most(expected: float) -> float:
    """The number above which a Poisson variable is negligible; also the mean above which fewer arrivals are."""
    return expected + DEPTH + math.sqrt(DEPTH**2 + 2 * DEPTH * expected)


def _density(curvature: float) -> float:
    """Nodes per unit of time for integrands whose logarithm bends by at most this much, analytic to a height of pi/2."""
    return math.hypot(DEPTH / math.pi**2, math.sqrt(DEPTH * curvature / 2) / math.pi)


class _Plan(NamedTuple):
    """What a size needs.

    Attributes:
        time: Points of the grid, ``(points, 1, 1)``.
        low: The time before the first point, ``(1,)``.
        expected: Minus the expected numbers of arrivals between which k is possible, ``(2, 1, 1)``.
        density: Nodes per unit of time.
    """

    time: Tensor
    low: Tensor
    expected: Tensor
    density: float


def _expected(n: int, k: int) -> tuple[float, float]:
    left = n - k
    least = max(k * math.exp(-1 - DEPTH / k), n - _most(left))
    return least, min(_most(k), n - left * math.exp(-1 - DEPTH / left))


@functools.lru_cache(maxsize=64)
def _plan(n: int, k: int, spread: int, device: torch.device) -> _Plan:
    low = math.log(k / n) - 1 - DEPTH / k
    high = spread + math.log(n / (n - k)) + 1 + DEPTH / (n - k)
    index = np.arange(math.ceil((high - low) * FINE) + 1)
    time, ends = low + index / FINE, -np.reshape(_expected(n, k), (2, 1, 1))
    return _Plan(*_constants(device, time[:, None, None], time[:1] - 1 / FINE, ends), _density(min(k + 3 * math.sqrt(k), 0.65 * n) + 3))


class _Circle(NamedTuple):
    """Points z of one half of the unit circle.

    Attributes:
        turn: 1 - z, ``(J,)``.
        weight: z^(1 - k) divided by the number of all points, twice where it represents the conjugate as well.
    """

    turn: Tensor
    weight: Tensor


@functools.lru_cache(maxsize=64)
def _circle(n: int, k: int, device: torch.device) -> _Circle:
    least, most = _expected(n, k)
    least, most = least * math.exp(-1 / FINE), most * math.exp(1 / FINE)
    radius = DEPTH / 3 + math.sqrt(DEPTH**2 / 9 + 2 * DEPTH * min(n / 4, most))  # by Bernstein
    points = min(n + 1, math.ceil(max(most - k, k - least) + radius)) | 1  # odd: where z = -1, a factor may vanish
    angle, j = 2 * math.pi / points, np.arange((points + 1) // 2)
    weight = np.where(j == 0, 1.0, 2.0) / points * np.exp(1j * angle * (j * (1 - k) % points))
    return _Circle(*_constants(device, 1 - np.exp(1j * angle * j), weight))


@functools.lru_cache(maxsize=64)
def _fractions(count: int, device: torch.device) -> Tensor:
    return _constants(device, np.linspace(0, 1, count)[:, None])[0]


def _logistic(z: Tensor) -> tuple[Tensor, Tensor]:
    came = z.sigmoid().neg()
    return came, torch.addcmul(came, came, came)


def _log_exponential(z: Tensor) -> tuple[Tensor, Tensor]:
    x = z.exp().neg()
    came = x.expm1()
    return came, torch.addcmul(x, x, came)


FATES = {LOGISTIC: _logistic, LOG_EXPONENTIAL: _log_exponential}  # -F and -f


@torch.no_grad()
def _times(noise: Noise, theta: Tensor, k: int) -> tuple[Tensor, Tensor] | None:
    """Nodes ``(nodes, R)`` and their weight ``(R,)``, for positions up to 0; None if some are too far from it."""
    spread = -theta.amin().item()
    if not spread <= FARTHEST:
        return None
    plan = _plan(theta.shape[-1], k, math.ceil(spread), theta.device)
    came = FATES[noise](plan.time + theta)[0].sum(-1)
    first, last = torch.add(plan.low, (came > plan.expected).sum(1), alpha=1 / FINE).unbind(0)
    width = last - first
    count = int(width.amax().item() * plan.density) + 2
    return torch.lerp(first, last, _fractions(count, theta.device)), width / (count - 1)


def _is_ordinary(theta: Tensor, k: int | Tensor, *others: Tensor) -> bool:
    if not can_look(theta, *others) or in_forward_mode() or not isinstance(k, int):
        return False
    return 0 < k < theta.shape[-1] and theta.numel() > 0


def _centred(theta: Tensor) -> Tensor:
    rows = theta.double().reshape(-1, theta.shape[-1])
    return rows - rows.detach().amax(-1, keepdim=True)


def log_prob(noise: Noise, theta: Tensor, k: int | Tensor, value: Tensor) -> Tensor | None:
    """Log-probability of k-hot values ``(*sample, *batch, n)``, which are constants."""
    shape = broadcast_shapes(theta.shape, value.shape)
    if noise not in LOG_PROBS or not _is_ordinary(theta, k, value) or not shape.numel():
        return None
    if shape[len(shape) - theta.ndim :] != theta.shape:
        theta = theta.expand(shape)
    values = value.double().expand(shape).reshape(-1, theta.shape[:-1].numel(), shape[-1])
    found = LOG_PROBS[noise](_centred(theta), cast(int, k), values)
    return None if found is None else found.view(shape[:-1])


def _log_prob_logistic(theta: Tensor, k: int, value: Tensor) -> Tensor | None:
    """For positions ``(R, n)`` and values ``(S, R, n)``."""
    times = _times(LOGISTIC, theta, k)
    if times is None:
        return None
    s, weight = times
    ahead = s.neg()[..., None] - theta
    first = torch.zeros_like(theta).scatter(-1, theta.detach().topk(k).indices, 1.0)
    log_chance = F.logsigmoid(ahead * (1 - 2 * first)).sum(-1)
    missing = torch.einsum("gr,grn->rn", log_chance.softmax(0), ahead.sigmoid())
    rate, moved = torch.einsum("srn,rn->sr", value, missing), torch.einsum("srn,rn->sr", value - first, theta)
    return log_chance.logsumexp(0) + (rate * weight).log() + moved


@functools.lru_cache(maxsize=64)
def _exponential_rule(k: int, device: torch.device) -> list[Tensor]:
    """Minus e^s and the logarithm of the weights, of any row."""
    low, high = -DEPTH, math.log(_most(k + 1))
    s, step = np.linspace(low, high, math.ceil((high - low) * _density(k + 1)), retstep=True)
    return _constants(device, -np.exp(s)[:, None, None, None], (s - np.exp(s) + math.log(step))[:, None, None])


def _log_prob_log_exponential(theta: Tensor, k: int, value: Tensor) -> Tensor | None:
    theta = theta.expand(value.shape)
    others = torch.sub(theta, value, alpha=OUTSIDE).logsumexp(-1, keepdim=True)
    ahead = theta.gather(-1, value.topk(k, sorted=False).indices) - others
    if not ahead.detach().abs().amax().item() <= FARTHEST_AHEAD:
        return None
    up, log_weight = _exponential_rule(k, theta.device)
    return ((up * ahead.exp()).expm1().neg().log().sum(-1) + log_weight).logsumexp(0)


LOG_PROBS = {LOGISTIC: _log_prob_logistic, LOG_EXPONENTIAL: _log_prob_log_exponential}


def inclusion(noise: Noise, theta: Tensor, k: int | Tensor) -> Tensor | None:
    """Inclusion probabilities ``(*batch, n)``."""
    if noise not in FATES or not _is_ordinary(theta, k):
        return None
    rows = _centred(theta)
    times = _times(noise, rows.detach(), cast(int, k))
    return None if times is None else cast(Tensor, _Inclusion.apply(rows, *times, k, noise)).view(theta.shape)


class _Arrivals(NamedTuple):
    """Where the units of some rows are at the nodes of the rule."""

    came: Tensor  # -F, (nodes, R, n)
    coming: Tensor  # -f, (nodes, R, n)
    share: Tensor  # 1 / phi, (nodes, R, n, J)
    law: Tensor  # T, (nodes, R, J)


def _integral(
    function: Callable[[_Arrivals], Tensor], s: Tensor, weight: Tensor, theta: Tensor, k: int, noise: Noise
) -> Tensor:
    """The integral of a function ``(nodes, R, n)``, by some nodes at a time."""
    circle = _circle(theta.shape[-1], k, theta.device)
    each = max(1, ELEMENTS[s.device.type != "cpu"] // (theta.numel() * len(circle.turn)))

    def part(s: Tensor) -> Tensor:
        came, coming = FATES[noise](s[..., None] + theta)
        phi = 1 + came[..., None] * circle.turn
        return function(_Arrivals(came, coming, phi.reciprocal(), phi.prod(-2) * circle.weight)).sum(0)

    total, *others = [part(nodes) for nodes in s.split(each)]
    return sum(others, total) * weight[:, None]


class _Inclusion(Function):
    @staticmethod
    def forward(ctx: Any, theta: Tensor, s: Tensor, weight: Tensor, k: int, noise: Noise) -> Tensor:
        ctx.save_for_backward(theta, s, weight)
        ctx.k, ctx.noise = k, noise

        def included(at: _Arrivals) -> Tensor:
            flow = at.coming * (at.law.unsqueeze(-2) @ at.share.mT).real.squeeze(-2)
            return at.came * (flow.sum(-1, keepdim=True) + flow)

        return _integral(included, s, weight, theta, k, noise)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        theta, s, weight = ctx.saved_tensors

        def product(at: _Arrivals) -> Tensor:
            ahead = torch.stack((at.coming, at.coming * grad), -2).to(at.share.dtype) @ at.share
            own, others = ((at.law.unsqueeze(-2) * ahead) @ at.share.mT).real.unbind(-2)
            return at.coming * (grad * own - others)

        return _integral(product, s, weight, theta, ctx.k, ctx.noise), None, None, None, None
