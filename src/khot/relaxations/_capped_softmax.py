"""Capped softmax: the relaxed top-k mask with an exponential link, proportional to exp(x) below a cap of 1."""

from torch import Tensor

from khot._distributed.boundary import of_rows
from khot.kernels.call import Call
from khot.kernels.links.capped_exponential import CAPPED_EXPONENTIAL
from khot.kernels.threshold.kinds import MASK

from .engine import ThresholdMap
from .linked import with_link

MAP = ThresholdMap(CAPPED_EXPONENTIAL, "temperature", MASK)


@with_link(MAP.link)
@of_rows(sharded=True)
def capped_softmax(
    _call: Call, x: Tensor, k: float | Tensor, temperature: float | Tensor = 1.0, *, dim: int | tuple[int, ...] = -1
) -> Tensor:
    r"""Relaxes top-k by a multiple of softmax, capped at 1 (third argument: ``temperature``; ``dim`` by keyword).

    .. math:: y_i &= \min(1, e^{(x_i - t)/T}), \quad \sum_i y_i = k; \\
        y &= \arg\max_{y \in [0,1]^n, \sum y = k} \langle x, y \rangle - T \sum_i y_i \log y_i

    For ``k = 1`` this is softmax. With ``x = log(size)`` the values are what survey sampling calls inclusion
    probabilities proportional to size: units that are too large for their share are certain to be chosen, and the
    others share the rest of k in proportion to their sizes.

    Tends to the k-hot top-k as ``temperature -> 0`` and to ``k / n`` as it grows. The map is permutation-equivariant,
    keeps the order of ``x`` and is invariant to ``x + c``. It is differentiable in ``x``, ``k`` and ``temperature``, in
    reverse and forward mode, except where an entry reaches 1; entries equal to 1 have no gradient.

    Args:
        x: Scores with ``n`` entries along ``dim``; ``-inf`` excludes an entry, ``inf`` selects it.
        k: Sum of the result, ``0 <= k <= n``.
        temperature: Positive softness.
        dim: Axis of the ground set, or axes that together form one ground set.

    Returns:
        Tensor like ``x``, in ``[0, 1]``, summing to ``k`` along ``dim``.

    Raises:
        ValueError: If ``k`` or ``temperature`` is out of range, ``x`` contains NaN, or fewer than ``k`` entries are
            unmasked. See :mod:`khot.relaxations`.

    References:
        [1] Tillé (2006), "Sampling Algorithms", for inclusion probabilities proportional to size.
        [2] Warmuth, Kuzmin (2008), "Randomized online PCA algorithms with regret bounds that are logarithmic in the
            dimension", for capping as a projection in relative entropy.

    Example:
        >>> size = torch.tensor([1.0, 2.0, 3.0, 30.0])
        >>> capped_softmax(size.log(), 2)
        tensor([0.1667, 0.3333, 0.5000, 1.0000])
    """
    return MAP.apply(_call, x, k, temperature, dim)
