r"""The pivotal method: duels between units that keep every inclusion probability, in random or in given order.

In the given order unit i duels the carrier, the one unit before it that is still undecided. With V the cumulative sum
of the probabilities, the carrier's probability before duel i is r_{i-1}, the fractional part of V_{i-1}, whoever it is.
A duel that takes V across an integer chooses one of the two, any other excludes one:

    no crossing   i takes the seat with weight pi_i,     the carrier keeps it with weight r_{i-1};     total r_i
    crossing      i takes the seat with weight 1 - pi_i, the carrier keeps it with weight 1 - r_{i-1}; total 1 - r_i

Hence the closed forms below. Up to duel i as many units are chosen as there were crossings, so the carrier's own x
after it is s_i = (x_1 + ... + x_i) - crossings_i, and x determines the path of s. Summed over who sits there, the
probability of x is a product over the duels: P(i takes the seat) where s changes, P(the carrier keeps it) where s stays
at 1 without or at 0 with a crossing, 1 elsewhere. As P(s_i = 1) = r_i, s is a Markov chain with two states; its
transitions give the entropy and the probabilities of pairs.
"""

import math
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.types import _size as SizeLike

from khot._validation import check_generator
from khot.kernels.ordered_duels import draw_in_order, kinds, ordered_duels_draw
from khot.kernels.philox import FIRST, draw_seed
from khot.kernels.random_numbers import uniform
from khot.kernels.small_numbers import TINY
from khot.kernels.tournament import balance, pivotal_draw, tournament
from khot.relaxations import sigmoid_topk

from ._arguments import checked_order
from .design import Relaxation, SamplingDesign


class Pivotal(SamplingDesign):
    r"""Draws k-hot vectors with exactly the given inclusion probabilities by the pivotal method.

    ``order="random"`` shuffles each draw and plays a tournament: O(n) work after the shuffle, in O(log n) steps, but
    the probability of a vector is unknown. ``order="fixed"`` duels in the given order: neighbours exclude each other,
    so that draws spread over the order, and ``log_prob``, ``entropy`` (both O(n)) and ``pairwise_inclusion`` are exact.
    Many vectors then have probability 0; their gradient is 0. On CUDA and ROCm tensors a draw is one kernel, in random
    order for up to 4096 units. On a CPU a draw takes at most 14 times the memory of float32 parameters, many rows some
    at a time; one long row in the given order 25 times, and its ``log_prob`` 36 times: both hold about a dozen float64
    numbers for each duel.

    ``mean`` is ``probs``. Everything computed is differentiable in ``probs``, along changes that keep the sum, and in
    ``logits``; in the given order with kinks where a partial sum of ``probs`` is an integer.

    Args:
        probs: Inclusion probabilities ``(..., n)`` in [0, 1], each row with an integer sum.
        logits: Real scores ``(..., n)``.
        k: Number of ones, an int or an integer tensor that broadcasts with the batch shape. Required with ``logits``.
        order: ``"random"`` or ``"fixed"``.
        relaxation: Map ``relaxation(logits, k, temperature)`` to the inclusion probabilities.
        temperature: Softness of the relaxation.
        validate_args: Whether to check the contents of tensors.

    Raises:
        TypeError: If an argument has the wrong type or dtype.
        ValueError: If both or neither of ``probs`` and ``logits`` are given, or shapes or values are out of range.

    References:
        [1] Deville, Tillé (1998), "Unequal probability sampling without replacement through a splitting method",
            Biometrika 85(1).
        [2] Chauvet (2012), "On a characterization of ordered pivotal sampling", Bernoulli 18(4).

    Example:
        >>> design = Pivotal(probs=torch.tensor([0.5, 0.5, 0.5, 0.5]), order="fixed")
        >>> design.log_prob(torch.tensor([0.0, 1.0, 1.0, 0.0])).exp()
        tensor(0.2500)
    """

    _settings = ("order",)
    _complete_with = "order='fixed'"

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
        self.order = checked_order(order)
        super().__init__(probs, logits, k, relaxation=relaxation, temperature=temperature, validate_args=validate_args)

    @property
    def pairwise_inclusion(self) -> Tensor:
        """Matrix ``(..., n, n)`` of E[x_i x_j], with ``mean`` on the diagonal."""
        self._require_fixed_order("pairwise_inclusion")
        duels, probs, n = _play_in_order(self.k, self.probs), self.probs.double(), self.event_shape[0]
        # Cov(x_i, x_j) = -Cov(s_i, x_i) * (product of the chain's second eigenvalues over i < m < j) * (1 - that of j).
        # The eigenvalue of duel m is (1 - r_m) / (1 - r_{m-1}); with a crossing r stands in the place of 1 - r.
        before = torch.where(duels.crossing, duels.before, 1 - duels.before)
        after = torch.where(duels.crossing, duels.after, 1 - duels.after)
        divisor = torch.where(before < TINY, 1, before)
        kept, taken = (weight.minimum(divisor) / divisor for weight in (after, duels.take))  # no more, by rounding
        later = torch.ones(n, n, dtype=torch.bool, device=probs.device).triu(1)
        eigenvalues = torch.where(later, kept.unsqueeze(-2), 1)
        carried = pad(eigenvalues.cumprod(-1)[..., :-1], (1, 0), value=1.0)
        covariance = -(after * duels.take).unsqueeze(-1) * carried * taken.unsqueeze(-2)
        pairs = (probs.unsqueeze(-1) * probs.unsqueeze(-2) + covariance).clamp(min=0) * later
        return (pairs + pairs.mT + torch.diag_embed(probs)).to(self.probs.dtype)

    def sample(self, sample_shape: SizeLike = torch.Size(), *, generator: torch.Generator | None = None) -> Tensor:
        check_generator(generator, self.parameter.device)
        shape, draws = self._extended_shape(sample_shape), math.prod(sample_shape)
        with torch.no_grad():
            probs = self.probs.detach()
            if self.order == "fixed":
                return self._draw_by_rows(partial(_draw_in_order, generator=generator), sample_shape, probs)
            kernel = pivotal_draw.kernel(probs, draws)
            if kernel is not None:
                seed = draw_seed(probs.device, generator)
                return kernel(probs, self.k, seed, FIRST, draws, self.parameter.dtype).view(shape)
            return self._draw_by_rows(partial(_draw_in_random_order, generator=generator), sample_shape, probs)

    def _log_prob(self, value: Tensor) -> Tensor:
        self._require_fixed_order("log_prob")
        return self._by_rows(_log_prob_in_order, self.probs, value).to(self.probs.dtype)

    def entropy(self) -> Tensor:
        self._require_fixed_order("entropy")
        return self._by_rows(_entropy_in_order, self.probs).to(self.probs.dtype)

    def _require_fixed_order(self, wanted: str) -> None:
        if self.order != "fixed":
            raise self._unavailable(wanted)


