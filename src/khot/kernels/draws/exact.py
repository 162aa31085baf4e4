"""The definition of tournaments: all rows and draws at once, round by round, in plain torch."""

from collections.abc import Callable

import torch
from torch import Tensor

from .. import random_numbers
from ..exact.small_numbers import constant_if_tiny
from ..operators.autograd import by_formula
from ..random_numbers.philox import random_words, uniform

Luck = Callable[[int, int], Tensor]  # uniform numbers for the places from the first up to the last, exclusive


def balance(probs: Tensor, k: Tensor) -> Tensor:
    """Removes the rounding error of inclusion probabilities: float64 values near ``probs`` whose rows sum to ``k``.

    The difference is spread in proportion to ``probs * (1 - probs)``, which leaves 0 and 1 unchanged. Differentiable.
    """
    return by_formula(lambda p, k: constant_if_tiny(_balanced(p, k)[0]), _balanced, _balance_slope, probs.double(), k)


def missing_share(probs: Tensor, k: Tensor) -> Tensor:
    """The multiple of ``probs * (1 - probs)`` that :func:`balance` adds to a row, ``(..., 1)`` in float64."""
    return _balanced(probs.double(), k)[-1].clamp(-1, 1)


def _balanced(probs: Tensor, k: Tensor) -> tuple[Tensor, ...]:
    spread = probs * (1 - probs)  # probs - spread and probs + spread lie in [0, 1]
    total = spread.sum(-1, keepdim=True).clamp(min=torch.finfo(probs.dtype).tiny)
    share = (k.unsqueeze(-1) - probs.sum(-1, keepdim=True)) / total
    balanced = torch.addcmul(probs, spread, share.clamp(-1, 1))
    return balanced, balanced, total, share


def _balance_slope(g: Tensor, probs: Tensor, _: Tensor, balanced: Tensor, total: Tensor, unlimited: Tensor) -> Tensor:
    share = unlimited.clamp(-1, 1)
    g = g.masked_fill(balanced < torch.finfo(probs.dtype).tiny, 0.0)
    of_share = ((g * probs).unsqueeze(-2) @ (1 - probs).unsqueeze(-1)).squeeze(-1) / total
    g = g - of_share.masked_fill(share != unlimited, 0.0)
    return (torch.addcmul(1 + share, probs, share, value=-2) * g).sum_to_size(probs.shape)


def pivotal_draw(probs: Tensor, k: Tensor, seed: Tensor, draws: int, dtype: torch.dtype) -> Tensor:
    """k-hot draws ``(draws, *batch, n)`` by tournaments in random order, a function of the seed.

    Args:
        probs: Inclusion probabilities ``(*batch, n)``, which are balanced here.
        k: Number of ones, integers ``(*batch)``.
        seed: From :func:`khot.kernels.random_numbers.philox.draw_seed`.
        draws: Number of draws for each row.
        dtype: Dtype of the result.
    """
    n = probs.shape[-1]
    block = 1 << (n - 1).bit_length()
    a, b, c, d = random_words(seed, draws, k.numel(), n)
    order = ((a << 31) | (b >> 1)) & -block | torch.arange(n, device=seed.device)
    order = (order.sort(-1).values & (block - 1)).view(draws, *k.shape, n)
    units, u = balance(probs, k).expand(order.shape).gather(-1, order), uniform(c, d).view(order.shape)
    drawn = _play(units, lambda first, last: u[..., first:last])
    return torch.empty_like(drawn).scatter(-1, order, drawn).to(dtype)


def tournament(
    probs: Tensor, draws: int, generator: torch.Generator | None = None, share: Tensor | None = None
) -> Tensor:
    """k-hot draws ``(draws, *batch, n)`` by tournaments in random order, with torch's random numbers.

    A long row takes much memory, so tensors are dropped here as soon as they have been used.

    Args:
        probs: Inclusion probabilities ``(*batch, n)``.
        draws: Number of draws for each row.
        generator: Source of randomness; by default torch's own.
        share: The :func:`missing_share` of probabilities that are not balanced yet; balancing here takes least memory.

    Returns:
        Boolean tensor with exactly k ones in each row; units of probability 0 never are, those of probability 1 always.
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
    drawn = _play(units.pop(), luck)  # passes on the only reference, so the tensor is freed after the first round
    return torch.empty_like(drawn).scatter(-1, order.long(), drawn)


def _lined_up(probs: Tensor, order: Tensor, share: Tensor | None) -> Tensor:
    probs = probs.gather(-1, order).double()
    return probs if share is None else torch.addcmul(probs, probs * (1 - probs), share)


def _play(probs: Tensor, luck: Luck) -> Tensor:
    """The fates of the units at their places; a duel uses the random number of its second place."""
    duels = []
    while (count := probs.shape[-1]) > 1:
        half = 1 << ((count - 1).bit_length() - 1)
        left, bye, right = probs.split([count - half, 2 * half - count, count - half], dim=-1)
        chosen, right_goes_on, winner = _duel(left, right, luck(half, count))
        duels.append((chosen, right_goes_on))
        probs = torch.cat([winner, bye], dim=-1)
    fate = probs > 0.5  # the fate of the last unit, whose probability is 0 or 1 up to the rounding of the whole sum
    for chosen, right_goes_on in reversed(duels):
        node, bye = fate.tensor_split([chosen.shape[-1]], dim=-1)
        left_fate = torch.where(right_goes_on, chosen, node)
        right_fate = torch.where(right_goes_on, node, chosen)
        fate = torch.cat([left_fate, bye, right_fate], dim=-1)
    return fate


def _duel(left: Tensor, right: Tensor, luck: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The fate of the decided unit, whether the other one is on the right, and the probability that it goes on with."""
    excess = torch.maximum(left, right).sub_(1).add_(torch.minimum(left, right))  # a + b - 1, rounded once
    chosen = excess >= 0
    first = torch.where(chosen, 1 - left, right)
    total = torch.where(chosen, 1 - right, left).add_(first)
    # The unit on the right is chosen, or goes on, with a probability equal to its share of the total. If a + b is 1 up
    # to rounding, both have the same effect.
    right_goes_on = (luck * total < first) ^ chosen
    return chosen, right_goes_on, torch.where(chosen, excess, total)
