"""Draws of the pivotal method in the given order, see :mod:`khot.distributions.pivotal`, from weights of its duels.

Unit by unit: it takes the seat from the carrier with probability take / total, or at once where the seat is empty. In a
duel that crosses an integer the one of the two that does not sit there afterwards is chosen.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..philox import uniform_rows
from ..registry import draw_operator, triton_runs

CROSSING, EMPTY, CERTAIN = 1, 2, 4  # bits of a duel's kind


def kinds(crossing: Tensor, empty: Tensor, certain: Tensor) -> Tensor:
    """Whether a duel chooses one of the two, whether the seat is empty, whether the unit is chosen without a duel."""
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


@draw_operator("ordered_duels_draw")
def ordered_duels_draw(
    take: Tensor, total: Tensor, kind: Tensor, seed: Tensor, draws: int, dtype: torch.dtype
) -> Tensor:
    """k-hot draws ``(draws, *batch, n)``, a function of the seed.

    Args:
        take: Weights ``(*batch, n)`` with which the units take the seat, float64.
        total: These and the weights with which the carriers keep it.
        kind: From :func:`kinds`.
        seed: From :func:`khot.kernels.philox.draw_seed`.
        draws: Draws of each row.
        dtype: Of the result.
    """
    if draws and triton_runs(take):
        from .triton_backend import launch_ordered_duels

        return launch_ordered_duels(take, total, kind, seed, draws, dtype)
    shape = (draws, *take.shape)
    return draw_in_order(take, total, kind, uniform_rows(seed, shape)).to(dtype)
