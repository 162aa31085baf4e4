"""Conditional Poisson design: independent Bernoulli units, given that exactly k of them are ones."""

import torch
from torch import Tensor
from torch.distributions.utils import lazy_property
from torch.types import _size as SizeLike

from khot._validation import check_generator, checked_shape
from khot.laws import conditional_poisson as law
from khot.laws.inverse import largest_entropy, solve_logits
from khot.relaxations import topk_mask

from .design import SamplingDesign


class ConditionalPoisson(SamplingDesign):
    r"""The law :math:`P(x) \propto \exp\langle\theta, x\rangle` on k-hot vectors: what Categorical is for one-hot ones.

    ``logits`` are the natural parameters :math:`\theta`, the log-odds of independent Bernoulli units that are
    conditioned on :math:`\sum_i x_i = k`; a constant added to a row changes nothing. It is the design of largest
    entropy among those with its inclusion probabilities :math:`\pi`, and ``probs`` :math:`= \pi` determines it: the
    logits are then solved for.

    Everything is exact, in float64, at O(n log² n) cost: sampling, ``log_prob``, ``mean`` :math:`= \pi = \nabla_\theta
    \log Z`, ``entropy``; and differentiable to any order. ``log_prob`` is linear in its value, so that a
    straight-through sample has the exact gradient of the entropy.

    On a CPU a batch of more than 131072 logits takes at most 16 times their memory in float32, as the product trees are
    made some rows at a time, and again for derivatives. A smaller one is taken whole, with up to 50 MB, and all methods
    share one tree, which the design keeps as long as it lives. So does one long row: its tree has log2 n levels of up
    to two float64 numbers a unit, of which a gradient needs the cotangents too, 50 times the logits at n = 262144.
    With numba, rows of at most 16384 units need no tree: of them a few numbers a unit are kept.

    Args:
        probs: Inclusion probabilities ``(..., n)`` in [0, 1], each row with an integer sum; 0 and 1 are legal.
        logits: Natural parameters ``(..., n)``; ``-inf`` excludes a unit, ``inf`` includes it.
        k: Number of ones, an int or an integer tensor that broadcasts with the batch shape. Required with ``logits``.
        validate_args: Whether to check the contents of tensors.

    Raises:
        TypeError: If an argument has the wrong type or dtype.
        ValueError: If both or neither of ``probs`` and ``logits`` are given, or shapes or values are out of range.

    References:
        [1] Chen, Dempster, Liu (1994), "Weighted finite population sampling to maximize entropy", Biometrika 81(3).
        [2] Ahmed, Zeng, Niepert, Van den Broeck (2023), "SIMPLE: a gradient estimator for k-subset sampling":
            straight-through on these inclusion probabilities.

    Example:
        >>> design = ConditionalPoisson(logits=torch.tensor([0.0, 0.0, 1.0]), k=2)
        >>> design.mean
        tensor([0.5777, 0.5777, 0.8446])
    """

    def __init__(
        self,
        probs: Tensor | None = None,
        logits: Tensor | None = None,
        k: int | Tensor | None = None,
        *,
        validate_args: bool | None = None,
    ) -> None:
        super().__init__(probs, logits, k, validate_args=validate_args)

    def _validate_contents(self) -> None:
        super()._validate_contents()
        self._validate_infinite_logits()

    @lazy_property
    def logits(self) -> Tensor:
        """Natural parameters; those found from ``probs`` have mean 0."""
        return solve_logits(self.probs, self.size, log_odds=self.__dict__.get("log_odds")).to(self.probs.dtype)

    @lazy_property
    def probs(self) -> Tensor:
        """Inclusion probabilities P(x_i = 1)."""
        return law.inclusion_probabilities(self.logits, self.size, self.kept).to(self.logits.dtype)

    @property
    def pairwise_inclusion(self) -> Tensor:
        """Matrix ``(..., n, n)`` of E[x_i x_j], with ``mean`` on the diagonal; O(n²) time."""
        return law.pairwise_inclusion(self.logits, self.size, self.mean.double()).to(self.logits.dtype)

    @property
    def covariance_matrix(self) -> Tensor:
        return law.covariance(self.logits, self.size).to(self.logits.dtype)

    @property
    def mode(self) -> Tensor:
        """The k-hot vector of the k largest logits."""
        return topk_mask(self.parameter, self.size)

    def sample(self, sample_shape: SizeLike = torch.Size(), *, generator: torch.Generator | None = None) -> Tensor:
        check_generator(generator, self.parameter.device)
        shape = checked_shape("sample_shape", sample_shape)
        return law.sample(self.logits, self.size, shape, generator, self.kept).to(self.parameter.dtype)

    def _log_prob(self, value: Tensor) -> Tensor:
        return law.log_prob(self.logits, self.size, value, self.kept).to(self.parameter.dtype)

    def entropy(self) -> Tensor:
        if self.parameter_name == "probs":
            return largest_entropy(self.probs, self.logits, self.size, self.kept).to(self.parameter.dtype)
        return law.entropy(self.logits, self.size, self.kept).to(self.parameter.dtype)
