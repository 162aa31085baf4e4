"""Tournaments of all rows and draws at once, round by round: the definition, in plain torch."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from .. import random_numbers
from ..philox import Place, random_words, uniform
from ..small_numbers import constant_if_tiny

SMALLEST_BLOCK = 32  # units, with those that fill a row up to a power of two


def balance(probs: Tensor, k: Tensor) -> Tensor:
    """Takes the rounding error out of inclusion probabilities: float64 values near ``probs`` whose rows sum to ``k``.

    The difference is spread in proportion to ``probs * (1 - probs)``, which leaves 0 and 1 alone. Differentiable.
    """
    probs = probs.double()
    spread = probs * (1 - probs)
    missing = k.unsqueeze(-1) - probs.sum(-1, keepdim=True)
    share = missing / spread.sum(-1, keepdim=True).clamp(min=torch.finfo(probs.dtype).tiny)
    balanced = probs + spread * share.clamp(-1, 1)  # probs - spread and probs + spread lie in [0, 1]
    return constant_if_tiny(balanced)


def pivotal_draw(
    probs: Tensor, k: Tensor, seed: Tensor, first: Sequence[int], draws: int, dtype: torch.dtype
) -> Tensor:
    """k-hot draws ``(draws, *batch, n)`` by tournaments in random order, a function of the seed.

    Args:
        probs: Inclusion probabilities ``(*batch, n)``, which are balanced here.
        k: Number of ones, integers ``(*batch)``.
        seed: From :func:`khot.kernels.philox.draw_seed`.
        first: The :class:`khot.kernels.philox.Place` of the first draw, row and unit among all of the seed.
        draws: Draws of each row.
        dtype: Of the result.
    """
    n, start = probs.shape[-1], Place(*first)
    block = max(SMALLEST_BLOCK, 1 << (n - 1).bit_length())
    a, b, c, d = random_words(seed, draws, k.numel(), block, (start.draw, start.row, start.unit))
    order = ((a << 31) | (b >> 1)) & -block | torch.arange(block, device=seed.device)
    order = order.sort(-1).values & (block - 1)
    units = pad(balance(probs, k), (0, block - n)).expand(draws, *k.shape, block)
    return _play(units, order.view(units.shape), uniform(c, d).view(units.shape))[..., :n].to(dtype)


def tournament(probs: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Draws one k-hot vector for each row of ``probs`` by a tournament in random order.

    Args:
        probs: Inclusion probabilities ``(..., n)`` in [0, 1], float64; each row sums to an integer up to rounding.
        generator: Source of randomness, torch's default one if None.

    Returns:
        Boolean tensor like ``probs``, with exactly ``round(probs.sum(-1))`` ones in each row; never a unit of
        probability 0, always those of probability 1.
    """
    shape, dtype, device = probs.shape, probs.dtype, probs.device
    order = random_numbers.shuffled(shape, device, generator)
    probs = probs.gather(-1, order)  # in the place of the others: a long row is much memory
    drawn = _play_in_places(probs, random_numbers.uniform(shape, dtype, device, generator))
    return torch.empty_like(drawn).scatter(-1, order, drawn)


def _play(probs: Tensor, order: Tensor, u: Tensor) -> Tensor:
    """The fates of the units, which take places in this order; each duel uses up one of the random numbers."""
    drawn = _play_in_places(probs.gather(-1, order), u)
    return torch.empty_like(drawn).scatter(-1, order, drawn)


def _play_in_places(probs: Tensor, u: Tensor) -> Tensor:
    duels = []
    while (half := probs.shape[-1] // 2) > 0:
        left, right, bye = probs.split([half, half, probs.shape[-1] - 2 * half], dim=-1)
        excess = torch.maximum(left, right).sub_(1).add_(torch.minimum(left, right))  # a + b - 1, rounded once
        chosen = excess >= 0  # the fate of the unit that is decided here
        first = torch.where(chosen, 1 - left, right)
        total = torch.where(chosen, 1 - right, left).add_(first)
        u, luck = u.split([u.shape[-1] - half, half], dim=-1)
        # The unit on the right is chosen with its part of u, or goes on with it: where a + b is 1 up to rounding either
        # comes to the same.
        right_goes_on = (luck * total < first) ^ chosen
        duels.append((chosen, right_goes_on))
        probs = torch.cat([torch.where(chosen, excess, total), bye], dim=-1)
    fate = probs > 0.5  # of the last unit standing: its probability is 0 or 1 up to the rounding of the whole sum
    for chosen, right_goes_on in reversed(duels):
        node, bye = fate.tensor_split([chosen.shape[-1]], dim=-1)
        left_fate = torch.where(right_goes_on, chosen, node)
        right_fate = torch.where(right_goes_on, node, chosen)
        fate = torch.cat([left_fate, right_fate, bye], dim=-1)
    return fate
