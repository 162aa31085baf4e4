"""Relaxed top-k maps: deterministic, differentiable stand-ins for "the k largest of n". Needs torch only.

These rules hold for all of them, unless a docstring says otherwise:

* ``x`` is a floating-point tensor. Its ``n`` entries along ``dim`` are the ground set, and its other axes are the
  batch. Masks also accept a tuple of axes, whose entries together form one ground set. Larger scores give values nearer
  to 1. An excluded entry of a mask is 0 and gets no gradient.
* Maps of sorted entries treat ``-inf`` as the limit of ever smaller scores. In ascending order, the m excluded entries
  of a row all have rank ``(m + 1) / 2``, sorted rows begin with m times ``-inf``, and the other entries follow as if
  they were a row of their own; the permutation matrix is block diagonal, and its block of excluded entries is
  ``1 / m`` everywhere. Descending order mirrors this. In sorted transport, excluded entries are 0 in every column.
  Excluded entries get no gradient.
* ``k`` and the softness are numbers, or tensors that broadcast with the batch shape, and have a gradient. The softness
  is called ``temperature``, ``scale``, ``strength`` or ``epsilon``, as in the source of the map. The arguments are
  ``x``, k and the softness, in this order; unlike in ``torch.topk``, ``dim`` is passed by keyword.
* A row with fewer than k unmasked entries is an error. For rows of different lengths, pass one k per row,
  ``(x > -torch.inf).sum(-1).clamp(max=k)``; in causal attention this is ``torch.arange(1, n + 1).clamp(max=k)``.
* First derivatives at k = 0 and k = n are the limits of those nearby; the derivative of a logarithm in k at k = 0,
  which is infinite, is a large finite number. Second derivatives there are finite, but not these limits: they treat the
  threshold as a constant, so that the second derivative of a mask in k is 0.
* The result has the dtype of ``x``. Masks of float16 and bfloat16 are computed in float32. The maps of sorted entries
  (ranks, sorting, isotonic regression, sorted transport) are computed in float64.
* A ``torch.distributed.tensor.DTensor`` gives a DTensor with the placements of ``x``. Rows that are whole on every
  process need no communication. Masks of sharded rows are found by sums over the processes, with derivatives of every
  order. Maps of sorted entries gather sharded rows.
* An argument of the wrong type or dtype raises a TypeError, and one of the wrong shape or out of range a ValueError;
  both name the argument. The contents of tensors are checked on a CPU, on accelerators only while validation is on
  (``torch.distributions.Distribution.set_default_validate_args``), and never under ``vmap``. Compiled graphs check them
  too, except for the soft order maps, :func:`soft_count`, :func:`soft_quantile` and :func:`successive_softmax_topk`.
* Thresholds need float64. On a device without it, such as Apple's, all maps except the hard mask are computed on the
  host in single precision, and the result is copied back.
"""

from khot.kernels.links.base import Link
from khot.kernels.links.logistic import Logistic

from ._capped_softmax import capped_softmax
from ._straight_through import straight_through_topk, straight_through_value
from .any_link import capped_simplex_map
from .counting import soft_count, soft_quantile
from .hard import topk_indices, topk_mask
from .isotonic import isotonic_l2, isotonic_lp
from .lapsum import lapsum_topk, log_lapsum_topk
from .magnitude import sparse_topk_magnitude
from .normal import normal_topk
from .order import soft_permutation, soft_rank, soft_sort
from .permutahedron import permutahedron_projection, permutahedron_rank, permutahedron_sort
from .sigmoid import log_sigmoid_topk, sigmoid_topk
from .signed import sparse_topk_signed
from .sorted_transport import sorted_transport_topk
from .sparse import sparse_topk
from .successive_softmax import successive_softmax_topk
from .threshold import topk_threshold
from .transport import transport_topk

__all__ = [
    "Link",
    "Logistic",
    "capped_simplex_map",
    "capped_softmax",
    "isotonic_l2",
    "isotonic_lp",
    "lapsum_topk",
    "log_lapsum_topk",
    "log_sigmoid_topk",
    "normal_topk",
    "permutahedron_projection",
    "permutahedron_rank",
    "permutahedron_sort",
    "sigmoid_topk",
    "soft_count",
    "soft_permutation",
    "soft_quantile",
    "soft_rank",
    "soft_sort",
    "sorted_transport_topk",
    "sparse_topk",
    "sparse_topk_magnitude",
    "sparse_topk_signed",
    "straight_through_topk",
    "straight_through_value",
    "successive_softmax_topk",
    "topk_indices",
    "topk_mask",
    "topk_threshold",
    "transport_topk",
]


def __dir__() -> list[str]:
    return __all__
