"""Relaxed top-k maps: deterministic, differentiable stand-ins for "the k largest of n". Needs torch only.

What holds for all of them, unless a docstring says otherwise:

* ``x`` is a floating-point tensor; its ``n`` entries along ``dim`` are the ground set, and the other axes the batch.
  Masks take a tuple of axes as well, whose entries are one ground set together.
  Larger means nearer to 1. An entry of a mask that is excluded is 0 and gets no gradient.
* Maps of sorted entries take ``-inf`` as the limit of ever smaller scores. Ascending, the m excluded entries of a row
  have the rank ``(m + 1) / 2`` each, and sorted rows begin with m times ``-inf``; the others are a row of their own
  that follows, and the permutation matrix has a block of ``1 / m`` and one of theirs. Descending order mirrors it. In
  sorted transport they are 0 in every column. They get no gradient.
* ``k`` and the softness (``temperature``, ``scale``, ``strength`` or ``epsilon``, the word of the source) are numbers,
  or tensors that broadcast with the batch shape, and have a gradient. The arguments are ``x``, k and the softness, in
  this order; unlike in ``torch.topk`` the axis ``dim`` is passed by keyword.
* Rows in which fewer than k entries are left unmasked are an error. Rows of different length take a k each,
  ``(x > -torch.inf).sum(-1).clamp(max=k)``; in causal attention this is ``torch.arange(1, n + 1).clamp(max=k)``.
* First and second derivatives at k = 0 and k = n are the limits of those nearby. A large finite number of the same sign
  stands for a limit that is infinite: that of the derivative of a logarithm in k at k = 0, or of the second derivative
  of :func:`normal_topk` in k.
* The result has the dtype of ``x``. Masks of float16 and bfloat16 are computed in float32; the maps of sorted entries
  (ranks, sorting, isotonic regression, sorted transport) are computed in float64.
* ``torch.distributed.tensor.DTensor``s are taken and returned, with the placements of ``x``. Rows that are whole on
  every process cost no communication; masks of rows that are cut are found by sums over the processes, with
  derivatives of every order; maps of sorted entries gather such rows.
* An argument of the wrong type or dtype is a TypeError, one of the wrong shape or out of range a ValueError; both name
  it. What tensors contain is looked at on a CPU, on accelerators while validation is on
  (``torch.distributions.Distribution.set_default_validate_args``), and never under ``vmap``. Compiled graphs look,
  too, except for :func:`topk_mask`, the soft order maps and the two baselines.
* Thresholds need float64. On a device without it, such as Apple's, all maps but the hard mask are computed on the host:
  arguments go there, and the result comes back, in single precision.
"""

from khot.kernels.links.base import Link
from khot.kernels.links.logistic import Logistic
from khot.kernels.links.student_t import StudentT

from ._capped_softmax import capped_softmax
from ._straight_through import straight_through_topk, straight_through_value
from .counting import soft_count, soft_quantile
from .engine import capped_simplex_map
from .hard import topk_mask
from .isotonic import isotonic_l2, isotonic_lp
from .lapsum import lapsum_topk, log_lapsum_topk
from .magnitude import sparse_topk_magnitude
from .normal import normal_topk
from .order import soft_permutation, soft_rank, soft_sort
from .permutahedron import permutahedron_projection, permutahedron_rank, permutahedron_sort
from .rescaled_sigmoid import rescaled_sigmoid_topk
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
    "StudentT",
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
    "rescaled_sigmoid_topk",
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
    "topk_mask",
    "topk_threshold",
    "transport_topk",
]


def __dir__() -> list[str]:
    return __all__
