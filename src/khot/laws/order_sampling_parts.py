r"""The integrals of :mod:`khot.laws.order_sampling` for sharded rows, of which each process holds some units.

An integrand at a time s consists of sums over the units, so each process evaluates its own units, and one collective
adds up the results at all nodes of a rule. The range of an integral is found from such sums too, by a few collectives
of ten numbers per row. No process needs the positions of the others, nor their order: the units are seen from the t
with :math:`\sum_i \sigma(\vartheta_i - t) = k`, a root found from sums.

The units that have arrived by a time, given that there are k of them, are a conditional Poisson design;
:mod:`.conditional_poisson_parts` computes its results from sums.

All functions take the positions ``(*batch, m)`` of the local units, of which there may be none, k, an integer tensor of
the batch shape, and the processes that have the other units. All processes run the same collectives, whatever they
hold. Results are float64 and differentiable to any order.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from khot._distributed.differentiable import seen_by_parts, sum_of_parts
from khot._distributed.shards import Shards
from khot.kernels.order_sampling.noises import SURE, Law, Noise

from .conditional_poisson_parts import Count, Units, centre, count_given, largest_of_parts, units_of
from .order_sampling import FAR, MARGIN, MAX_ELEMENTS, UNDERFLOW
from .quadrature import integration_range, trapezoidal

AT_ONCE = 2**30  # nodes, so that no rule is split here: the work is split below, in the same way on all processes


def _sums_at(
    terms: Callable[[Tensor], tuple[Tensor, Tensor]], units: int, shards: Shards
) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    """Two sums over all units at times ``(nodes, ...)``, differentiable, from one collective.

    Args:
        terms: Computes the sums over the local units.
        units: How many numbers there are per time on this process; nodes are processed in slabs accordingly.
        shards: The processes that have the others.
    """
    slab = max(1, MAX_ELEMENTS // max(1, units))

    def sums(s: Tensor) -> tuple[Tensor, Tensor]:
        first, second = zip(*(terms(part) for part in s.split(slab)), strict=True)
        of_all = sum_of_parts(shards, torch.cat(first), torch.cat(second))
        return of_all[0], of_all[1]

    return sums


class _View(NamedTuple):
    """Positions seen from a point near the peak of the integrand, see :func:`_seen_from_the_peak`."""

    distance: Tensor  # (*sample, *batch, m)
    low: Tensor  # (*sample, *batch)
    high: Tensor
    gap: Tensor  # length of the part that is left out, where the integrand is flat


def log_prob(noise: Noise, theta: Tensor, k: Tensor, value: Tensor, t: Tensor | None, shards: Shards) -> Tensor:
    """Log-probability of k-hot values ``(*sample, *batch, m)``; ``-inf`` if one contradicts an infinite position.

    Logistic noise needs t, the :func:`~.conditional_poisson_parts.open_centre` of the positions.
    Differentiable in the positions and the values.
    """
    theta, value = theta.double(), value.double()
    units = units_of(theta, k, shards)
    (wrong,) = shards.sum((~units.open & ((value != 0) != units.certain)).sum(-1))
    contradicts = wrong > 0
    void = contradicts | ~units.has_choice
    missing = (1 - value) * (units.open & ~void[..., None])
    value = value * (units.open & ~void[..., None])
    view = _seen_from_the_peak(units, value, missing, t, shards)
    near = view.distance.maximum(-view.high[..., None] - FAR).minimum(-view.low[..., None] + FAR)
    beyond = view.distance - near  # tails of the form e^z and e^-z, which are taken out of the integral
    tails = value * beyond.clamp(max=0.0) - missing * beyond.clamp(min=0.0)
    late = value * (view.distance < 0)
    (of_tails,) = sum_of_parts(shards, (tails - late * view.gap[..., None]).sum(-1))

    def terms(s: Tensor) -> tuple[Tensor, Tensor]:
        law = noise.law(s[..., None] + near)
        return (value * law.log_cdf + missing * law.log_sf).sum(-1), (value * law.ahead).sum(-1)

    sums = _sums_at(terms, value.numel(), shards)

    def log_integrand(s: Tensor) -> Tensor:
        log_chance, rate = sums(s)
        return log_chance + rate.clamp(min=UNDERFLOW).log()

    low, high = integration_range(log_integrand, view.low, view.high, AT_ONCE)
    s, weight = trapezoidal(low, high)
    s, weight = torch.cat((s, view.high[None] / 2)), torch.cat((weight, view.gap[None]))  # and the flat part
    log_values = log_integrand(s)
    peak = log_values.detach().amax(0)
    log_probability = ((log_values - peak).exp() * weight).sum(0).log() + peak + of_tails
    return torch.where(void, torch.where(contradicts, -torch.inf, 0.0), log_probability)


def _seen_from_the_peak(units: Units, value: Tensor, missing: Tensor, t: Tensor | None, shards: Shards) -> _View:
    """As in :mod:`khot.laws.order_sampling`, with the k-th largest position and the next one from sums and maxima.

    If these two are far apart, the centre t lies between them; otherwise both are near t, from which all is seen.
    """
    theta, inside, outside = units.theta.detach(), value != 0, missing != 0
    last, best = largest_of_parts(
        shards, (-theta).masked_fill(~inside, -torch.inf), theta.masked_fill(~outside, -torch.inf)
    )
    last, margin = -last, MARGIN + 4 * math.log(shards.n)
    largest = torch.finfo(torch.float64).max
    if t is None:
        reference = torch.maximum(last, best).nan_to_num(0.0, 0.0, 0.0)[..., None]
        away = torch.where(inside | outside, units.theta - reference, 0.0).clamp(-largest, largest)
        low = torch.full_like(last, -margin)
        return _View(away, low, -low, torch.zeros_like(low))
    above = units.open & (theta > t[..., None])
    inner, outer = largest_of_parts(
        shards, (-theta).masked_fill(~above, -torch.inf), theta.masked_fill(~units.open | above, -torch.inf)
    )
    (count,) = shards.sum(above.sum(-1))
    is_between = units.has_choice & (count == units.k)
    inner, outer = torch.where(is_between, -inner, t), torch.where(is_between, outer, t)
    gap = (inner - outer).clamp(max=largest)
    from_inner, from_outer = units.theta - inner[..., None], units.theta - outer[..., None]
    near = torch.where(theta >= inner[..., None], from_inner, from_outer - gap[..., None].clamp(max=FAR))
    away = torch.where(inside | outside, near, 0.0).clamp(-largest, largest)
    flat = last < inner  # a set other than that of the k largest
    high = torch.where(flat, gap.clamp(max=FAR), 0.0) + margin
    excess = torch.where(flat, (gap - FAR).clamp(min=0.0), 0.0)
    return _View(away, torch.full_like(high, -margin), high, excess)


def inclusion_probabilities(noise: Noise, theta: Tensor, k: Tensor, t: Tensor, shards: Shards) -> Tensor:
    """P(i in S) of the local units ``(*batch, m)``, seen from their centre t.

    Valid if :func:`~.conditional_poisson_parts.has_spread` holds.
    """
    units = units_of(theta.double(), k, shards)
    distance = units.theta - t[..., None]
    x = distance.masked_fill(~units.open, -2 * FAR).clamp(-2 * FAR, FAR)
    fixed = x.detach()
    first, last = largest_of_parts(
        shards, fixed.masked_fill(~units.open, -torch.inf), (-fixed).masked_fill(~units.open, -torch.inf)
    )
    # At `end` all but k of the units have certainly arrived: the next one is less than log 20 n behind.
    end = math.log(20 * shards.n) + noise.reach
    low = torch.where(units.has_choice, -first - MARGIN, -MARGIN)
    high = torch.where(units.has_choice, (last + MARGIN).clamp(max=end), MARGIN)
    low, high = integration_range(_log_bound(noise, fixed, units.k, shards), low, high, AT_ONCE)
    s, weight = trapezoidal(low, high)
    slab = max(1, 4 * MAX_ELEMENTS // max(1, max(shards.lengths) * units.k.numel()))  # nodes, equal on all processes
    count = count_given(x, units.k, shards) if noise.shifts_log_odds else None
    parts = [
        _integral(noise, x, units.k, count, *part, shards)
        for part in zip(s.split(slab), weight.split(slab), strict=True)
    ]
    included, out = (torch.stack(terms).sum(0) for terms in zip(*parts, strict=True))
    probs = torch.where(included < out, included, 1 - out)
    return torch.where(units.open, probs, units.certain.double())


def _law_at(noise: Noise, s: Tensor, x: Tensor) -> Law:
    law = noise.law(s[..., None] + x)
    return law if noise.shifts_log_odds else law._replace(log_sf=law.log_sf.clamp(min=-SURE))


def _shift_at(noise: Noise, s: Tensor, law: Law, k: Tensor, shards: Shards) -> Tensor:
    """The t to subtract from the log-odds at times s, so that k units are expected to have arrived."""
    if noise.shifts_log_odds:
        return s
    return centre((law.log_cdf - law.log_sf).detach(), k, shards)


def _log_bound(noise: Noise, x: Tensor, k: Tensor, shards: Shards) -> Callable[[Tensor], Tensor]:
    """Chernoff's bound of P(N = k), which decays where the integrand does and has a single peak."""

    def log_bound(s: Tensor) -> Tensor:
        law = _law_at(noise, s, x)
        shift = _shift_at(noise, s, law, k, shards)
        terms = law.log_sf - F.logsigmoid(shift[..., None] - (law.log_cdf - law.log_sf))
        (total,) = shards.sum(terms.sum(-1))
        return total + k * shift

    return log_bound


