r"""Order sampling: the k units of smallest :math:`R_i = E_i - \vartheta_i`, for independent noise E of a given law.

With F and f the distribution function and density of the noise, :math:`F_i = F(s + \vartheta_i)` and :math:`f_i` at a
time s are those of :math:`R_i`. A set S is drawn if the last of its units arrives before all others,

.. math:: P(S) = \int \prod_{i \in S} F_i \prod_{i \notin S} (1 - F_i) \sum_{j \in S} \frac{f_j}{F_j} \, ds.

At a time s the N units that have arrived are independent. Given N = k they are a conditional Poisson design, whose
inclusion probabilities m and P(N = k) come from one product tree. Unit i is drawn if it does not arrive after the k-th
of the others; integration by parts gives

.. math:: \pi_i = \int P(N = k) \Big( F_i \sum_j \frac{f_j}{F_j} m_j + f_i m_i \Big) ds,

in which all terms are positive, and likewise :math:`1 - \pi_i` with 1 - F and 1 - m in place of F and m.

The rule is the trapezoidal one, which converges exponentially, over a range that is found by trial and is a constant to
autograd. The sum over the nodes is differentiable to any order.

All functions take positions ``(*batch, n)`` and k, an int or an integer tensor that broadcasts with the batch shape,
and return float64. A position of ``inf`` includes its unit, and ``-inf`` excludes it. Arguments are not checked here.

References:
    [1] Rosén (1997), "On sampling with probability proportional to size", Journal of Statistical Planning and
        Inference 62(2).
"""

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from khot._contents import can_look
from khot.kernels.call import runs_on_cpu
from khot.kernels.exact.rows import number_on
from khot.kernels.operators.autograd import has_derivative
from khot.kernels.order_sampling import EXACT, integrals
from khot.kernels.order_sampling.derivatives import fused_inclusion, fused_log_prob
from khot.kernels.order_sampling.noises import LOG_EXPONENTIAL, LOGISTIC, SURE, Law, Noise
from khot.kernels.threshold import solve_threshold

from . import order_at_once, order_inclusion_at_once
from .conditional_poisson import count_law
from .inverse import solve_logits
from .inverse_newton import Family
from .quadrature import integration_range, trapezoidal

MARGIN = 60.0  # beyond this distance from all positions the integrand vanishes
MAX_ELEMENTS = 2**18  # positions times nodes processed at a time, which bounds the memory
FAR = 1000.0  # e^-1000 is 0
UNDERFLOW = 1e-300
TINY_LOG_ODDS = -37.0  # below these log-odds of p, log(1 - p) = -p


class _Rows(NamedTuple):
    """A problem without certain units: these are moved to -inf, and k counts the rest."""

    theta: Tensor  # (*batch, n)
    k: Tensor  # (*batch,), between 1 and the number of open units minus 1
    open: Tensor  # (*batch, n), the units whose fate is open; in rows without any, theta = 0 and k = 1
    certain: Tensor  # (*batch, n), the value of the others


def _rows(theta: Tensor, k: int | Tensor) -> _Rows:
    k = number_on(theta.device, k).expand(theta.shape[:-1])
    theta, included, finite = theta.double(), theta == torch.inf, theta.isfinite()
    k, count = k - included.sum(-1), finite.sum(-1)
    has_choice = ((k > 0) & (k < count))[..., None]
    certain = included | (finite & (k > 0)[..., None])
    is_open = finite & has_choice
    filler = torch.where(has_choice, -torch.inf, 0.0)
    return _Rows(torch.where(is_open, theta, filler), k.where(has_choice[..., 0], 1), is_open, certain)


class _Range(NamedTuple):
    """The range in which an integrand does not vanish, as numbers of the shape of the integrals."""

    low: Tensor
    high: Tensor
    excess: Tensor | None = None  # length of a gap that is left out, except for FAR of it


def is_fused(theta: Tensor) -> bool:
    """Whether loops compute both integrals of each row, with negligible memory."""
    return integrals.is_fused(theta)


