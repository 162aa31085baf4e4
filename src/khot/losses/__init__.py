r"""Loss functions of relaxed top-k maps; their modules are in :mod:`khot.nn`.

Fenchel-Young losses [1]. Each sparse map is :math:`y(x) = \arg\max_y \langle x, y\rangle - \Omega(y)`. Its loss

.. math:: L(x, t) &= \Omega^*(x) + \Omega(t) - \langle x, t\rangle \ge 0, \\ \nabla_x L &= y(x) - t,

is convex in x, and zero where :math:`y(x) = t`. With R(y) = (strength / p) sum abs(y)^p, the regulariser Omega is

* ``mask``: R(y) on 0 <= y <= 1, sum y = k;
* ``signed``: R(y) on abs(y) <= 1, sum abs(y) <= k;
* ``magnitude``: R(y) + half the squared k-support norm of y, for any y.

Top-k cross-entropy [2] is the negative logarithm of the probability that the target is among the k largest scores, with
k drawn from a distribution over sizes. The nearest-neighbour loss [3] is the negative logarithm of the share of a
query's k relaxed neighbours that have its label. The loss of a rank metric [4], such as recall or NDCG at k, is one
minus the metric, in which relaxed masks take the place of the sets of the j largest scores.

An argument of a wrong type raises TypeError, and one of a wrong shape or out of range ValueError.
:mod:`khot.relaxations` says when contents of tensors are checked.

References:
    [1] Blondel, Martins, Niculae (2020), "Learning with Fenchel-Young Losses", JMLR 21; for these maps Sander et al.
        (2023), "Fast, Differentiable and Sparse Top-k: a Convex Analysis Perspective".
    [2] Petersen, Kuehne, Borgelt, Deussen (2022), "Differentiable Top-k Classification Learning", arXiv:2206.07290.
    [3] Xie et al. (2020), "Differentiable Top-k with Optimal Transport", section 4.1.
    [4] Järvelin, Kekäläinen (2002), "Cumulated gain-based evaluation of IR techniques", ACM TOIS 20(4).
"""

from .cross_entropy import topk_cross_entropy
from .fenchel_young import fenchel_young_topk_loss
from .neighbours import knn_loss
from .rank_metric import topk_metric_loss

__all__ = ["fenchel_young_topk_loss", "knn_loss", "topk_cross_entropy", "topk_metric_loss"]


def __dir__() -> list[str]:
    return __all__
