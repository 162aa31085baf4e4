"""LapSum top-k: the relaxed top-k mask with the Laplace link."""

from torch import Tensor

from khot._distributed.boundary import of_rows
from khot.kernels.call import Call
from khot.kernels.links.laplace import LAPLACE
from khot.kernels.threshold.kinds import MASK

from .engine import ThresholdMap
from .linked import logarithm_of, with_link

MAP = ThresholdMap(LAPLACE, "scale", MASK)


@with_link(MAP.link)
@of_rows(sharded=True)
def lapsum_topk(
    _call: Call, x: Tensor, k: float | Tensor, scale: float | Tensor = 1.0, *, dim: int | tuple[int, ...] = -1
) -> Tensor:
    r"""Relaxes top-k by Laplace distribution functions that sum to k (third argument: ``scale``; ``dim`` by keyword).

    .. math:: y_i &= \mathrm{Lap}((x_i - t)/s), \quad \sum_i y_i = k; \\
        \mathrm{Lap}(z) &= \tfrac12 e^z \ (z \le 0), \quad 1 - \tfrac12 e^{-z} \ (z > 0)

    Tends to the k-hot top-k as ``scale -> 0`` and to ``k / n`` as it grows. The map is permutation-equivariant, keeps
    the order of ``x``, is invariant to ``x + c``, and is invertible up to that shift. It is differentiable in ``x``,
    ``k`` and ``scale``, in reverse and forward mode: once everywhere, and to any order where no ``x_i`` equals the
    threshold ``t``. The closed form of [1], a sort and two scans, gives the same numbers but takes longer
    (``benchmarks/lapsum_closed_form.py``).

    Args:
        x: Scores with ``n`` entries along ``dim``; ``-inf`` excludes an entry, ``inf`` selects it.
        k: Sum of the result, ``0 <= k <= n``.
        scale: Positive softness.
        dim: Axis of the ground set, or axes that together form one ground set.

    Returns:
        Tensor like ``x``, in ``[0, 1]``, summing to ``k`` along ``dim``.

    Raises:
        ValueError: If ``k`` or ``scale`` is out of range, ``x`` contains NaN, or fewer than ``k`` entries are
            unmasked. See :mod:`khot.relaxations`.

    References:
        [1] Struski et al. (2025), "LapSum - One Method to Differentiate Them All", section 3.

    Example:
        >>> lapsum_topk(torch.tensor([0.0, 1.0, 2.0]), 1.5)
        tensor([0.1839, 0.5000, 0.8161])
    """
    return MAP.apply(_call, x, k, scale, dim)


@logarithm_of(lapsum_topk)
@of_rows(sharded=True)
def log_lapsum_topk(
    _call: Call, x: Tensor, k: float | Tensor, scale: float | Tensor = 1.0, *, dim: int | tuple[int, ...] = -1
) -> Tensor:
    r"""Logarithm of :func:`lapsum_topk` (third argument: ``scale``; ``dim`` by keyword).

    .. math:: \log y_i = \log \mathrm{Lap}((x_i - t)/s), \quad \sum_i y_i = k

    Accurate even where the mask itself underflows. The logarithm of its complement, :math:`\log(1 - y)`, is
    ``log_lapsum_topk(-x, n - k, scale)``. Differentiable as :func:`lapsum_topk` is.

    Args:
        x: Scores with ``n`` entries along ``dim``; ``-inf`` excludes an entry, ``inf`` selects it.
        k: Sum of the mask, ``0 <= k <= n``. For ``k = 0`` the result is the logarithm of a vanishing mask: finite,
            below -700.
        scale: Positive softness.
        dim: Axis of the ground set, or axes that together form one ground set.

    Returns:
        Tensor like ``x``, at most 0, whose exponential sums to ``k`` along ``dim``.

    Raises:
        ValueError: As for :func:`lapsum_topk`.
        TypeError: As for :func:`lapsum_topk`.

    References:
        [1] Struski et al. (2025), "LapSum - One Method to Differentiate Them All", section 3.

    Example:
        >>> log_lapsum_topk(torch.tensor([0.0, 1000.0, 1000.0]), 1.5)
        tensor([-1.0000e+03, -2.8768e-01, -2.8768e-01])
    """
    return MAP.logarithm(_call, x, k, scale, dim)
