"""The pivotal method: duels between units that preserve inclusion probabilities, in a random or a given order."""

import math

import torch
from torch import Tensor
from torch.types import _size as SizeLike

from khot._validation import check_generator, checked_shape
from khot.kernels.draws import pivotal_draw
from khot.kernels.random_numbers.philox import FIRST, draw_seed
from khot.laws import pivotal as law
from khot.relaxations import sigmoid_topk

from ._arguments import checked_order
from ._in_order import DesignInOrder
from .design import Relaxation


class Pivotal(DesignInOrder):
    r"""Draws k-hot vectors with exactly the given inclusion probabilities by the pivotal method.

    ``order="random"`` shuffles the units for each draw and plays a tournament. This takes O(n) work after the shuffle,
    in O(log n) steps, but the probability of a vector is unknown. ``order="fixed"`` duels in the given order:
    neighbours exclude each other, so draws spread over the order, and ``log_prob``, ``entropy`` (both O(n)) and
    ``pairwise_inclusion`` are exact. Many vectors then have probability 0, with gradient 0. On CUDA and ROCm tensors a
    draw is one kernel, in random order for up to 4096 units; on a CPU with numba it is one loop.

    A step of :class:`~khot.StraightThrough` on one long row takes at most 8 times the memory of its float32 parameters
    with numba, and 22 times in plain torch, which processes many rows in parts. In the given order, in plain torch, a
    draw of one long row takes 25 times that memory and its ``log_prob`` 36 times: both hold about a dozen float64
    numbers per duel.

    ``mean`` is ``probs``. All results are differentiable in ``logits``, and in ``probs`` along changes that keep the
    sum. In the given order there are kinks where a partial sum of ``probs`` is an integer.

    Args:
        probs: Inclusion probabilities ``(..., n)`` in [0, 1], each row with an integer sum.
        logits: Real scores ``(..., n)``.
        k: Number of ones, an int or an integer tensor that broadcasts with the batch shape. Required with ``logits``.
        order: ``"random"`` or ``"fixed"``.
        relaxation: Map ``relaxation(logits, k, temperature)`` to the inclusion probabilities.
        temperature: Softness of the relaxation.
        validate_args: Whether to check the contents of tensors.

    Raises:
        TypeError: If an argument has the wrong type or dtype.
        ValueError: If both or neither of ``probs`` and ``logits`` are given, or shapes or values are out of range.

    References:
        [1] Deville, Tillé (1998), "Unequal probability sampling without replacement through a splitting method",
            Biometrika 85(1).
        [2] Chauvet (2012), "On a characterization of ordered pivotal sampling", Bernoulli 18(4).

    Example:
        >>> design = Pivotal(probs=torch.tensor([0.5, 0.5, 0.5, 0.5]), order="fixed")
        >>> design.log_prob(torch.tensor([0.0, 1.0, 1.0, 0.0])).exp()
        tensor(0.2500)
    """

    _law = law

    def __init__(
        self,
        probs: Tensor | None = None,
        logits: Tensor | None = None,
        k: int | Tensor | None = None,
        *,
        order: str = "random",
        relaxation: Relaxation = sigmoid_topk,
        temperature: float | Tensor = 1.0,
        validate_args: bool | None = None,
    ) -> None:
        self.order = checked_order(order)
        super().__init__(probs, logits, k, relaxation=relaxation, temperature=temperature, validate_args=validate_args)

    def sample(self, sample_shape: SizeLike = torch.Size(), *, generator: torch.Generator | None = None) -> Tensor:
        check_generator(generator, self.parameter.device)
        draws = math.prod(checked_shape("sample_shape", sample_shape))
        with torch.no_grad():
            if self.order == "fixed":
                return self._draw_by_rows(law.draw_in_order, sample_shape, generator)
            probs = self.probs.detach()
            kernel = pivotal_draw.kernel(probs, draws)
            if kernel is None:
                return self._draw_by_rows(law.draw_in_random_order, sample_shape, generator)
            seed = draw_seed(probs.device, generator)
            drawn = kernel(probs, self.k, seed, FIRST, draws, self.parameter.dtype)
            return drawn.view(self._extended_shape(sample_shape))
