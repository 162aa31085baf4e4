"""Draws of order sampling: independent ranks of all units, and the k smallest of them.

The rank of unit i is e^noise e^-(theta_i - t) with t such that the k-th rank is near 1; :mod:`khot.kernels.noises` has
the laws of the noise. In kernels noise, ranks and selection are one, made of a seed that torch's generator gives: on a
CPU of float64 numbers; on an accelerator, where the seed stays, ranks in float32 do, their noise being accurate in both
tails. In plain torch on a CPU the ranks are float64 numbers from torch's generator, and the second factor, which all
draws of a design share, is kept.
"""

from ..registry import DrawOperator
from . import reference
from .reference import draw_ranks, rank_centre, rank_scale, smallest

__all__ = ["draw_ranks", "order_draw", "rank_centre", "rank_scale", "smallest"]

order_draw = DrawOperator("order_draw", reference.order_draw)
order_draw.backend("triton", module=".triton_backend", takes=DrawOperator.fills_device)
order_draw.backend("numba", module=".numba_backend", takes=lambda theta, draws: draws > 0)
