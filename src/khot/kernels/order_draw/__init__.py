"""Draws of order sampling: independent ranks of all units, and the k smallest of them.

The rank of unit i is e^noise e^-(theta_i - t) with t such that the k-th rank is near 1; :mod:`khot.kernels.noises` has
the laws of the noise. In kernels noise, ranks and selection are one, made of a seed that torch's generator gives: on a
CPU of float64 numbers; on an accelerator, where the seed stays, ranks in float32 do, their noise being accurate in both
tails. In plain torch on a CPU the ranks are float64 numbers from torch's generator, and the second factor, which all
draws of a design share, is kept.
"""

from collections.abc import Sequence
from typing import cast

from torch import Tensor
from torch.nn.functional import pad

from ..philox import Place
from ..registry import Backends, DrawOperator
from . import reference
from .reference import draw_ranks, rank_centre, rank_scale

__all__ = ["draw_ranks", "order_draw", "rank_centre", "rank_scale", "ranks_of_parts"]

order_draw = DrawOperator("order_draw", reference.order_draw)
order_draw.backend("triton", module=".triton_backend", takes=DrawOperator.fills_device)
order_draw.backend("numba", module=".numba_backend", takes=DrawOperator.has_draws)

# The ranks alone, for a process that has some of the units of a row and selects among all.
order_ranks = Backends(__name__, "order_ranks")
order_ranks.backend("numba", module=".numba_backend", takes=DrawOperator.has_draws)


def ranks_of_parts(theta: Tensor, centre: Tensor, seed: Tensor, first: Sequence[int], draws: int, noise: str) -> Tensor:
    """Ranks ``(draws, *batch, m)`` in float64 of units that may begin anywhere in their rows, as ``first`` says."""
    before = Place(*first).unit % 2  # two units share a place of the counter
    place = Place(*first)._replace(unit=Place(*first).unit - before)
    if before:
        theta = pad(theta, (before, 0))
    ranks = (order_ranks.find(theta, draws) or reference.order_ranks)(theta, centre, seed, place, draws, noise)
    return cast(Tensor, ranks[..., before:])
