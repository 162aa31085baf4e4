"""Brewer's design: k draws of one unit each, with exact inclusion probabilities."""

import torch
from torch import Size, Tensor

from khot._contents import can_look
from khot.kernels.draws import balance
from khot.laws import brewer as law

from .design import SamplingDesign
from .rows import in_slabs


class Brewer(SamplingDesign):
    r"""Draws k-hot vectors with exactly the given inclusion probabilities, unit by unit.

    The next unit is unit j with a probability proportional to

    .. math:: \frac{\pi_j (k - a - \pi_j)}{k - a - \pi_j m}

    where m units are still to be drawn and a is the sum of :math:`\pi_i` over those drawn already. ``mean`` is
    ``probs``. A draw takes O(nk) time. ``log_prob`` is exact; it sums over the orders in which the units of a vector
    may be drawn, for k up to 10, in O(2^k n) time. For k = 2 the design is that of :class:`~khot.Sampford`. For other k
    it is close to it, and Sampford's ``log_prob`` takes any k.

    All results are differentiable to any order in ``logits``, and in ``probs`` along changes that keep the sum.

    Arguments and errors are those of :class:`~khot.SamplingDesign`. ``log_prob`` raises NotImplementedError
    if k exceeds 10.

    References:
        [1] Brewer (1975), "A simple procedure for sampling pi-ps wor", Australian Journal of Statistics 17(3).
        [2] Tillé (2006), "Sampling Algorithms", chapter 6.

    Example:
        >>> design = Brewer(probs=torch.tensor([0.9, 0.6, 0.5]))
        >>> design.log_prob(design.enumerate_support()).exp()
        tensor([0.5000, 0.4000, 0.1000])
    """

    def _sample(self, shape: Size, generator: torch.Generator | None) -> Tensor:
        return law.sample(self._probs, self._k, self._width(), shape, generator, self._kept)

    def _log_prob(self, value: Tensor) -> Tensor:
        size = self._width()
        if size > law.MAX_SIZE:
            known = self._shared_k is not None or can_look(self._k)
            raise NotImplementedError(
                f"Brewer has a log_prob for k <= {law.MAX_SIZE} only, but got k={size if known else self._size}; "
                "Sampford, whose distribution is close, has one for any k"
            )

        def log_prob(probs: Tensor, k: Tensor, value: Tensor) -> Tensor:
            return law.log_prob(balance(probs, k), size, value, self._kept)

        return in_slabs(log_prob, self._k, self._probs, value, largest=law.SLAB >> size)

    def _width(self) -> int:
        """The largest k of all rows, or n if k cannot be read."""
        if self._shared_k is not None:
            return self._shared_k
        if not can_look(self._k):
            return self.event_shape[0]
        return int(self._k.max()) if self._k.numel() else 0
