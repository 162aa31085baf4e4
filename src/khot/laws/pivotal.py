r"""The pivotal method: duels between units that preserve inclusion probabilities, in a random or a given order.

In the given order unit i duels the carrier, the one earlier unit that is still undecided. With V the cumulative sum of
the probabilities, the carrier's probability before duel i is r_{i-1}, the fractional part of V_{i-1}, whichever unit it
is. A duel in which V crosses an integer chooses one of the two; any other duel excludes one:

    no crossing   i takes the seat with weight pi_i,     the carrier keeps it with weight r_{i-1};     total r_i
    crossing      i takes the seat with weight 1 - pi_i, the carrier keeps it with weight 1 - r_{i-1}; total 1 - r_i

This gives the closed forms below. Up to duel i as many units are chosen as there were crossings, so the carrier's own x
after the duel is s_i = (x_1 + ... + x_i) - crossings_i, and x determines the path of s. Summed over all possible
carriers, the probability of x is a product over the duels: P(i takes the seat) where s changes, P(the carrier keeps it)
where s stays at 1 without or at 0 with a crossing, 1 elsewhere. As P(s_i = 1) = r_i, s is a Markov chain with two
states; its transitions give the entropy and the probabilities of pairs.

Probabilities are ``(..., n)``, k is an integer tensor of the batch shape; results are float64. Arguments are not
checked here. Functions that are called with the same probabilities, k and ``kept`` share the duels.

References:
    [1] Deville, Tillé (1998), "Unequal probability sampling without replacement through a splitting method",
        Biometrika 85(1).
    [2] Chauvet (2012), "On a characterization of ordered pivotal sampling", Bernoulli 18(4).
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from khot.kernels.draws import balance, kinds, missing_share, ordered_duels_draw, tournament
from khot.kernels.draws import draw_in_order as play_in_order
from khot.kernels.exact.small_numbers import TINY
from khot.kernels.random_numbers import uniform
from khot.kernels.random_numbers.philox import FIRST, draw_seed

from .kept import Kept, kept_if_constant

KEPT_UNITS = 2**17  # beyond this, balanced probabilities and a copy to detect changes take too much memory


class Duels(NamedTuple):
    """The duels in the given order; tensors of the shape of ``probs``, bool, or float64 unless stated otherwise."""

    certain: Tensor  # bool: units of probability 1; chosen without a duel, they have probability 0 below
    crossing: Tensor  # bool: the duel chooses one of the two, rather than excluding one
    chosen: Tensor  # long: number of crossings up to this one
    before: Tensor  # the carrier's probability before the duel
    after: Tensor  # the carrier's probability after the duel
    take: Tensor  # weight with which the unit takes the seat
    keep: Tensor  # weight with which the carrier keeps it


def duels_in_order(probs: Tensor, k: Tensor) -> Duels:
    """The duels of units with these inclusion probabilities, which are balanced here."""
    probs, n = balance(probs, k), probs.shape[-1]
    certain = probs >= 1
    probs = torch.where(certain, 0, probs)
    k = (k - certain.sum(-1)).unsqueeze(-1)
    # Where the exact partial sum is an integer, so is the level: units beyond it have probability 0, not 1e-16. The
    # last unit of positive probability takes the level to k.
    level = probs.cumsum(-1)
    integer = level.round()
    hit = ((level - integer).abs() <= torch.finfo(level.dtype).eps * n) & (integer > 0)
    level = level + torch.where(hit, integer - level, 0).detach()
    level = torch.where(level >= level[..., -1:], k, level)
    # There are k crossings, at most one per duel, even if rounding suggests otherwise.
    position = torch.arange(1, n + 1, device=probs.device)
    chosen = position + (level.detach().floor().long() - position).clamp(max=0).cummin(-1).values
    chosen = torch.maximum(torch.minimum(chosen, k), k - n + position)

    crossing = chosen > pad(chosen[..., :-1], (1, 0))
    after = (level - chosen).clamp(0, 1)
    before = pad(after[..., :-1], (1, 0))
    take = torch.where(crossing, (1 - probs) * (before > 0), probs)  # if the seat is empty, the unit is chosen
    keep = torch.where(crossing, 1 - before, before)
    return Duels(certain, crossing, chosen, before, after, take, keep)


def draw_in_order(
    probs: Tensor, k: Tensor, draws: int, generator: torch.Generator | None = None, kept: Kept | None = None
) -> Tensor:
    """Draws ``(draws, ..., n)`` in the given order."""
    duels = kept_if_constant(kept, duels_in_order, probs, k)
    total, empty = duels.take + duels.keep, ~duels.crossing & (duels.before == 0)  # an empty seat is taken
    kind = kinds(duels.crossing, empty, duels.certain)
    kernel = ordered_duels_draw.kernel(total, draws)
    if kernel is not None:
        seed = draw_seed(total.device, generator)
        return kernel(duels.take, total, kind, seed, FIRST, draws, probs.dtype)
    u = uniform((draws, *total.shape), total.dtype, total.device, generator)
    return play_in_order(duels.take, total, kind, u)


def draw_in_random_order(
    probs: Tensor, k: Tensor, draws: int, generator: torch.Generator | None = None, kept: Kept | None = None
) -> Tensor:
    """Draws ``(draws, ..., n)``, each in its own order."""
    if probs.numel() <= KEPT_UNITS:
        return tournament(kept_if_constant(kept, balance, probs, k), draws, generator)
    return tournament(probs, draws, generator, missing_share(probs, k))


def log_prob_in_order(probs: Tensor, k: Tensor, value: Tensor, kept: Kept | None = None) -> Tensor:
    """Log-probability of k-hot values in the given order; ``-inf``, without gradient, for impossible ones."""
    duels = kept_if_constant(kept, duels_in_order, probs, k)
    seat = (value.double() - duels.certain.double()).cumsum(-1) - duels.chosen  # s
    changes = seat != pad(seat[..., :-1], (1, 0))
    decides = changes | (seat == (~duels.crossing).double())
    weight = torch.where(changes, duels.take, duels.keep)
    possible = ((seat == 0) | (seat == 1)).all(-1) & (seat[..., -1] == 0) & ((weight > 0) | ~decides).all(-1)
    log_ratio = torch.where(decides, _safe_log(weight) - _safe_log(duels.take + duels.keep), 0)
    return log_ratio.sum(-1).masked_fill(~possible, -torch.inf)


def entropy_in_order(probs: Tensor, k: Tensor, kept: Kept | None = None) -> Tensor:
    """Entropy in nats in the given order."""
    duels = kept_if_constant(kept, duels_in_order, probs, k)
    total, take, keep = (w * _safe_log(w) for w in (duels.take + duels.keep, duels.take, duels.keep))
    return (total - take - keep).sum(-1)


def pairs_in_order(probs: Tensor, k: Tensor, kept: Kept | None = None) -> Tensor:
    """E[x_i x_j], ``(..., n, n)``, with the probabilities on the diagonal."""
    duels, probs, n = kept_if_constant(kept, duels_in_order, probs, k), probs.double(), probs.shape[-1]
    # Cov(x_i, x_j) = -Cov(s_i, x_i) * (product of the chain's second eigenvalues over i < m < j) * (1 - that of j).
    # The eigenvalue of duel m is (1 - r_m) / (1 - r_{m-1}); with a crossing, r replaces 1 - r.
    before = torch.where(duels.crossing, duels.before, 1 - duels.before)
    after = torch.where(duels.crossing, duels.after, 1 - duels.after)
    divisor = torch.where(before < TINY, 1, before)
    stays, taken = (weight.minimum(divisor) / divisor for weight in (after, duels.take))  # at most 1 despite rounding
    later = torch.ones(n, n, dtype=torch.bool, device=probs.device).triu(1)
    eigenvalues = torch.where(later, stays.unsqueeze(-2), 1)
    carried = pad(eigenvalues.cumprod(-1)[..., :-1], (1, 0), value=1.0)
    covariance = -(after * duels.take).unsqueeze(-1) * carried * taken.unsqueeze(-2)
    pairs = (probs.unsqueeze(-1) * probs.unsqueeze(-2) + covariance).clamp(min=0) * later
    return pairs + pairs.mT + torch.diag_embed(probs)


def _safe_log(weight: Tensor) -> Tensor:
    """The logarithm; 0 with zero derivative where the weight is 0."""
    return torch.where(weight > 0, weight, 1).log()
