"""Normal top-k: the relaxed top-k mask with the Gaussian link."""

from torch import Tensor

from khot._distributed.boundary import of_rows
from khot.kernels.call import Call
from khot.kernels.links.normal import NORMAL
from khot.kernels.threshold.kinds import MASK

from .engine import ThresholdMap
from .linked import with_link

MAP = ThresholdMap(NORMAL, "scale", MASK)


@with_link(MAP.link)
@of_rows(sharded=True)
def normal_topk(
    _call: Call, x: Tensor, k: float | Tensor, scale: float | Tensor = 1.0, *, dim: int | tuple[int, ...] = -1
) -> Tensor:
    r"""Relaxes top-k by normal distribution functions that sum to k (third argument: ``scale``; ``dim`` by keyword).

    .. math:: y_i = \Phi((x_i - t)/s), \quad \sum_i y_i = k

    The link has light tails: entries a few scales away from the threshold are almost certainly chosen or left out,
    sooner than with the exponential tails of :func:`sigmoid_topk` and :func:`lapsum_topk`, and get almost no gradient.

    Tends to the k-hot top-k as ``scale -> 0`` and to ``k / n`` as it grows. The map is permutation-equivariant, keeps
    the order of ``x``, is invariant to ``x + c``, and is invertible up to that shift where ``y`` does not round to 0 or
    1. It is differentiable to any order in ``x``, ``k`` and ``scale``, in reverse and forward mode.

    Args:
        x: Scores with ``n`` entries along ``dim``; ``-inf`` excludes an entry, ``inf`` selects it.
        k: Sum of the result, ``0 <= k <= n``.
        scale: Positive softness, the standard deviation.
        dim: Axis of the ground set, or axes that together form one ground set.

    Returns:
        Tensor like ``x``, in ``[0, 1]``, summing to ``k`` along ``dim``.

    Raises:
        ValueError: If ``k`` or ``scale`` is out of range, ``x`` contains NaN, or fewer than ``k`` entries are
            unmasked. See :mod:`khot.relaxations`.

    References:
        [1] Struski et al. (2025), "LapSum - One Method to Differentiate Them All", section 3, for general F.

    Example:
        >>> normal_topk(torch.tensor([0.0, 1.0, 2.0]), 1.5)
        tensor([0.1587, 0.5000, 0.8413])
    """
    return MAP.apply(_call, x, k, scale, dim)
