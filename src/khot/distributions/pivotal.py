r"""The pivotal method: duels between units that keep every inclusion probability, in random or in given order.

In the given order unit i duels the carrier, the one unit before it that is still undecided. With V the cumulative sum
of the probabilities, the carrier's probability before duel i is the fractional part of V_{i-1}: it does not depend on
who the carrier is. A duel that takes V across an integer chooses one of the two, the others exclude one:

    no crossing   i takes the seat with weight pi_i,     the carrier keeps it with weight r_{i-1};     total r_i
    crossing      i takes the seat with weight 1 - pi_i, the carrier keeps it with weight 1 - r_{i-1}; total 1 - r_i

Hence the closed forms below. The number of units chosen up to duel i is known, so the carrier's own x after duel i is
s_i = (x_1 + ... + x_i) - (number of crossings), and x determines the path s. Summing over who sits there, the probability of
x is the product over duels of: P(i takes the seat) if s changes, P(carrier keeps it) if s stays at 1 without or at 0
    with a
crossing, else 1. As P(s_i = 1) = r_i, s is a Markov chain with two states, which yields the entropy and all pair probabilities.
"""

from typing import NamedTuple

import torch
from torch import Size, Tensor
from torch.nn.functional import pad

from khot.distributions.design import Relaxation, SamplingDesign
from khot.kernels.tournament import balance, tournament
from khot.relaxations import sigmoid_topk

__all__ = ["Pivotal"]


class Pivotal(SamplingDesign):
    r"""Draws k-hot vectors with exactly the given inclusion probabilities by the pivotal method.

    ``order="random"`` shuffles each draw and plays a tournament: O(n) work after the shuffle and O(log n) steps, but
    the probability of a vector is unknown. ``order="fixed"`` duels in the given order: neighbours exclude each other,
    so that draws spread over the order, and ``log_prob``, ``entropy`` and ``pairwise_inclusion`` are exact, the first
    two in O(n); many vectors have probability 0.

    ``mean`` is ``probs``. Whatever is computed is differentiable in ``probs`` and ``logits``, where changes of
    ``probs`` keep the row sum; the gradient at a vector of probability 0 is 0.

    Args:
        order: ``"random"`` or ``"fixed"``. All others as in :class:`SamplingDesign`.

    References:
        [1] Deville, Tillé (1998), "Unequal probability sampling without replacement through a splitting method",
            Biometrika 85.
        [2] Chauvet (2012), "On a characterization of ordered pivotal sampling", Bernoulli 18.

    Example:
        >>> design = Pivotal(probs=torch.tensor([0.5, 0.5, 0.5, 0.5]), order="fixed")
        >>> design.log_prob(torch.tensor([0.0, 1.0, 1.0, 0.0])).exp()
        tensor(0.2500)
    """

    def __init__(
        self,
        probs: Tensor | None = None,
        logits: Tensor | None = None,
        k: int | Tensor | None = None,
        *,
        order: str = "random",
        relaxation: Relaxation = sigmoid_topk,
        temperature: float | Tensor = 1.0,
        validate_args: bool | None = None,
    ) -> None:
        if order not in ("random", "fixed"):
            raise ValueError(f"`order` must be 'random' or 'fixed', but got {order!r}")
        self.order = order
        super().__init__(probs, logits, k, relaxation=relaxation, temperature=temperature, validate_args=validate_args)

    @property
    def pairwise_inclusion(self) -> Tensor:
        if self.order != "fixed":
            raise self._unavailable("pairwise_inclusion")
        probs, duels = self.probs.double(), _play_in_order(self.probs, self.k)
        # Of a duel that does not cross: Cov(s_i, x_i) and the share of Cov(s_{i-1}, .) that goes over to x_i and to
        # s_i. With a crossing, r and 1 - r change places.
        before = torch.where(duels.crossing, duels.before, 1 - duels.before)
        after = torch.where(duels.crossing, duels.after, 1 - duels.after)
        scale = torch.where(before > 0, before, 1)
        onto_carrier, onto_unit, passed_on = after * duels.take, duels.take / scale, after / scale
        n = probs.shape[-1]
        later = torch.ones(n, n, dtype=torch.bool, device=probs.device).triu(1)
        carried = pad(torch.where(later, passed_on.unsqueeze(-2), 1).cumprod(-1)[..., :-1], (1, 0), value=1.0)
        covariance = -onto_carrier.unsqueeze(-1) * onto_unit.unsqueeze(-2) * carried
        pairs = (probs.unsqueeze(-1) * probs.unsqueeze(-2) + covariance).clamp(min=0) * later
        return (pairs + pairs.mT + torch.diag_embed(probs)).to(self.probs.dtype)

    def sample(self, sample_shape: Size = torch.Size()) -> Tensor:
        shape = self._extended_shape(sample_shape)
        with torch.no_grad():
            if self.order == "fixed":
                drawn = _draw_in_order(_play_in_order(self.probs, self.k), shape)
            else:
                drawn = tournament(balance(self.probs, self.k).expand(shape))
            return drawn.to(self._param.dtype)

    def log_prob(self, value: Tensor) -> Tensor:
        if self.order != "fixed":
            raise self._unavailable("log_prob")
        if self._validate_args:
            self._validate_sample(value)
        duels = _play_in_order(self.probs, self.k)
        seat = (value.double() - duels.certain.double()).cumsum(-1) - duels.chosen
        change = seat != pad(seat[..., :-1], (1, 0))
        weight = torch.where(change, duels.take, duels.keep)
        counts = change | (seat == (~duels.crossing).to(seat))
        possible = ((seat == 0) | (seat == 1)).all(-1) & (seat[..., -1] == 0) & ((weight > 0) | ~counts).all(-1)
        log_ratio = torch.where(counts, _safe_log(weight) - _safe_log(duels.take + duels.keep), 0)
        return log_ratio.sum(-1).masked_fill(~possible, -torch.inf).to(self.probs.dtype)

    def entropy(self) -> Tensor:
        if self.order != "fixed":
            raise self._unavailable("entropy")
        duels = _play_in_order(self.probs, self.k)
        terms = [w * _safe_log(w) for w in (duels.take + duels.keep, duels.take, duels.keep)]
        return (terms[0] - terms[1] - terms[2]).sum(-1).to(self.probs.dtype)


