"""Sampford's design: exact inclusion probabilities, log-probability and pairs, with almost the largest entropy."""

import torch
from torch import Size, Tensor

from khot.laws import sampford as law
from khot.laws.once import Once
from khot.relaxations import topk_mask

from .design import SamplingDesign
from .rows import draw_by_rows


class Sampford(SamplingDesign):
    r"""Draws k-hot vectors with the given inclusion probabilities; their probabilities have a closed form.

    .. math:: P(x) \propto \prod_{i: x_i = 1} \frac{\pi_i}{1 - \pi_i} \sum_{i: x_i = 1} (1 - \pi_i)

    ``mean`` is ``probs``, without an equation to solve. The design is a reweighted conditional Poisson design, which
    gives an exact ``log_prob``, and draws without rejection. For k = 2 it is that of :class:`~khot.Brewer`. The most
    probable vector has the k largest ``probs``. The entropy has no closed form; it is a sum over all vectors if C(n, k)
    is at most 1,000,000.

    All results are differentiable to any order in ``logits``, and in ``probs`` along changes that keep the sum.

    Args:
        probs: Inclusion probabilities ``(..., n)`` in [0, 1], each row with an integer sum.
        logits: Real scores ``(..., n)``.
        k: Number of ones, an int or an integer tensor that broadcasts with the batch shape. Required with ``logits``.
        relaxation: Map ``relaxation(logits, k, temperature)`` to the inclusion probabilities.
        temperature: Softness of the relaxation.
        validate_args: Whether to check the contents of tensors.

    Raises:
        TypeError: If an argument has the wrong type or dtype.
        ValueError: If both or neither of ``probs`` and ``logits`` are given, or shapes or values are out of range.

    References:
        [1] Sampford (1967), "On sampling without replacement with unequal probabilities of selection",
            Biometrika 54(3/4).

    Example:
        >>> design = Sampford(probs=torch.tensor([0.9, 0.6, 0.5]))
        >>> design.log_prob(design.enumerate_support()).exp()
        tensor([0.5000, 0.4000, 0.1000])

        Two of four units, with probabilities proportional to size but at most 1:

        >>> size = torch.tensor([1.0, 2.0, 3.0, 60.0])
        >>> Sampford(probs=capped_softmax(size.log(), 2)).mean
        tensor([0.1667, 0.3333, 0.5000, 1.0000])
    """

    def _pairwise_inclusion(self) -> Tensor:
        """E[x_i x_j], in O(n² log² n) time."""
        mean = self._probs
        return self._covariance_matrix().to(mean.dtype) + mean.unsqueeze(-1) * mean.unsqueeze(-2)

    def _covariance_matrix(self) -> Tensor:
        return law.covariance(self._probs, self._size)

    def _mode(self) -> Tensor:
        """The k-hot vector of the k largest probabilities."""
        return topk_mask(self._probs, self._size)

    def _sample(self, shape: Size, generator: torch.Generator | None) -> Tensor:
        def draw(probs: Tensor, k: Tensor, draws: int, kept: "Once | None") -> Tensor:
            return law.sample(probs, self._size_of(k), (draws,), generator, kept)

        return draw_by_rows(self, draw, shape)

    def _log_prob(self, value: Tensor) -> Tensor:
        return law.log_prob(self._probs, self._size, value, self._kept)

    def _size_of(self, k: Tensor) -> int | Tensor:
        """The k of some rows, as an int if it is one."""
        return k if self._shared_k is None else self._shared_k
