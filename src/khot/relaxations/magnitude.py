"""Sparse top-k in magnitude: shrinks the entries of largest absolute value, and sets the others to 0."""

from torch import Tensor

from khot._distributed.boundary import of_rows
from khot.kernels.call import Call
from khot.kernels.links.clipped_power import clipped_power
from khot.kernels.threshold.kinds import MAGNITUDE

from .engine import ThresholdMap
from .sparse import check_exponent


@of_rows(sharded=True)
def sparse_topk_magnitude(
    _call: Call,
    x: Tensor,
    k: float | Tensor,
    strength: float | Tensor = 1.0,
    p: float = 2.0,
    *,
    dim: int | tuple[int, ...] = -1,
) -> Tensor:
    r"""Keeps the k largest ``abs(x)``, relaxed, with exact zeros (third argument: ``strength``; ``dim`` by keyword).

    .. math:: y = \arg\max_y \langle x, y \rangle &- \frac12 \min_{z \in [0,1]^n, \sum z = k} \sum_i \frac{y_i^2}{z_i}
        \\ &- \frac{\lambda}{p} \sum_i |y_i|^p

    Tends to ``x * topk_mask(abs(x), k)`` as ``strength -> 0`` and to 0 as it grows. The map is odd and
    permutation-equivariant, keeps the order of absolute values, and never enlarges one. Once ``strength`` is below
    :math:`(|x|_{(k)} - |x|_{(k+1)}) / |x|_{(k+1)}^{p-1}`, which for ``p = 2`` is :math:`|x|_{(k)}/|x|_{(k+1)} - 1`,
    exactly the ``k`` largest entries are kept, and each satisfies :math:`|y| + \lambda |y|^{p-1} = |x|`. The distance
    to the limit is then at most :math:`\lambda \|x\|_\infty^{p-1}`; for larger strengths there is no such bound.

    The map is differentiable in ``x``, ``k`` and ``strength``, in reverse and forward mode, except at kinks: where an
    entry reaches its cap while others are pooled; for ``p = 2``, where an entry reaches 0; and, for the derivative in
    ``k``, at an integer ``k`` where nothing is pooled (there it is returned as 0). For ``p < 2``, derivatives of an
    order above eight are not exact.

    Args:
        x: Finite real entries, ``n`` along ``dim``. 0 masks an entry: it stays 0 and gets no gradient.
        k: Number of entries to keep, ``0 <= k <= n``.
        strength: Positive weight of the regulariser.
        p: Exponent of the regulariser, a Python number, ``1 < p <= 2``.
        dim: Axis of the ground set, or axes that together form one ground set.

    Returns:
        Tensor like ``x``, with its signs.

    Raises:
        ValueError: If ``k``, ``strength`` or ``p`` is out of range, or ``x`` is not finite. See
            :mod:`khot.relaxations`.

    References:
        [1] Sander et al. (2023), "Fast, Differentiable and Sparse Top-k: a Convex Analysis Perspective", sections 4-5,
            with :math:`\varphi(x) = x^2/2`.

    Example:
        >>> sparse_topk_magnitude(torch.tensor([0.5, -1.0, -3.0]), 1, 0.5)
        tensor([ 0., -0., -2.])
    """
    check_exponent(p)
    link = clipped_power(float(p), _call.is_compiling)
    return ThresholdMap(link, "strength", MAGNITUDE).apply(_call, x, k, strength, dim)