class _Duels(NamedTuple):
    """The duels in given order, all float64 or bool and of the shape of ``probs``.

    Attributes:
        certain: Units of probability 1; they are chosen and take no part (their entries below are those of
            probability 0).
        crossing: Whether the duel chooses one of the two, rather than excluding one.
        chosen: Number of units chosen by this and the earlier duels.
        before: The carrier's probability before the duel, ``after`` after it.
        take: Weight with which the unit takes the seat, ``keep`` with which the carrier keeps it.
    """

    certain: Tensor
    crossing: Tensor
    chosen: Tensor
    before: Tensor
    after: Tensor
    take: Tensor
    keep: Tensor


def _play_in_order(probs: Tensor, k: Tensor) -> _Duels:
    probs, n = balance(probs, k), probs.shape[-1]
    certain = probs >= 1
    probs = torch.where(certain, 0, probs)
    k = (k - certain.sum(-1)).unsqueeze(-1)
    level = probs.cumsum(-1)
    # Where the exact sum hits an integer, hit it, so that what lies across has probability 0, not 1e-16; the end hits
    # k.
    integer = level.round()
    rounding = torch.finfo(level.dtype).eps * n
    level = level + torch.where(((level - integer).abs() <= rounding) & (integer > 0), integer - level, 0).detach()
    level = torch.where(level >= level[..., -1:], k, level)
    # Exactly k crossings, at most one per duel, also where rounding had it otherwise.
    position = torch.arange(1, n + 1, device=probs.device)
    chosen = position + (level.detach().floor() - position).clamp(max=0).cummin(-1).values
    chosen = torch.maximum(torch.minimum(chosen, k), k - n + position)

    crossing = chosen > pad(chosen[..., :-1], (1, 0))
    after = (level - chosen).clamp(0, 1)
    before = pad(after[..., :-1], (1, 0))
    take = torch.where(
        crossing, (1 - probs) * (before > 0), probs
    )  # with nobody in the seat, a crossing chooses the unit
    keep = torch.where(crossing, 1 - before, before)
    return _Duels(certain, crossing, chosen, before, after, take, keep)


def _draw_in_order(duels: _Duels, shape: Size) -> Tensor:
    total = duels.take + duels.keep
    # The first unit finds the seat empty and takes it, as does any unit where the carrier's probability is 0.
    takes = torch.rand(shape, dtype=total.dtype, device=total.device) * total < duels.take
    takes |= ~duels.crossing & (duels.before == 0)
    n = shape[-1]
    unit = torch.arange(n, device=total.device)
    carrier = pad(torch.where(takes, unit, -1).cummax(-1).values[..., :-1], (1, 0), value=-1)
    chosen = torch.where(takes, carrier, unit)  # of a duel that crosses; all others write to a spare column
    drawn = duels.certain.expand(shape)
    drawn = torch.cat([drawn, torch.zeros_like(drawn[..., :1])], dim=-1)
    return drawn.scatter_(-1, torch.where(duels.crossing, chosen, n), True)[..., :n]


def _safe_log(weight: Tensor) -> Tensor:
    """log, and 0 with a zero derivative where the weight is 0."""
    return torch.where(weight > 0, weight, 1).log()
