r"""Conditional Poisson designs with sharded rows, of which each process holds some units.

For independent units of log-odds z, of which k are expected to be ones, each process only needs to know the law of the
number N of ones. It follows from the characteristic function, see :mod:`khot.kernels.count.characteristic`, whose
logarithm is a sum over the units. Let the rarer fate of each unit, of probability :math:`r_i \le 1/2`, be one or (above
0) zero. Then

.. math:: \log \varphi(u) = \sum_i \log\big(1 - r_i + r_i e^{\pm iu}\big), \qquad
    T(u) = e^{-iu(k - \text{number above})} \varphi(u), \qquad P(N = k) = \frac{1}{2\pi} \int T\,du,

.. math:: P(\text{rarer fate of } i \mid N = k) = \frac{\int T R_i\,du}{\int T\,du}, \qquad
    R_i = \frac{r_i e^{\pm iu}}{1 - r_i + r_i e^{\pm iu}}.

At most 31 complex numbers per row are exchanged, whatever n and k are. No digits are lost unless N has almost no
spread, which :func:`has_spread` tests. The log-odds are the logits minus the t with
:math:`\sum_i \sigma(\theta_i - t) = k`, a root found from sums like the threshold of a mask.

All functions take logits ``(*batch, m)`` of the local units, of which there may be none, k, an integer tensor of the
batch shape, the :func:`open_centre` of the units, and the processes that have the other units. All processes run the
same collectives, whatever they hold. Results are float64 and differentiable to any order.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from khot._distributed.differentiable import seen_by_parts, sum_of_parts
from khot._distributed.shards import Shards
from khot.kernels.count.characteristic import Complex, Nodes, nodes_of_count
from khot.kernels.threshold import solve_threshold

LEAST_SPREAD = 0.1  # variance of the number of ones above which no digits are lost
NEVER = -2000.0  # finite log-odds of an impossible event
SLAB = 2**14  # log-odds that are evaluated at all nodes at a time, some 25 MB


class Units(NamedTuple):
    """The local units, and which units of their row are certain."""

    theta: Tensor  # (*batch, m)
    k: Tensor  # (*batch,), number of ones among the open units, 0 if there are none
    open: Tensor  # (*batch, m), the units whose fate is open
    certain: Tensor  # (*batch, m), the value of the others
    has_choice: Tensor  # (*batch,), whether the row has open units


def units_of(theta: Tensor, k: Tensor, shards: Shards) -> Units:
    """From logits, or the positions of order sampling, of which infinite ones are certain: one collective."""
    included, finite = theta == torch.inf, theta.isfinite()
    selected, count = shards.sum(included.sum(-1), finite.sum(-1))
    left = k - selected
    has_choice = (left > 0) & (left < count)
    certain = included | (finite & (left > 0)[..., None])
    is_open = finite & has_choice[..., None]
    return Units(theta, torch.where(has_choice, left, 0).long(), is_open, certain, has_choice)


def centre(theta: Tensor, k: Tensor, shards: Shards) -> Tensor:
    """The t with ``sum(sigmoid(theta - t)) = k``, float64 ``(*batch)``; 0 if there is none."""
    return solve_threshold(theta, k, shards=shards).nan_to_num(0.0, 0.0, 0.0)


def open_centre(theta: Tensor, k: Tensor, shards: Shards) -> Tensor:
    """The centre of the open units, 0 in rows without any; all laws here are expanded around it."""
    units = units_of(theta.detach(), k, shards)
    return centre(units.theta.masked_fill(~units.open, -torch.inf), units.k, shards)


def largest_of_parts(shards: Shards, *values: Tensor) -> list[Tensor]:
    """The largest entries along the last axis, over all parts; ``-inf`` if there are none."""
    return shards.max(*(F.pad(value, (0, 1), value=-torch.inf).amax(-1) for value in values))


class Count(NamedTuple):
    """The law of units of log-odds z given that their number of ones N is k."""

    log_chance: Tensor  # (*batch,), log-probability of N = k
    came: Tensor  # (*batch, m), probability of a one
    missing: Tensor  # probability of a zero


def has_spread(theta: Tensor, k: Tensor, t: Tensor, shards: Shards) -> bool:
    """Whether N has so much spread in all rows that sums give its law; the same on all processes."""
    units = units_of(theta.detach(), k, shards)
    z = units.theta.double() - t[..., None]
    (variance,) = shards.sum((torch.sigmoid(z) * torch.sigmoid(-z) * units.open).sum(-1))
    return bool((~units.has_choice | (variance >= LEAST_SPREAD)).all())


class _Fates(NamedTuple):
    """Some units at all nodes, ``(..., m, 1)``."""

    rarer: Tensor  # the probability of the rarer fate
    other: Tensor
    sign: Tensor  # -1 if that fate is a zero

    @classmethod
    def of(cls, z: Tensor) -> "_Fates":
        sign = torch.where(z.detach() > 0, -1.0, 1.0)
        return cls(*(v[..., None] for v in (torch.sigmoid(sign * z), torch.sigmoid(-sign * z), sign)))

    def log_phi(self, nodes: Nodes) -> tuple[Tensor, Tensor]:
        """The logarithm of the characteristic function of these units: real part and angle, ``(..., nodes)``."""
        log_size = torch.log1p(-2 * self.rarer * self.other * (1 - nodes.cos)) / 2
        angle = torch.atan2(self.sign * self.rarer * nodes.sin, self.other + self.rarer * nodes.cos)
        return log_size.sum(-2), angle.sum(-2)

    def given(self, nodes: Nodes, law: Complex) -> Tensor:
        """The probability of the rarer fate given N = k, ``(..., m)``."""
        real, imag = (part[..., None, :] for part in law)
        scale = self.rarer / (1 - 2 * self.rarer * self.other * (1 - nodes.cos))
        turned = real * (self.other * nodes.cos + self.rarer) - imag * self.sign * self.other * nodes.sin
        return (scale * turned).sum(-1)


def _called(function: Callable[[Tensor], Any], x: Tensor) -> Any:
    return function(x)


def _made_again(function: Callable[[Tensor], Any], x: Tensor) -> Any:
    """The function of x; its derivative calls the function again instead of keeping intermediate values."""
    from torch.utils.checkpoint import checkpoint  # imports SymPy in torch 2.6

    return checkpoint(function, x, use_reentrant=False, preserve_rng_state=False)


def count_given(z: Tensor, k: Tensor, shards: Shards) -> Count:
    """For finite log-odds z ``(..., *batch, m)`` with which about k ones are expected."""
    k, above = k.expand(z.shape[:-1]), z.detach() > 0
    chance = (torch.sigmoid(z) * torch.sigmoid(-z)).detach()
    variance, number_above = shards.sum(chance.sum(-1), above.sum(-1))
    nodes = nodes_of_count(variance, k, shards.n, k - number_above)
    slabs = z.split(max(1, SLAB // max(1, number_above.numel())), -1)
    local = _made_again if len(slabs) > 1 else _called  # may differ between processes: no collectives inside
    found = zip(*(local(lambda some: _Fates.of(some).log_phi(nodes), some) for some in slabs), strict=True)
    log_size, angle = sum_of_parts(shards, *(torch.stack(parts).sum(0) for parts in found))
    size = log_size.exp()
    turned = Complex(size * angle.cos(), size * angle.sin()).times(nodes.weight)
    total = turned.real.sum(-1)
    law = Complex(*seen_by_parts(shards, *(v / total[..., None] for v in turned)))
    fate = torch.cat([local(lambda some: _Fates.of(some).given(nodes, law), some) for some in slabs], -1)
    came, missing = torch.where(above, 1 - fate, fate), torch.where(above, fate, 1 - fate)
    return Count(total.log(), came, missing)


class _Design(NamedTuple):
    """The quantities from which the laws of a row are computed."""

    units: Units
    z: Tensor  # (*batch, m), finite log-odds with which k of the open units are expected to be ones
    of_count: Count

    @classmethod
    def of(cls, logits: Tensor, k: Tensor, t: Tensor, shards: Shards) -> "_Design":
        units = units_of(logits, k, shards)
        z = (units.theta.double() - t[..., None]).masked_fill(~units.open, NEVER).clamp(NEVER, -NEVER)
        return cls(units, z, count_given(z, units.k, shards))

    def probs(self) -> Tensor:
        return torch.where(self.units.open, self.of_count.came, self.units.certain.double())

    def log_prob(self, value: Tensor, shards: Shards) -> Tensor:
        is_open = self.units.open
        (wrong,) = shards.sum((~is_open & (value != self.units.certain)).sum(-1))
        terms = value * F.logsigmoid(self.z) + (1 - value) * F.logsigmoid(-self.z)
        (total,) = sum_of_parts(shards, terms.masked_fill(~is_open, 0.0).sum(-1))
        return (total - self.of_count.log_chance).masked_fill(wrong > 0, -torch.inf)


def inclusion_probabilities(logits: Tensor, k: Tensor, t: Tensor, shards: Shards) -> Tensor:
    """P(x_i = 1) of the local units."""
    return _Design.of(logits, k, t, shards).probs()


def log_prob(logits: Tensor, k: Tensor, value: Tensor, t: Tensor, shards: Shards) -> Tensor:
    """Log-probability of k-hot values ``(*sample, *batch, m)``, between which it is linear.

    It is ``-inf`` if a value contradicts an infinite logit.
    """
    return _Design.of(logits, k, t, shards).log_prob(value.double(), shards)


def entropy(logits: Tensor, k: Tensor, t: Tensor, shards: Shards) -> Tensor:
    """``(*batch,)``."""
    design = _Design.of(logits, k, t, shards)
    return -design.log_prob(design.probs(), shards)
