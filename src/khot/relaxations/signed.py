"""Signed sparse top-k: a mask in [-1, 1] over the entries of largest absolute value."""

from torch import Tensor

from khot._distributed.boundary import of_rows
from khot.kernels.call import Call
from khot.kernels.links.clipped_power import clipped_power
from khot.kernels.threshold.kinds import SIGNED

from .engine import ThresholdMap
from .sparse import check_exponent


@of_rows(sharded=True)
def sparse_topk_signed(
    _call: Call,
    x: Tensor,
    k: float | Tensor,
    strength: float | Tensor = 1.0,
    p: float = 2.0,
    *,
    dim: int | tuple[int, ...] = -1,
) -> Tensor:
    r"""Relaxes the signs of the k largest ``abs(x)``, with zeros (third argument: ``strength``; ``dim`` by keyword).

    .. math:: y = \arg\max_{|y_i| \le 1, \sum |y_i| \le k} \langle x, y \rangle
        - \frac{\lambda}{p} \sum_i |y_i|^p

    .. math:: y_i = \mathrm{sign}(x_i)\,\mathrm{clip}((|x_i| - t)/\lambda, 0, 1)^{1/(p-1)}, \quad t \ge 0

    The constraint is an inequality: where ``abs(x)`` is small or ``strength`` large, the absolute values do not add up
    to ``k``, ``t = 0`` and ``k`` has no influence. Otherwise ``abs(y)`` is :func:`sparse_topk` of ``abs(x)``. Tends to
    ``sign(x) * topk_mask(abs(x), k)`` as ``strength -> 0`` and to 0 as it grows. The map is odd and
    permutation-equivariant, and keeps the order of absolute values. It is differentiable in ``x``, ``k`` and
    ``strength``, in reverse and forward mode, except at the kinks of :func:`sparse_topk`, where the constraint becomes
    active, and for ``p = 2`` at ``x_i = 0`` with ``t = 0``; there, an entry that is 0 gets no gradient.

    Args:
        x: Finite real entries, ``n`` along ``dim``; 0 masks an entry.
        k: Bound of the sum of absolute values, ``0 <= k <= n``.
        strength: Positive weight of the regulariser.
        p: Exponent of the regulariser, a Python number, ``1 < p <= 2``.
        dim: Axis of the ground set, or axes that together form one ground set.

    Returns:
        Tensor like ``x``, in ``[-1, 1]``, with absolute values that sum to at most ``k`` along ``dim``.

    Raises:
        ValueError: If ``k``, ``strength`` or ``p`` is out of range, or ``x`` is not finite. See
            :mod:`khot.relaxations`.

    References:
        [1] Sander et al. (2023), "Fast, Differentiable and Sparse Top-k: a Convex Analysis Perspective", sections 4-5.

    Example:
        >>> sparse_topk_signed(torch.tensor([0.2, -0.5, -3.0]), 2, 0.5)
        tensor([ 0.2000, -0.8000, -1.0000])
    """
    check_exponent(p)
    link = clipped_power(float(p), _call.is_compiling)
    return ThresholdMap(link, "strength", SIGNED).apply(_call, x, k, strength, dim)
