"""Sparse top-k: the relaxed top-k mask whose link is a clipped power, exactly 0 and 1 away from the threshold."""

from numbers import Real

from torch import Tensor

from khot._distributed.boundary import of_rows
from khot.kernels.call import Call
from khot.kernels.links.base import Link
from khot.kernels.links.clipped_power import clipped_power
from khot.kernels.threshold.kinds import MASK

from .engine import ThresholdMap
from .linked import with_link


def check_exponent(p: float) -> None:
    """Checks that ``p`` is a number in (1, 2]."""
    if isinstance(p, bool) or not isinstance(p, Real):
        raise TypeError(f"`p` must be a real number, but got {type(p).__name__}")
    if not 1 < p <= 2:
        raise ValueError(f"`p` must satisfy 1 < p <= 2, but got p={p}")


def _link(p: float = 2.0, **_: object) -> Link:
    check_exponent(p)
    return clipped_power(float(p))


@with_link(_link)
@of_rows(sharded=True)
def sparse_topk(
    _call: Call,
    x: Tensor,
    k: float | Tensor,
    strength: float | Tensor = 1.0,
    p: float = 2.0,
    *,
    dim: int | tuple[int, ...] = -1,
) -> Tensor:
    r"""Relaxes top-k by p-norm regularisation, with exact zeros (third argument: ``strength``; ``dim`` by keyword).

    .. math:: y &= \arg\max_{y \in [0,1]^n, \sum y = k} \langle x, y \rangle - \frac{\lambda}{p} \sum_i y_i^p; \\
        y_i &= \mathrm{clip}((x_i - t)/\lambda, 0, 1)^{1/(p-1)}

    The mask equals the k-hot top-k as soon as ``strength`` is below the gap between the k-th and the next largest
    score, and tends to ``k / n`` as it grows. ``p = 2`` is the Euclidean projection of ``x / strength``. The map is
    permutation-equivariant, keeps the order of ``x`` and is invariant to ``x + c``.

    The map is differentiable in ``x``, ``k`` and ``strength``, in reverse and forward mode, except at kinks. Entries
    equal to 0 or 1 have no gradient; if all entries are, the derivative in ``k`` jumps and is returned as 0. For
    ``p = 2`` there is a kink wherever an entry reaches 0 or 1. For ``1 < p < 2`` the map is smooth where an entry
    reaches 0, but *not* where one reaches 1 while others are in between: for ``p = 4/3``, ``k = 2`` and
    ``x = (s, 0, 0)`` the slope of the first entry drops from 1.67 to 0 at ``s = 0.2063``. There the slope of the capped
    side is returned.

    Args:
        x: Scores with ``n`` entries along ``dim``; ``-inf`` excludes an entry, ``inf`` selects it.
        k: Sum of the result, ``0 <= k <= n``.
        strength: Positive weight of the regulariser.
        p: Exponent of the regulariser, a real number, ``1 < p <= 2``. Below 1.05 the mask is almost a step function of
            x, and float32 rounding becomes visible. Below 1.0039 plain torch computes it, in float64.
        dim: Axis of the ground set, or axes that together form one ground set.

    Returns:
        Tensor like ``x``, in ``[0, 1]``, summing to ``k`` along ``dim``.

    Raises:
        ValueError: If ``k``, ``strength`` or ``p`` is out of range, ``x`` contains NaN, or fewer than ``k`` entries are
            unmasked. See :mod:`khot.relaxations`.

    References:
        [1] Sander et al. (2023), "Fast, Differentiable and Sparse Top-k: a Convex Analysis Perspective", section 4.

    Example:
        >>> sparse_topk(torch.tensor([0.0, 0.5, 1.0, 3.0]), 2)
        tensor([0.0000, 0.2500, 0.7500, 1.0000])
    """
    check_exponent(p)
    return ThresholdMap(clipped_power(float(p), _call.is_compiling), "strength", MASK).apply(_call, x, k, strength, dim)
