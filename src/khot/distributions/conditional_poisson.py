"""Conditional Poisson design: independent Bernoulli units, given that exactly k of them are ones."""

from typing import Any, cast

import torch
from torch import Size, Tensor
from torch.distributions import constraints

from khot.constraints import k_hot
from khot.laws import conditional_poisson as law
from khot.laws import size_prior
from khot.laws.inverse import solve_logits
from khot.laws.largest_entropy import largest_entropy
from khot.laws.size_prior import SizePrior
from khot.laws.size_range import SizeRange
from khot.relaxations import topk_mask

from ._arguments import broadcast_with_prior, checked_range, with_size
from .base import lazy
from .design import SamplingDesign
from .entry import entry


class ConditionalPoisson(SamplingDesign):
    r"""The k-hot counterpart of Categorical: :math:`P(x) \propto \exp\langle\theta, x\rangle` on k-hot vectors.

    ``logits`` are the natural parameters :math:`\theta`, the log-odds of independent Bernoulli units that are
    conditioned on :math:`\sum_i x_i = k`. Adding a constant to a row changes nothing. Among all designs with the same
    inclusion probabilities :math:`\pi` this one has the largest entropy, and ``probs`` :math:`= \pi` determines it: the
    logits are then found by solving an equation.

    Everything is exact: sampling, ``log_prob``, ``mean`` :math:`= \pi = \nabla_\theta \log Z` and ``entropy``. All of
    it is differentiable to any order in ``logits``, and once in ``probs``. ``log_prob`` is linear in the value, so a
    straight-through sample has the exact gradient of the entropy.

    **A range of sizes**, ``k=(low, high)`` with logits: the Bernoulli units conditioned on :math:`low \le \sum_i x_i
    \le high`; use ``(0, k)`` for at most k ones. Everything above holds. The size of a draw is random, with the
    probabilities ``size_probs``, and adding a constant to the logits shifts it. ``k`` and ``largest_k`` are the ends of
    the range. ``enumerate_support`` lists the vectors by size and then in lexicographic order; ``sample_indices`` needs
    a single size.

    **A prior over the size**, ``k=(low, high, log_prior)``: size m has the probability ``exp(log_prior[..., m -
    low])``, whatever the logits, and given its size x is conditional Poisson. Adding a constant to the logits then
    changes nothing. ``log_prior`` is normalised automatically, may contain ``-inf``, and has a gradient. Everything is
    exact::

        log_prior = -0.5 * torch.arange(11.0)  # 0 to 10 ones; each further one costs half a nat
        ConditionalPoisson(logits=torch.zeros(100), k=(0, 10, log_prior))

    Args:
        probs: Inclusion probabilities ``(..., n)`` in [0, 1], each row with an integer sum; 0 and 1 are legal.
        logits: Natural parameters ``(..., n)``; ``-inf`` excludes a unit, ``inf`` includes it.
        k: Number of ones, an int or an integer tensor that broadcasts with the batch shape. Required with ``logits``.
            With ``logits`` it may also be a range ``(low, high)`` of ints or integer tensors, or a range of ints with a
            prior over the size, ``(low, high, log_prior)``, where the log-probabilities ``(..., high - low + 1)``
            broadcast with the batch shape.
        validate_args: Whether to check the contents of tensors.

    Raises:
        TypeError: If an argument has the wrong type or dtype.
        ValueError: If both or neither of ``probs`` and ``logits`` are given, a range of sizes is given with ``probs``,
            or shapes or values are out of range.

    References:
        [1] Chen, Dempster, Liu (1994), "Weighted finite population sampling to maximize entropy", Biometrika 81(3).
        [2] Ahmed, Zeng, Niepert, Van den Broeck (2023), "SIMPLE: a gradient estimator for k-subset sampling":
            straight-through gradients with these inclusion probabilities.

    Example:
        >>> design = ConditionalPoisson(logits=torch.tensor([0.0, 0.0, 1.0]), k=2)
        >>> design.mean
        tensor([0.5777, 0.5777, 0.8446])
        >>> at_most_two = ConditionalPoisson(logits=torch.tensor([0.0, 0.0, 1.0]), k=(0, 2))
        >>> at_most_two.size_probs
        tensor([0.0823, 0.3882, 0.5295, 0.0000])
        >>> prior = torch.tensor([0.5, 0.25, 0.25]).log()
        >>> ConditionalPoisson(logits=torch.tensor([0.0, 0.0, 1.0]), k=(0, 2, prior)).mean
        tensor([0.1974, 0.1974, 0.3552])
    """

    _relaxes = False
    log_prior: Tensor | None = None  # the log-prior of the size as given, with the batch shape `(..., high - low + 1)`

    def __init__(
        self,
        probs: Tensor | None = None,
        logits: Tensor | None = None,
        k: int | Tensor | tuple[int | Tensor, int | Tensor] | tuple[int, int, Tensor] | None = None,
        *,
        validate_args: bool | None = None,
    ) -> None:
        size: Any = k
        if isinstance(k, tuple) and [type(end) for end in k] == [int, int] and k[0] == k[1]:
            size = k[0] if probs is None else k
        super().__init__(probs, logits, size, validate_args=validate_args)

    def _with_sizes(self, param: Tensor, k: Any) -> Tensor:
        if not isinstance(k, tuple):
            return super()._with_sizes(param, k)
        if self.parameter_name == "probs":
            raise ValueError(f"a range of sizes needs `logits`, but got `probs` with k={k!r}")
        low, high = checked_range(k[:2] if len(k) == 3 else k, param.shape[-1])
        if len(k) == 3:
            param, self.log_prior = broadcast_with_prior(param, k)
        self._size_varies = True
        param, high = with_size("logits", param, high)
        param, self._low = with_size("logits", param, low)
        self._high = high.expand(param.shape[:-1]) if isinstance(high, Tensor) else high
        return param

    @lazy
    def _size(self) -> Any:
        """``k`` as an int if it is known to be the same in all rows, else as a tensor; a range as a pair of these."""
        if not self._size_varies:
            return self._low
        low, high = self._low, self._high
        if isinstance(low, Tensor) or isinstance(high, Tensor):
            return SizeRange(self._k, self._largest_k)
        return SizeRange(low, high) if self.log_prior is None else SizePrior(low, high, self.log_prior)

    @property
    def _law(self) -> Any:
        """The module with the law of this kind of size."""
        return law if self.log_prior is None else size_prior

    def _validate_contents(self) -> None:
        low, high, n = self._k, self._largest_k, self.event_shape[0]
        if self._size_varies and not ((low >= 0) & (low <= high) & (high <= n)).all():
            raise ValueError(
                f"`k` must satisfy 0 <= low <= high <= n, but got low from {low.min()} to {low.max()} and high from "
                f"{high.min()} to {high.max()} with n={n}"
            )
        super()._validate_contents()
        self._validate_infinite_logits()
        if self.log_prior is not None and not (size_prior.log_size_law(self._wide, self._size) <= 0).any(-1).all():
            raise ValueError(
                "each row of `k[2]`, the log-probabilities of the sizes, must be below inf and must give a positive "
                f"probability to a size that the logits allow, but got {self.log_prior}"
            )

    @lazy
    def _support(self) -> constraints.Constraint:
        return k_hot(self._size.low, self._size.high) if self._size_varies else super()._support

    @lazy
    def _logits(self) -> Tensor:
        """Natural parameters; if they were computed from ``probs``, their mean is 0."""
        probs, known = self._probs, vars(self).get("_log_odds")
        return solve_logits(probs, self._size, log_odds=known).to(probs.dtype)

    @lazy
    def _probs(self) -> Tensor:
        return self._inclusion.to(self._wide.dtype, copy=True)

    @lazy
    def _inclusion(self) -> Tensor:
        """``probs`` in float64, computed from ``logits``. Not shared with users, so other results may be made of it."""
        return cast(Tensor, self._law.inclusion_probabilities(self._logits, self._size, self._kept))

    def _pairwise_inclusion(self) -> Tensor:
        mean = self._probs.double() if self.parameter_name == "probs" else self._inclusion
        return cast(Tensor, self._law.pairwise_inclusion(self._logits, self._size, mean))

    def _covariance_matrix(self) -> Tensor:
        return cast(Tensor, self._law.covariance(self._logits, self._size))

    @property
    @entry
    def size_probs(self) -> Tensor:
        """P(sum of x = s) for s = 0, ..., n, ``(..., n + 1)``, differentiable; 1 at ``k`` if the size is fixed."""
        if not self._size_varies:
            size = torch.arange(self.event_shape[0] + 1, device=self.parameter.device)
            return (size == self._k.unsqueeze(-1)).to(self.dtype)
        return self._rounded(self._law.size_probabilities(self._logits, self._size))

    def _mode(self) -> Tensor:
        """The most probable vector, which has the k largest logits.

        In a range, k is the number of positive logits, or the nearer end. A prior over the size is taken into account.
        """
        if not self._size_varies:
            return topk_mask(self._wide, self._size)
        if self.log_prior is not None:
            return topk_mask(self._wide, size_prior.mode(self._logits, self._size))
        positive = (self._wide.detach() > 0).sum(-1)
        return topk_mask(self._wide, positive.maximum(self._k).minimum(self._largest_k))

    def _sample(self, shape: Size, generator: torch.Generator | None) -> Tensor:
        return cast(Tensor, self._law.sample(self._logits, self._size, shape, generator, self._kept))

    def _log_prob(self, value: Tensor) -> Tensor:
        return cast(Tensor, self._law.log_prob(self._logits, self._size, value, self._kept))

    def _entropy(self) -> Tensor:
        if self.parameter_name == "probs":
            return largest_entropy(self._probs, self._logits, self._size, self._kept)
        known = vars(self).get("_inclusion")
        return cast(Tensor, self._law.entropy(self._logits, self._size, self._kept, known))