def log_prob(noise: Noise, theta: Tensor, k: int | Tensor, value: Tensor, depth: float = EXACT) -> Tensor:
    """Log-probability of k-hot values ``(*sample, *batch, n)``; ``-inf`` if one contradicts an infinite position.

    ``depth`` is the accuracy that the caller needs, as in :mod:`khot.kernels.order_sampling`.
    """
    if is_fused(theta) and _runs_now(theta, value) and not has_derivative(value, torch.is_grad_enabled()):
        exact = partial(_log_prob_in_torch, noise)
        return fused_log_prob(theta, number_on(theta.device, k), value, noise.name, depth, exact)
    return _log_prob_in_torch(noise, theta, k, value)


def _as_number(k: int | Tensor) -> int | Tensor:
    return int(k) if isinstance(k, Tensor) and k.ndim == 0 and can_look(k) else k


def _runs_now(*tensors: Tensor) -> bool:
    """Whether loops can take these: untransformed numbers on a CPU."""
    return runs_on_cpu(*tensors) and all(x.numel() for x in tensors)


def _log_prob_in_torch(noise: Noise, theta: Tensor, k: int | Tensor, value: Tensor) -> Tensor:
    at_once = order_at_once.log_prob(noise, theta, _as_number(k), value)
    if at_once is not None:
        return at_once
    rows = _rows(theta, k)
    contradicts = (~rows.open & ((value != 0) != rows.certain)).any(-1)
    void = contradicts | ~(rows.open & (value != 0)).any(-1)
    first = torch.arange(theta.shape[-1], device=theta.device) == 0
    value = torch.where(void[..., None], first.double(), value.double().where(rows.open, 0.0))
    missing = (1 - value) * (rows.open | void[..., None])
    distance, around = _seen_from_the_peak(noise, rows, value, missing)
    # Tails of the form e^z and e^-z are taken out of the integral, where they would cost digits. At a tie the distance
    # is the nearer one: minimum and maximum would give each of the two half of the derivative.
    lower, upper = -around.high[..., None] - FAR, -around.low[..., None] + FAR
    near = torch.where(distance < lower, lower, torch.where(distance > upper, upper, distance))
    beyond = distance - near
    of_tails = (value * beyond.clamp(max=0.0) - missing * beyond.clamp(min=0.0)).sum(-1)
    if around.excess is not None:
        of_tails = of_tails - (value * (distance < 0)).sum(-1) * around.excess
    slab = max(1, MAX_ELEMENTS // max(1, value.numel()))

    def log_integrand(s: Tensor) -> Tensor:
        law = noise.law(s[..., None] + near)
        rate = (value * law.ahead).sum(-1).clamp(min=UNDERFLOW)
        return (value * law.log_cdf + missing * law.log_sf).sum(-1) + rate.log()

    s, weight = trapezoidal(*integration_range(log_integrand, around.low, around.high, slab))
    if around.excess is not None:  # a gap in which the integrand is flat
        s, weight = (torch.cat((v, w[None])) for v, w in ((s, around.high / 2), (weight, around.excess)))
    log_values = torch.cat([log_integrand(part) for part in s.split(slab)])
    peak = log_values.detach().amax(0)
    log_probability = ((log_values - peak).exp() * weight).sum(0).log() + peak + of_tails
    return torch.where(void, torch.where(contradicts, -torch.inf, 0.0), log_probability)


def _seen_from_the_peak(noise: Noise, rows: _Rows, value: Tensor, missing: Tensor) -> tuple[Tensor, _Range]:
    """Distances of the positions from a point near the peak of the integrand, and its range.

    This avoids sums of times with positions that are many scales apart, which would lose all digits. If hazards grow,
    the integrand falls as soon as all units of the set have arrived, or one of the others. Logistic noise has tails e^z
    and e^-z: the integrand rises while fewer than k units have arrived, falls when more have, and is flat in between,
    unless these k are the set. If this gap is wider than FAR, the rest of it is left out.
    """
    theta, inside, outside = rows.theta.detach(), value != 0, missing != 0
    last = theta.masked_fill(~inside, torch.inf).amin(-1)
    best = theta.masked_fill(~outside, -torch.inf).amax(-1)
    margin, largest = MARGIN + math.log(theta.shape[-1]), torch.finfo(theta.dtype).max
    if noise is not LOGISTIC:
        reference = torch.maximum(last, best)[..., None]
        away = (torch.where(inside | outside, rows.theta, reference) - reference).clamp(-largest, largest)
        return away, _Range(torch.full_like(last, -margin), torch.full_like(last, margin))
    inner, outer = _around_threshold(theta, rows.k)
    away = torch.where(inside | outside, _without_gap(rows.theta, inner, outer), 0.0).clamp(-largest, largest)
    gap = (inner - outer).clamp(max=largest).squeeze(-1)
    flat = last < inner.squeeze(-1)
    high = torch.where(flat, gap.clamp(max=FAR), 0.0) + margin
    return away, _Range(torch.full_like(high, -margin), high, torch.where(flat, (gap - FAR).clamp(min=0.0), 0.0))


def _around_threshold(theta: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """The k-th largest position and the next one, ``(*batch, 1)``."""
    ordered, last = theta.detach().sort(-1, descending=True).values, theta.shape[-1] - 1
    return ordered.gather(-1, (k - 1)[..., None]), ordered.gather(-1, k.clamp(max=last)[..., None])


def _without_gap(theta: Tensor, inner: Tensor, outer: Tensor) -> Tensor:
    """Distances from the k-th largest position, if at most FAR lies between it and the next one."""
    return torch.where(theta >= inner, theta - inner, theta - outer - (inner - outer).clamp(max=FAR))


def _without_far_gaps(theta: Tensor, k: Tensor) -> Tensor:
    """Positions with the same inclusion probabilities, none much farther than FAR from the k-th, which is at 0."""
    inner, outer = _around_threshold(theta, k)
    return _without_gap(theta, inner, outer).clamp(-2 * FAR, FAR)


def _inclusion(noise: Noise, rows: _Rows) -> tuple[Tensor, Tensor]:
    """P(i in S) and P(i not in S) of the open units, each with its own relative accuracy."""
    rows = rows._replace(theta=_without_far_gaps(rows.theta, rows.k))
    theta, k, fixed = rows.theta, rows.k, rows.theta.detach()
    slab = max(1, MAX_ELEMENTS // max(1, theta.numel()))
    tilt = solve_threshold(fixed, k)

    def log_bound(s: Tensor) -> Tensor:
        """Chernoff's bound of P(N = k), which decays where the integrand does and has a single peak."""
        law, log_odds = _law_at(noise, s, fixed)
        t = s + tilt if noise.shifts_log_odds else solve_threshold(log_odds, k)
        return (law.log_sf - F.logsigmoid(t[..., None] - log_odds)).sum(-1) + k * t

    s, weight = trapezoidal(*integration_range(log_bound, *_inclusion_range(noise, rows), slab))
    count_at = _count_of_shifts(theta, k, tilt) if noise.shifts_log_odds else None

    def integral(s: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        law, log_odds = _law_at(noise, s, theta)
        log_count, log_odds = count_law(log_odds, k) if count_at is None else count_at(s, law)
        count = (log_count.exp() * weight)[..., None]
        came, missed = law.ahead * count * torch.sigmoid(log_odds), law.behind * count * torch.sigmoid(-log_odds)
        included = law.log_cdf.exp() * (came.sum(-1, keepdim=True) + came)
        out = law.log_sf.exp() * (missed.sum(-1, keepdim=True) + missed)
        return included.sum(0), out.sum(0)

    parts = [integral(*part) for part in zip(s.split(slab), weight.split(slab), strict=True)]
    included, out = (torch.stack(terms).sum(0) for terms in zip(*parts, strict=True))
    return included, out


def _law_at(noise: Noise, s: Tensor, theta: Tensor) -> tuple[Law, Tensor]:
    """The law of the noise at ``s + theta``, and the log-odds of having arrived by time s."""
    law = noise.law(s[..., None] + theta)
    if not noise.shifts_log_odds:
        law = law._replace(log_sf=law.log_sf.clamp(min=-SURE))
    return law, law.log_cdf - law.log_sf


def _inclusion_range(noise: Noise, rows: _Rows) -> tuple[Tensor, Tensor]:
    """The range from the first arrival to a time at which more than k units have certainly arrived."""
    fixed = rows.theta.detach()
    last = rows.k[..., None].clamp(max=fixed.shape[-1] - 1)
    end = (-fixed).sort(-1).values.gather(-1, last).squeeze(-1) + noise.reach
    certain = ~rows.open & rows.open.any(-1, keepdim=True)
    low = -fixed.masked_fill(certain, -torch.inf).amax(-1) - MARGIN
    high = (-fixed.masked_fill(certain, torch.inf).amin(-1) + MARGIN).minimum(end)
    return low, high


def _count_of_shifts(theta: Tensor, k: Tensor, tilt: Tensor) -> Callable[[Tensor, Law], tuple[Tensor, Tensor]]:
    """:func:`count_law` at all times, from one at the time ``-tilt``, for noise that shifts the log-odds.

    Given N = k, the conditional Poisson design is the same at all times: that of the time at which k are expected.
    """
    z = theta - tilt[..., None]
    at_tilt, log_odds = count_law(z, k)
    expected = z.detach() > 0  # F or 1 - F, whichever is nearer to 1 and has the more accurate derivative
    surprise_at_tilt = F.logsigmoid(torch.where(expected, z, -z)).sum(-1)

    def count_at(s: Tensor, law: Law) -> tuple[Tensor, Tensor]:
        surprise = torch.where(expected, law.log_cdf, law.log_sf).sum(-1)
        return at_tilt - surprise_at_tilt + surprise + (k - expected.sum(-1)) * (s + tilt), log_odds

    return count_at


def inclusion_probabilities(noise: Noise, theta: Tensor, k: int | Tensor, depth: float = EXACT) -> Tensor:
    """P(i in S) of every unit, ``(*batch, n)``, to about 1e-12, or to e^-depth if less is required."""
    if is_fused(theta) and _runs_now(theta):
        exact = partial(_inclusion_in_torch, noise)
        return fused_inclusion(theta, number_on(theta.device, k), noise.name, depth, exact)
    return _inclusion_in_torch(noise, theta, k)


def _inclusion_in_torch(noise: Noise, theta: Tensor, k: int | Tensor) -> Tensor:
    at_once = order_inclusion_at_once.inclusion(noise, theta, _as_number(k))
    if at_once is not None:
        return at_once
    rows = _rows(theta, k)
    included, out = _inclusion(noise, rows)
    probs = torch.where(included < out, included, 1 - out)
    return torch.where(rows.open, probs, rows.certain.double())


def solve_positions(noise: Noise, probs: Tensor, k: int | Tensor, log_odds: Tensor | None = None) -> Tensor:
    """The positions with given inclusion probabilities, by :func:`solve_logits`."""
    return solve_logits(probs, k, FAMILIES[noise], log_odds)


def _log_exponential_quantile(log_odds: Tensor) -> Tensor:
    """log(-log(1 - p)) from the log-odds of p; for small p this is log p."""
    inner = log_odds.clamp(min=TINY_LOG_ODDS)
    return torch.log(-F.logsigmoid(-inner)) + (log_odds - inner)


def _family(noise: Noise, quantile: Callable[[Tensor], Tensor]) -> Family:
    """Scores are the z with F(z) = P(i in S), nearly linear in the positions; infinite for certain units."""

    def scores(theta: Tensor, k: "int | Tensor") -> Tensor:
        rows = _rows(theta, k)
        included, out = (p.masked_fill(~rows.open, 0.5) for p in _inclusion(noise, rows))
        certain = torch.where(rows.certain, torch.inf, -torch.inf)
        return torch.where(rows.open, quantile(included.log() - out.log()), certain)

    def slope(z: Tensor) -> Tensor:
        law = noise.law(z)
        return law.log_cdf.exp() * law.ahead

    return Family(scores, quantile, slope, goal=1e-12)


FAMILIES: dict[Noise, Family] = {
    LOGISTIC: _family(LOGISTIC, lambda log_odds: log_odds),
    LOG_EXPONENTIAL: _family(LOG_EXPONENTIAL, _log_exponential_quantile),
}