class _Duels(NamedTuple):
    """The duels in given order; tensors of the shape of ``probs``, bool, or float64 where not said otherwise."""

    certain: Tensor  # bool: units of probability 1; chosen without a duel, below they stand with probability 0
    crossing: Tensor  # bool: the duel chooses one of the two, rather than excluding one
    chosen: Tensor  # long: number of crossings up to this one
    before: Tensor  # the carrier's probability before the duel
    after: Tensor  # and after it
    take: Tensor  # weight with which the unit takes the seat
    keep: Tensor  # and with which the carrier keeps it


def _play_in_order(k: Tensor, probs: Tensor) -> _Duels:
    probs, n = balance(probs, k), probs.shape[-1]
    certain = probs >= 1
    probs = torch.where(certain, 0, probs)
    k = (k - certain.sum(-1)).unsqueeze(-1)
    # Where the exact partial sum is an integer, so is the level: what lies across has probability 0, not 1e-16. The
    # last unit of positive probability takes it to k.
    level = probs.cumsum(-1)
    integer = level.round()
    hit = ((level - integer).abs() <= torch.finfo(level.dtype).eps * n) & (integer > 0)
    level = level + torch.where(hit, integer - level, 0).detach()
    level = torch.where(level >= level[..., -1:], k, level)
    # k crossings, at most one per duel, also where rounding would have it otherwise.
    position = torch.arange(1, n + 1, device=probs.device)
    chosen = position + (level.detach().floor().long() - position).clamp(max=0).cummin(-1).values
    chosen = torch.maximum(torch.minimum(chosen, k), k - n + position)

    crossing = chosen > pad(chosen[..., :-1], (1, 0))
    after = (level - chosen).clamp(0, 1)
    before = pad(after[..., :-1], (1, 0))
    take = torch.where(crossing, (1 - probs) * (before > 0), probs)  # with nobody in the seat, the unit is chosen
    keep = torch.where(crossing, 1 - before, before)
    return _Duels(certain, crossing, chosen, before, after, take, keep)


def _draw_in_order(k: Tensor, probs: Tensor, draws: int, generator: torch.Generator | None) -> Tensor:
    duels = _play_in_order(k, probs)
    total, empty = duels.take + duels.keep, ~duels.crossing & (duels.before == 0)  # an empty seat is taken
    kind = kinds(duels.crossing, empty, duels.certain)
    kernel = ordered_duels_draw.kernel(total, draws)
    if kernel is not None:
        seed = draw_seed(total.device, generator)
        return kernel(duels.take, total, kind, seed, FIRST, draws, probs.dtype)
    u = uniform((draws, *total.shape), total.dtype, total.device, generator)
    return draw_in_order(duels.take, total, kind, u)


def _draw_in_random_order(k: Tensor, probs: Tensor, draws: int, generator: torch.Generator | None) -> Tensor:
    return tournament(balance(probs, k).expand(draws, *probs.shape), generator)


def _log_prob_in_order(k: Tensor, probs: Tensor, value: Tensor) -> Tensor:
    duels = _play_in_order(k, probs)
    seat = (value.double() - duels.certain.double()).cumsum(-1) - duels.chosen  # s
    changes = seat != pad(seat[..., :-1], (1, 0))
    decides = changes | (seat == (~duels.crossing).double())
    weight = torch.where(changes, duels.take, duels.keep)
    possible = ((seat == 0) | (seat == 1)).all(-1) & (seat[..., -1] == 0) & ((weight > 0) | ~decides).all(-1)
    log_ratio = torch.where(decides, _safe_log(weight) - _safe_log(duels.take + duels.keep), 0)
    return log_ratio.sum(-1).masked_fill(~possible, -torch.inf)


def _entropy_in_order(k: Tensor, probs: Tensor) -> Tensor:
    duels = _play_in_order(k, probs)
    total, take, keep = (w * _safe_log(w) for w in (duels.take + duels.keep, duels.take, duels.keep))
    return (total - take - keep).sum(-1)


def _safe_log(weight: Tensor) -> Tensor:
    """The logarithm; 0 with a zero derivative where the weight is 0."""
    return torch.where(weight > 0, weight, 1).log()