def _integral(
    noise: Noise, x: Tensor, k: Tensor, count: Count | None, s: Tensor, weight: Tensor, shards: Shards
) -> tuple[Tensor, Tensor]:
    """The contribution of some nodes to P(i in S) and to P(i not in S)."""
    law = _law_at(noise, s, x)
    shift = _shift_at(noise, s, law, k, shards)
    z = x if noise.shifts_log_odds else law.log_cdf - law.log_sf - shift[..., None]
    given = count_given(z, k, shards) if count is None else count
    expected = z.detach() > 0  # F or 1 - F, whichever is nearer to 1 and has the more accurate derivative
    surprise = torch.where(expected, law.log_cdf - F.logsigmoid(z), law.log_sf - F.logsigmoid(-z))
    sums = sum_of_parts(
        shards,
        surprise.sum(-1),
        expected.expand(surprise.shape).double().sum(-1),
        (law.ahead * given.came).sum(-1),
        (law.behind * given.missing).sum(-1),
    )
    log_chance, surprise, above, ahead, behind = (
        v[..., None] for v in seen_by_parts(shards, given.log_chance.expand(s.shape), *sums)
    )
    log_chance = log_chance + surprise + (k[..., None] - above) * shift[..., None]
    chance = log_chance.exp() * weight[..., None]
    included = law.log_cdf.exp() * chance * (ahead + law.ahead * given.came)
    out = law.log_sf.exp() * chance * (behind + law.behind * given.missing)
    return included.sum(0), out.sum(0)
