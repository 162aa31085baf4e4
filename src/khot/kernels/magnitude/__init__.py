r"""The sparse maps by absolute value, the signed mask and the magnitudes: threshold, map and first derivative.

A map is :math:`y_i = \mathrm{sign}(x_i)\, Y(a_i, t, \lambda)` of :math:`a = |x|`, with one threshold
:math:`t = A + c\sigma` per row, an anchor A, an offset c and a scale :math:`\sigma`. With q = 1 / (p - 1) and
:math:`z = (a - t)/\sigma`,

* the signed mask has :math:`\sigma = \lambda` and :math:`Y = \mathrm{clip}(z, 0, 1)^q`. The threshold does not follow
  below 0;
* the magnitudes have :math:`\sigma = \lambda t^{p-1}` and three kinds of entries. Capped, :math:`z \ge 1`:
  :math:`Y + \lambda Y^{p-1} = a`, whatever t is. Pooled, z between 0 and 1: :math:`Y = ((a - t)/\lambda)^q = t z^q`.
  Zero, :math:`z \le 0`.

An entry between 0 and its cap follows the threshold. With the slopes :math:`f_i = q z_i^{q-1}` of those in z, 0 for the
others, and :math:`v_i = da_i/\sigma - z_i\,d\lambda/\lambda`,

.. math:: \tau = \frac{\langle f, v\rangle - dk}{W}, \qquad
    d|y_i| = g f_i (v_i - \tau) + h_i\,(da_i - e_i\,d\lambda), \qquad dc = \kappa\tau - c\,d\lambda/\lambda,

where 1 / W is taken as 0 where the threshold is idle. The signed mask has a gain g of 1, the weight
:math:`W = \sum f_i` and no h. The magnitudes have g = t; as the scale grows with t,
:math:`W = \sum f_i + (\sigma/t) \sum z_i^q` over the pooled entries and :math:`\kappa = 1 - c\,(p-1)\,\sigma/t`; and of
capped entries, with :math:`u = |y|^{p-1}`, the slope :math:`h = u^{q-1} / (u^{q-1} + \lambda/q)` and the lever e = u.
"""

import torch
from torch import Tensor

from ..registry import Backends, Operator
from . import reference

__all__ = ["odd_map", "odd_map_derivative", "shard_loops", "threshold"]


def _like_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    anchor = x.new_empty(x.shape[:-1], dtype=torch.float64)
    return anchor, torch.empty_like(anchor)


def _like_x_and_rows(x: Tensor, *_: object) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(x, memory_format=torch.contiguous_format), *_like_rows(x)


threshold = Operator("odd_threshold", reference.threshold, fake=lambda x, *_: _like_rows(x))
threshold.backend("numba", module=".numba_backend")
threshold.backend("torch", module=".torch_backend")

odd_map = Operator("odd_map", reference.odd_map, fake=_like_x_and_rows)
odd_map.backend("numba", module=".numba_backend")
odd_map.backend("torch", module=".torch_backend")

odd_map_derivative = Operator("odd_map_derivative", reference.odd_map_derivative, fake=_like_x_and_rows)
odd_map_derivative.backend("numba", module=".numba_backend")
odd_map_derivative.backend("torch", module=".torch_backend")

# What a process does with its parts of rows between two reductions, by whether the map is that of magnitudes.
shard_loops = {True: Backends(__name__, "MAGNITUDES"), False: Backends(__name__, "SIGNED")}
