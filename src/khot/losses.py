r"""Loss functions of relaxed top-k maps.

Fenchel-Young losses [1]. Each sparse map is :math:`y(x) = \arg\max_y \langle x, y\rangle - \Omega(y)`, and

.. math:: L(x, t) = \Omega^*(x) + \Omega(t) - \langle x, t\rangle \ge 0, \qquad \nabla_x L = y(x) - t,

is zero where :math:`y(x) = t` and convex in x. With R(y) = (strength / p) sum abs(y)^p, the regulariser is

* ``mask``: R(y) on 0 <= y <= 1, sum y = k;
* ``signed``: R(y) on abs(y) <= 1, sum abs(y) <= k;
* ``magnitude``: R(y) + half the squared k-support norm of y, for any y.

Top-k cross-entropy [2] is the negative logarithm of the probability that the target is among the k largest, k drawn from
a distribution over the sizes.

References:
    [1] Blondel, Martins, Niculae (2020), "Learning with Fenchel-Young Losses", JMLR 21; for these maps Sander et al.
        (2023), "Fast, Differentiable and Sparse Top-k: a Convex Analysis Perspective".
    [2] Petersen, Kuehne, Borgelt, Deussen (2022), "Differentiable Top-k Classification Learning", arXiv:2206.07290.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function, forward_ad

from khot._validation import looks_at_contents
from khot.relaxations import (
    lapsum_topk,
    log_lapsum_topk,
    log_sigmoid_topk,
    sigmoid_topk,
    sparse_topk,
    sparse_topk_magnitude,
    sparse_topk_signed,
)

__all__ = ["FenchelYoungTopKLoss", "TopKCrossEntropy", "fenchel_young_topk_loss", "topk_cross_entropy"]

Relaxation = Callable[[Tensor, Any, Any], Tensor]

_SPARSE_MAPS = {"mask": sparse_topk, "magnitude": sparse_topk_magnitude, "signed": sparse_topk_signed}
_LOGARITHMS: dict[Relaxation, Relaxation] = {lapsum_topk: log_lapsum_topk, sigmoid_topk: log_sigmoid_topk}


def _reduce(losses: Tensor, reduction: str) -> Tensor:
    match reduction:
        case "none":
            return losses
        case "mean":
            return losses.mean()
        case "sum":
            return losses.sum()
    raise ValueError(f"`reduction` must be 'none', 'mean' or 'sum', but got {reduction!r}")
