r"""Loss functions of relaxed top-k maps; their modules are in :mod:`khot.nn`.

Fenchel-Young losses [1]. Each sparse map is :math:`y(x) = \arg\max_y \langle x, y\rangle - \Omega(y)`. Its loss

.. math:: L(x, t) = \Omega^*(x) + \Omega(t) - \langle x, t\rangle \ge 0, \qquad \nabla_x L = y(x) - t,

is convex in x, and zero where :math:`y(x) = t`. With R(y) = (strength / p) sum abs(y)^p, the regulariser Omega is

* ``mask``: R(y) on 0 <= y <= 1, sum y = k;
* ``signed``: R(y) on abs(y) <= 1, sum abs(y) <= k;
* ``magnitude``: R(y) + half the squared k-support norm of y, for any y.

Top-k cross-entropy [2] is the negative logarithm of the probability that the target is among the k largest scores, with
k drawn from a distribution over sizes. The nearest-neighbour loss [3] is the negative logarithm of the share of a
query's k relaxed neighbours that have its label.

References:
    [1] Blondel, Martins, Niculae (2020), "Learning with Fenchel-Young Losses", JMLR 21; for these maps Sander et al.
        (2023), "Fast, Differentiable and Sparse Top-k: a Convex Analysis Perspective".
    [2] Petersen, Kuehne, Borgelt, Deussen (2022), "Differentiable Top-k Classification Learning", arXiv:2206.07290.
    [3] Xie et al. (2020), "Differentiable Top-k with Optimal Transport", section 4.1.
"""

import warnings
from importlib import import_module
from typing import TYPE_CHECKING, Any

from .cross_entropy import topk_cross_entropy
from .fenchel_young import fenchel_young_topk_loss
from .neighbours import knn_loss

__all__ = ["fenchel_young_topk_loss", "knn_loss", "topk_cross_entropy"]

# Former names of modules, and their names in khot.nn.
MOVED = {"FenchelYoungTopKLoss": "FenchelYoungTopKLoss", "TopKCrossEntropy": "TopKCrossEntropyLoss"}


def moved(name: str, package: str, stacklevel: int) -> Any:
    """A module under its former name, with a warning that gives the new one."""
    message = f"{package}.{name} is now khot.nn.{MOVED[name]}; the old name will be removed in version 0.4"
    warnings.warn(message, FutureWarning, stacklevel=stacklevel + 1)
    return getattr(import_module("khot.nn"), MOVED[name])


if not TYPE_CHECKING:  # otherwise a type checker would accept any name

    def __getattr__(name: str) -> Any:
        if name in MOVED:
            return moved(name, "khot.losses", stacklevel=2)
        raise AttributeError(f"module 'khot.losses' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
