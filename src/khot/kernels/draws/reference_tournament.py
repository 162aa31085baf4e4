"""Tournaments of all rows and draws at once, round by round: the definition, in plain torch."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .. import random_numbers
from ..exact.small_numbers import constant_if_tiny
from ..random_numbers.philox import Place, random_words, uniform

Luck = Callable[[int, int], Tensor]  # uniform numbers for the places from the first to before the last one


def balance(probs: Tensor, k: Tensor) -> Tensor:
    """Takes the rounding error out of inclusion probabilities: float64 values near ``probs`` whose rows sum to ``k``.

    The difference is spread in proportion to ``probs * (1 - probs)``, which leaves 0 and 1 alone. Differentiable.
    """
    probs = probs.double()
    spread = probs * (1 - probs)
    balanced = probs + spread * _share(probs, spread, k)  # probs - spread and probs + spread lie in [0, 1]
    return constant_if_tiny(balanced)


def missing_share(probs: Tensor, k: Tensor) -> Tensor:
    """How much of ``probs * (1 - probs)`` :func:`balance` adds to each unit of a row, ``(..., 1)`` in float64."""
    probs = probs.double()
    return _share(probs, probs * (1 - probs), k)


def _share(probs: Tensor, spread: Tensor, k: Tensor) -> Tensor:
    missing = k.unsqueeze(-1) - probs.sum(-1, keepdim=True)
    return (missing / spread.sum(-1, keepdim=True).clamp(min=torch.finfo(probs.dtype).tiny)).clamp(-1, 1)


def pivotal_draw(
    probs: Tensor, k: Tensor, seed: Tensor, first: Sequence[int], draws: int, dtype: torch.dtype
) -> Tensor:
    """k-hot draws ``(draws, *batch, n)`` by tournaments in random order, a function of the seed.

    Args:
        probs: Inclusion probabilities ``(*batch, n)``, which are balanced here.
        k: Number of ones, integers ``(*batch)``.
        seed: From :func:`khot.kernels.random_numbers.philox.draw_seed`.
        first: The :class:`~khot.kernels.random_numbers.philox.Place` of the first draw, row and unit among all of the
            seed.
        draws: Draws of each row.
        dtype: Of the result.
    """
    n, start = probs.shape[-1], Place(*first)
    block = 1 << (n - 1).bit_length()
    a, b, c, d = random_words(seed, draws, k.numel(), n, (start.draw, start.row, start.unit))
    order = ((a << 31) | (b >> 1)) & -block | torch.arange(n, device=seed.device)
    order = (order.sort(-1).values & (block - 1)).view(draws, *k.shape, n)
    units, u = balance(probs, k).expand(order.shape).gather(-1, order), uniform(c, d).view(order.shape)
    drawn = _play(units, lambda first, last: u[..., first:last])
    return torch.empty_like(drawn).scatter(-1, order, drawn).to(dtype)


def tournament(
    probs: Tensor, draws: int, generator: torch.Generator | None = None, share: Tensor | None = None
) -> Tensor:
    """k-hot draws ``(draws, *batch, n)`` by tournaments in random order, with torch's random numbers.

    A long row takes much memory, hence what is dropped here as soon as it has been used.

    Args:
        probs: Inclusion probabilities ``(*batch, n)``.
        draws: Draws of each row.
        generator: Source of randomness, torch's default one if None.
        share: The :func:`missing_share` of probabilities that are not balanced yet, which takes the least memory here.

    Returns:
        Boolean tensor with exactly k ones in each row; never a unit of probability 0, always those of probability 1.
    """
    shape, n, device = (draws, *probs.shape), probs.shape[-1], probs.device
    rest = None

    def luck(first: int, last: int) -> Tensor:
        nonlocal rest
        if last > n // 2:
            return random_numbers.uniform((*shape[:-1], last - first), torch.float64, device, generator)
        if rest is None:
            rest = random_numbers.uniform((*shape[:-1], last), torch.float64, device, generator)
        return rest[..., first:last]

    order = random_numbers.shuffled(shape, device, generator)
    units = [_lined_up(probs.expand(shape), order, share)]
    order = order.to(torch.int32 if n < 2**31 else torch.int64)
    drawn = _play(units.pop(), luck)  # which alone holds on to them, and drops them after the first round
    return torch.empty_like(drawn).scatter(-1, order.long(), drawn)


def _lined_up(probs: Tensor, order: Tensor, share: Tensor | None) -> Tensor:
    probs = probs.gather(-1, order).double()
    return probs if share is None else torch.addcmul(probs, probs * (1 - probs), share)


def _play(probs: Tensor, luck: Luck) -> Tensor:
    """The fates of the units, which stand at their places; a duel takes the random number of its second place."""
    duels = []
    while (count := probs.shape[-1]) > 1:
        half = 1 << ((count - 1).bit_length() - 1)
        left, bye, right = probs.split([count - half, 2 * half - count, count - half], dim=-1)
        chosen, right_goes_on, winner = _duel(left, right, luck(half, count))
        duels.append((chosen, right_goes_on))
        probs = torch.cat([winner, bye], dim=-1)
    fate = probs > 0.5  # of the last unit standing: its probability is 0 or 1 up to the rounding of the whole sum
    for chosen, right_goes_on in reversed(duels):
        node, bye = fate.tensor_split([chosen.shape[-1]], dim=-1)
        left_fate = torch.where(right_goes_on, chosen, node)
        right_fate = torch.where(right_goes_on, node, chosen)
        fate = torch.cat([left_fate, bye, right_fate], dim=-1)
    return fate


def _duel(left: Tensor, right: Tensor, luck: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The fate of the unit that is decided, whether the other one is that on the right, and what that goes on with."""
    excess = torch.maximum(left, right).sub_(1).add_(torch.minimum(left, right))  # a + b - 1, rounded once
    chosen = excess >= 0
    first = torch.where(chosen, 1 - left, right)
    total = torch.where(chosen, 1 - right, left).add_(first)
    # The unit on the right is chosen with its part of the total, or goes on with it: where a + b is 1 up to rounding
    # either comes to the same.
    right_goes_on = (luck * total < first) ^ chosen
    return chosen, right_goes_on, torch.where(chosen, excess, total)
