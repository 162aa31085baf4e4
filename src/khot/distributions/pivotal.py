"""The pivotal method: duels between units that preserve inclusion probabilities."""

import math

import torch
from torch import Size, Tensor

from khot.kernels.draws import pivotal_draw
from khot.kernels.random_numbers.philox import draw_seed
from khot.laws import pivotal as law

from .design import SamplingDesign
from .rows import draw_by_rows


class Pivotal(SamplingDesign):
    r"""Draws k-hot vectors with exactly the given inclusion probabilities by the pivotal method.

    For each draw the units are shuffled and play a tournament. This takes O(n) work after the shuffle, in O(log n)
    steps, but the probability of a vector is unknown; for units in a given order, with known probabilities, see
    :class:`~khot.Systematic`.

    ``mean`` is ``probs``. It is differentiable in ``logits``, and in ``probs`` along changes that keep the sum.

    Arguments and errors are those of :class:`~khot.SamplingDesign`.

    References:
        [1] Deville, Tillé (1998), "Unequal probability sampling without replacement through a splitting method",
            Biometrika 85(1).
        [2] Chauvet (2012), "On a characterization of ordered pivotal sampling", Bernoulli 18(4).

    Example:
        >>> design = Pivotal(probs=torch.tensor([0.5, 0.5, 0.5, 0.5]))
        >>> design.sample((3,)).sum(-1)
        tensor([2., 2., 2.])
    """

    def _sample(self, shape: Size, generator: torch.Generator | None) -> Tensor:
        probs, draws = self._probs.detach(), math.prod(shape)
        kernel = pivotal_draw.kernel(probs, draws)
        if kernel is None:
            return draw_by_rows(self, law.sample, shape, generator)
        drawn = kernel(probs, self._k, draw_seed(probs.device, generator), draws, self.dtype)
        return drawn.view(shape + probs.shape)
