r"""Isotonic optimisation, min over v_1 >= ... >= v_n of sum h_i(v_i), and the blocks in which its solution is constant.

.. math:: h_i'(v) = w_i\,\varphi'(v) - \mathrm{sign}(s_i - v)\,|(s_i - v)/\lambda|^{q-1}, \qquad
    1/p + 1/q = 1, \quad \varphi(v) = v \text{ or } \tfrac12 v^2

Pooling by halves. A row whose halves are solved needs at most one more block, across the middle: all items below its
value gamma on the left and above it on the right, where gamma is the root of the increasing function

.. math:: G(\gamma) = \sum_{\text{left},\ v_i < \gamma} h_i'(\gamma) + \sum_{\text{right},\ v_i > \gamma} h_i'(\gamma) .

So log2(n) levels of independent scalar roots solve all rows at once, without the data-dependent loop over the elements
of the usual stack algorithm (PAV), and find the same blocks. Pairs of halves that are already in order cost one
comparison. For p = 2 on a CPU, the stack algorithm as compiled code is faster, row by row; numba uses it.

Dual ascent. With a multiplier for each constraint v_i >= v_{i+1}, all odd ones can be optimised at once, then all even
ones. For p = 2 these are the iterates of Dykstra's projections onto the odd and the even constraints. A multiplier of
exactly zero separates two blocks. Every few sweeps the blocks are solved and accepted if they satisfy the optimality
conditions, which makes the result exact after finitely many sweeps.

Layout: s, w (rows, n), strength (rows, 1), all in float64 and contiguous.

References:
    [1] Blondel, Teboul, Berthet, Djolonga (2020), "Fast Differentiable Sorting and Ranking", arXiv:2002.08871.
    [2] Sander et al. (2023), "Fast, Differentiable and Sparse Top-k: a Convex Analysis Perspective", arXiv:2302.01425.
    [3] Tibshirani (2017), "Dykstra's Algorithm, ADMM, and Coordinate Descent", arXiv:1705.04768.
"""

from typing import Any

import torch
from torch import Tensor

from ..operators.autograd import move_batch_first
from ..registry import Operator, only_if
from . import exact


def _fake(s: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return s.new_empty(s.shape, dtype=torch.float64), s.new_empty(s.shape, dtype=torch.long)


def _batch(info: Any, in_dims: Any, s: Tensor, w: Tensor, strength: Tensor, *options: Any) -> tuple[Any, Any]:
    s, w, strength = move_batch_first(info.batch_size, in_dims, (s, w, strength))
    return isotonic(s, w, strength, *options[:-1], ""), (0, 0)


def _asks(s: Tensor, w: Tensor, strength: Tensor, p: float, magnitude: bool, dual: bool, *_: Any) -> tuple[Any, ...]:
    return s, p == 2 and not dual


isotonic = Operator("isotonic", exact.isotonic, fake=_fake, asks=_asks, batch=_batch)
isotonic.backend(
    "numba", module=".numba_backend", takes=only_if(lambda s, pools: pools, "it only pools, and only for p = 2")
)
