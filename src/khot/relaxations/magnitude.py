r"""Sparse top-k in magnitude: keeps the entries of largest absolute value, shrunk, and sets the others to 0.

With :math:`a = |x|` and the threshold t, the entries fall in three kinds (q = 1 / (p - 1)):

* capped, :math:`a \ge t + \lambda t^{p-1}`: :math:`|y| + \lambda |y|^{p-1} = a`, whatever t is;
* pooled, between t and that: :math:`|y| = ((a - t)/\lambda)^q = t\,z` with :math:`z = ((a - t)/(\lambda t^{p-1}))^q`;
* zero, :math:`a \le t`;

and t is such that the number of capped entries and the z of the pooled ones add up to k. For a pooled entry the slope
:math:`d|y|/da` at fixed t is :math:`w = |y|^{2-p} / (\lambda(p-1))`, for a capped one :math:`w/(1+w)`, and

.. math:: \Big(\sum_{pooled} w_i + z_i\Big) dt = \sum_{pooled} w_i\,(da_i - |y_i|^{p-1} d\lambda) - t\,dk .
"""

import torch
from torch import Tensor

from khot._tracing import one_operation
from khot.kernels.capped_simplex import standardise
from khot.kernels.clipped_power import clipped_power
from khot.kernels.odd_threshold import shrink

from .odd_map import LocalShape, OddMap, odd_map
from .sparse import check_exponent


class _Magnitude(OddMap):
    """The maps of the module's docstring."""

    magnitude = True

    def _kinds(self, a: Tensor, threshold: Tensor, strength: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """abs(y), z where it is below 1, and which entries are capped and pooled."""
        all_capped = (threshold == 0).unsqueeze(-1)
        t = torch.where(threshold == 0, 1.0, threshold)
        ratio = standardise(a, t, strength * t ** (1 / self.link.q))
        capped = ((ratio >= 1) | all_capped) & (a > 0)
        pooled = (ratio > 0) & ~capped & ~all_capped
        # Each kind in its own formula, which sees a harmless 1 or 1/2 in place of the entries of the other kinds.
        z = torch.where(pooled, torch.where(pooled, ratio, 0.5) ** self.link.q, 0.0)
        shrunk = shrink(torch.where(capped, a, 1.0), strength.to(a.dtype).unsqueeze(-1), self.link)
        return torch.where(capped, shrunk, t.to(a.dtype).unsqueeze(-1) * z), z, capped, pooled

    def value(self, a: Tensor, threshold: Tensor, strength: Tensor) -> Tensor:
        return self._kinds(a, threshold, strength)[0]

    def local_shape(self, a: Tensor, threshold: Tensor, strength: Tensor) -> LocalShape:
        y, z, capped, pooled = self._kinds(a, threshold, strength)
        alive = y > 0
        y = torch.where(alive, y, 1.0)
        power = 1 / self.link.q  # p - 1
        w = y ** (1 - power) / (power * strength.to(y.dtype).unsqueeze(-1))
        following = torch.where(pooled & alive, w, 0.0)
        return LocalShape(
            slope=torch.where(capped & alive, w / (1 + w), following),
            following=following,
            lever=torch.where(alive, y**power, 0.0),
            total=(following + z).sum(-1).double(),
            unit=threshold,
        )


@one_operation
def sparse_topk_magnitude(
    x: Tensor, k: float | Tensor, strength: float | Tensor = 1.0, p: float = 2.0, dim: int = -1
) -> Tensor:
    r"""Relaxes "keep the k entries of largest absolute value, zero the others", with exact zeros.

    .. math:: y = \arg\max_y \langle x, y \rangle - \frac12 \min_{z \in [0,1]^n, \sum z = k} \sum_i \frac{y_i^2}{z_i}
        - \frac{\lambda}{p} \sum_i |y_i|^p

    Tends to ``x * topk_mask(abs(x), k)`` as ``strength -> 0``, to 0 as it grows. Odd, permutation-equivariant, keeps
    the order of absolute values and never enlarges one. Once ``strength`` is below
    :math:`(|x|_{(k)} - |x|_{(k+1)}) / |x|_{(k+1)}^{p-1}`, for ``p = 2`` :math:`|x|_{(k)}/|x|_{(k+1)} - 1`, exactly the
    ``k`` largest entries are kept, each at :math:`|y| + \lambda |y|^{p-1} = |x|`, so that the distance to the limit
    is at most :math:`\lambda \|x\|_\infty^{p-1}`; for larger strengths there is no such bound. O(n) time per step of
    the root finder, no sort and no isotonic regression; saves ``x`` and one number per row.

    Differentiable, forwards and backwards, in ``x``, ``k`` and ``strength``, except at kinks: where an entry reaches
    its cap while others are pooled, for ``p = 2`` also where one reaches 0, and at an integer ``k`` where nothing is
    pooled, in ``k`` (there 0 is returned). Derivatives of an order above eight are not exact for ``p < 2``.

    Args:
        x: Finite real entries, ``n`` along ``dim``. 0 masks an entry: it stays 0 and gets no gradient.
        k: How many entries are kept, ``0 <= k <= n``; a number, or a tensor that broadcasts with the batch shape.
        strength: Positive weight of the regulariser; a number, or a tensor that broadcasts with the batch shape.
        p: Exponent of the regulariser, a Python number, ``1 < p <= 2``.
        dim: Axis of the ground set.

    Returns:
        Tensor like ``x``, with its signs. float16 and bfloat16 are computed in float32.

    Raises:
        ValueError: If ``k``, ``strength`` or ``p`` is out of range or does not broadcast, or ``x`` is not finite.
            Contents of tensors are checked as in :func:`capped_simplex_map`.
        TypeError: If an argument has the wrong type or dtype.

    References:
        [1] Sander et al. (2023), "Fast, Differentiable and Sparse Top-k: a Convex Analysis Perspective", sections 4-5,
            with :math:`\varphi(x) = x^2/2`.

    Example:
        >>> sparse_topk_magnitude(torch.tensor([0.5, -1.0, -3.0]), 1, 0.5)
        tensor([ 0., -0., -2.])
    """
    check_exponent(p)
    return odd_map(x, k, strength, dim, _Magnitude(clipped_power(float(p))))
