"""The definition of the pivotal method in the given order: unit by unit, all draws at once."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..random_numbers.philox import uniform_rows

CROSSING, EMPTY, CERTAIN = 1, 2, 4  # bits of a duel's kind


def kinds(crossing: Tensor, empty: Tensor, certain: Tensor) -> Tensor:
    """Bits: whether a duel chooses one of the two, the seat is empty, and a unit is chosen without a duel."""
    return crossing.byte() * CROSSING | empty.byte() * EMPTY | certain.byte() * CERTAIN


def draw_in_order(take: Tensor, total: Tensor, kind: Tensor, u: Tensor) -> Tensor:
    """Boolean draws ``(*sample, *batch, n)`` from uniform numbers u of that shape."""
    n = u.shape[-1]
    takes = (u * total < take) | ((kind & EMPTY) > 0)
    unit = torch.arange(n, device=u.device)
    carrier = pad(torch.where(takes, unit, -1).cummax(-1).values[..., :-1], (1, 0), value=-1)
    chosen = torch.where(takes, carrier, unit)
    drawn = pad((kind & CERTAIN) > 0, (0, 1)).expand(*u.shape[:-1], n + 1)  # other duels write to a spare column
    return drawn.scatter(-1, torch.where((kind & CROSSING) > 0, chosen, n), True)[..., :n]


def ordered_duels_draw(
    take: Tensor,
    total: Tensor,
    kind: Tensor,
    seed: Tensor,
    first: Sequence[int],
    draws: int,
    dtype: torch.dtype,
) -> Tensor:
    """k-hot draws ``(draws, *batch, n)``, a function of the seed.

    Args:
        take: Weights ``(*batch, n)`` with which the units take the seat, float64.
        total: These and the weights with which the carriers keep it.
        kind: From :func:`kinds`.
        seed: From :func:`khot.kernels.random_numbers.philox.draw_seed`.
        first: The :class:`~khot.kernels.random_numbers.philox.Place` of the first draw, row and unit among all of the
            seed.
        draws: Number of draws for each row.
        dtype: Dtype of the result.
    """
    *batch, n = take.shape
    return draw_in_order(take, total, kind, uniform_rows(seed, draws, batch, n, first)).to(dtype)
