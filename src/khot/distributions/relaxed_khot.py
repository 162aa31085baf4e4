r"""Relaxed k-hot vectors, the k-hot counterpart of RelaxedOneHotCategorical, and their straight-through form.

The density. A sample is y = sigmoid(z) with z = (x - t) / T, for scores x = theta + g with Gumbel noise g and the
threshold t. Change variables from x to t and z up to a constant: the Jacobian is T^(n - 1), and t integrates out:

.. math:: \int \prod_i p_{\mathrm{Gumbel}}(t + T z_i - \theta_i) \, dt
    = \Gamma(n) \prod_i \mathrm{softmax}(\theta - T z)_i

The Jacobian from z, up to a constant, to the first n - 1 entries of y, whose sum is given, is that of
``biject_to(capped_simplex(k))``: log|det J| = sum log d_i - log sum d_i with d = y (1 - y).
"""

import math
from numbers import Integral
from typing import Any, cast

import torch
from torch import Size, Tensor
from torch.distributions import constraints

from khot._notes import feels_between_vertices
from khot._torch_internals import may_differentiate
from khot._validation import (
    as_int,
    check_draw,
    check_flag,
    check_function,
    check_positive_contents,
    checked_positive,
)
from khot.constraints import capped_simplex
from khot.kernels.operators.autograd import with_derivatives_of
from khot.kernels.random_numbers import log_exponential
from khot.relaxations import sigmoid_topk, topk_mask
from khot.relaxations.log_odds import inside, is_interior, log_odds, log_slope, remember_scores
from khot.relaxations.remembered import Sources

from ._arguments import RANGE_ADVICE, Vector, broadcast_with_k, check_sizes, checked_param, with_size
from .base import KHotDistribution, column, lazy
from .design import Relaxation
from .entry import entry

_RELAXED = Sources()  # the relaxed vectors of straight-through samples


class RelaxedKHot(KHotDistribution):
    r"""A random point of the capped simplex: ``relaxation(logits + g, k, temperature)`` with standard Gumbel noise g.

    ``rsample`` is reparametrised: differentiable in ``logits``, ``temperature`` and ``k``. As the temperature falls to
    0, samples become those of Gumbel top-k. With ``sigmoid_topk`` they have a density in closed form,
    with respect to Lebesgue measure on any n - 1 of the entries, even if k is not an integer:

    .. math:: \log p(y) &= \log \Gamma(n) + (n - 1) \log T \\
        &+ \sum_i \log \mathrm{softmax}(\theta - T \operatorname{logit} y)_i \\
        &- \sum_i \log d_i + \log \sum_i d_i, \quad d_i = y_i (1 - y_i)

    In Pyro it is a proper prior for a latent site on the capped simplex, for NUTS, HMC and continuous autoguides; equal
    logits favour no unit. (An ImproperUniform over the constraint has no samples to start from.)

    These samples lie inside (0, 1): an entry that would round to 0 or 1 is replaced by the nearest number inside. The
    scores of a sample are remembered as long as its memory is in use, as are those of values of
    ``biject_to(capped_simplex(k))``. So the density of a sample is exact, under its own distribution and others, and
    differentiable through the scores; that of the detached sample is the same number. The density of other values,
    such as copies, parts, and samples that were written to, is as accurate as their entries are. In float32 entries do
    not distinguish log-odds above 16.6: at a temperature of 0.05, and with logits a few units apart, the log-density of
    a copy may be off by more than 100. There is no density at an exact 0 or 1, where its limit is 0 or
    infinite: ``log_prob`` raises ValueError, or is ``-inf`` without validation, as for values outside the capped
    simplex. With other relaxations it raises NotImplementedError.

    Args:
        temperature: Positive softness, a number or a tensor that broadcasts to the batch shape.
        logits: Finite log-weights ``(..., n)``.
        k: Sum of a sample, a number in [0, n] or a tensor that broadcasts with the batch shape. At 0 and n samples are
            constant and have no density.
        relaxation: Map ``relaxation(scores, k, temperature)`` onto the capped simplex.
        validate_args: Whether to check the contents of tensors.

    References:
        [1] Maddison, Mnih, Teh (2017), "The Concrete distribution", arXiv:1611.00712: the case of k = 1 and softmax.
        [2] "Differentiable top-k: from one-hot to k-hot", Eqs. (9)-(11): the map.

    Example:
        >>> relaxed = RelaxedKHot(0.5, logits=torch.zeros(4), k=2)
        >>> relaxed.support.check(relaxed.rsample())
        tensor(True)
        >>> relaxed.log_prob(torch.tensor([0.3, 0.5, 0.5, 0.7]))
        tensor(-0.2005)
    """

    arg_constraints = {"logits": Vector(constraints.real)}
    has_rsample = True
    _settings = ("temperature",)

    def __init__(
        self,
        temperature: float | Tensor,
        logits: Tensor,
        k: float | Tensor,
        *,
        relaxation: Relaxation = sigmoid_topk,
        validate_args: bool | None = None,
    ) -> None:
        logits, self.k = checked_param("logits", logits), _checked_sum(k, logits)
        if isinstance(self.k, Tensor):
            logits, self.k = broadcast_with_k("logits", logits, self.k)
        self.parameter, self.parameter_name, self.dtype = logits, "logits", logits.dtype
        batch_shape, event_shape = logits.shape[:-1], logits.shape[-1:]
        check_function("relaxation", relaxation, "(scores, k, temperature)")
        check_flag("validate_args", validate_args, optional=True)
        self.relaxation = relaxation
        self.temperature = checked_positive("temperature", temperature, batch_shape)
        super().__init__(batch_shape, event_shape, validate_args=validate_args)

    @property
    def _size(self) -> float | Tensor:
        return self.k

    def _validate_contents(self) -> None:
        if not self._wide.isfinite().all():
            raise ValueError("`logits` must be finite, but some are infinite: leave out units that are certain")
        check_sizes(self.k, self.event_shape[0])
        check_positive_contents("temperature", self.temperature)

    @constraints.dependent_property(is_discrete=False, event_dim=1)
    @entry
    def support(self) -> constraints.Constraint:
        return cast(constraints.Constraint, self._support)

    @lazy
    def _support(self) -> constraints.Constraint:
        return capped_simplex(self.k)

    def _rsample(self, shape: Size, generator: torch.Generator | None) -> Tensor:
        return self._draw(self._scores(shape, generator))

    def _scores(self, shape: Size, generator: torch.Generator | None) -> Tensor:
        whole = shape + self._batch_shape + self._event_shape
        return self._wide - log_exponential(whole, self._wide.dtype, self._wide.device, generator)

    @entry
    def from_scores(self, scores: Tensor) -> Tensor:
        r"""The draw for given perturbed scores: ``rsample`` with your own noise, such as fixed or shared noise.

        .. math:: \text{scores} = \theta + g, \quad g \text{ standard Gumbel noise}

        Args:
            scores: Perturbed logits ``(*sample_shape, *batch_shape, n)``. Derivatives go through them; scores without
                a gradient get that of ``logits``, as if the noise had been added to the logits.

        Returns:
            Tensor like ``scores``, with the dtype of ``logits`` and the gradient that ``rsample`` has.

        Example:
            >>> RelaxedKHot(0.5, logits=torch.zeros(3), k=1.5).from_scores(torch.tensor([-0.5, 0.0, 0.5]))
            tensor([0.2689, 0.5000, 0.7311])
        """
        check_draw("scores", scores, self)
        scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
        if may_differentiate(self._wide) and not may_differentiate(scores):
            scores = with_derivatives_of(scores, self._wide)
        return self._draw(scores)

    def _draw(self, scores: Tensor) -> Tensor:
        return self._relaxed(scores)

    def _relaxed(self, scores: Tensor) -> Tensor:
        value = self.relaxation(scores, self.k, self.temperature).to(self.dtype)
        if self.relaxation is sigmoid_topk:
            varies = self._varies
            if isinstance(varies, Tensor):
                value = torch.where(varies.unsqueeze(-1), inside(value), value)
            elif varies:
                value = inside(value)
            remember_scores(value, scores, self.k, self.temperature)
        return value

    def _enumerated_support(self, expand: bool) -> Tensor:
        raise NotImplementedError(
            f"{type(self).__name__} has no enumerate_support: to enumerate the site, give it a sampling design such as "
            "ConditionalPoisson"
        )

    @property
    def _varies(self) -> bool | Tensor:
        """Whether samples vary at all."""
        n = self.event_shape[0]
        if isinstance(self.k, Tensor):
            return ((self.k > 0) & (self.k < n)).to(self._wide.device)
        return bool(0 < self.k < n)

    def _score(self, value: Tensor) -> Tensor:
        if self.relaxation is not sigmoid_topk:
            name = getattr(self.relaxation, "__name__", repr(self.relaxation))
            raise NotImplementedError(f"RelaxedKHot has no density with relaxation={name}, only with sigmoid_topk")
        self._check_sample(value)
        if self._checks_contents(value):
            self._check_interior(value)
            return self._log_density(log_odds(value))
        if self._varies is True and self._is_in_support(value) and is_interior(value):
            return self._log_density(log_odds(value))
        inside = self._is_inside(value)
        return self._log_density(log_odds(value, inside), inside)

    def _check_interior(self, value: Tensor) -> None:
        """Checks that values of the support have a density."""
        varies = self._varies
        if not (varies.all() if isinstance(varies, Tensor) else varies):
            raise ValueError(f"a density needs 0 < k < n, but got k={self.k} with n={self.event_shape[0]}")
        if not (self._is_inside(value).all() if isinstance(varies, Tensor) else is_interior(value)):
            raise ValueError(
                "relaxed k-hot vectors have no density where an entry is exactly 0 or 1; a relaxed model needs a "
                "relaxed guide (khot.infer.KHotReparam), and hard data need a sampling design"
            )

    def _is_inside(self, value: Tensor) -> Tensor:
        """Whether a value has a density."""
        return self._support.check(value) & ((value > 0) & (value < 1)).all(-1) & self._varies

    def _log_density(self, z: Tensor, inside: Tensor | None = None) -> Tensor:
        """The log-density of values with given log-odds; ``inside`` says which of them have a density (None: all)."""
        n, temperature = self.event_shape[0], self.temperature
        if isinstance(temperature, Tensor):
            temperature = temperature.to(z.dtype)
        log_temperature = temperature.log() if isinstance(temperature, Tensor) else math.log(temperature)
        log_share, slope = torch.log_softmax(self._wide - column(temperature) * z, -1), log_slope(z)
        log_prob = (log_share - slope).sum(-1) + slope.logsumexp(-1) + (math.lgamma(n) + (n - 1) * log_temperature)
        if inside is not None:
            log_prob = log_prob.masked_fill(~inside, -torch.inf)
        return log_prob


@feels_between_vertices
class RelaxedKHotStraightThrough(RelaxedKHot):
    r"""A k-hot sample with the gradient of the relaxed sample from which it was selected.

    This is the k-hot counterpart of Pyro's RelaxedOneHotCategoricalStraightThrough. ``rsample`` returns exact k-hot
    vectors, distributed as those of Gumbel top-k. Their gradient is that of :class:`RelaxedKHot`, which is biased; a
    lower temperature reduces the bias and increases the variance. The relaxed vector of a sample is remembered, and
    ``log_prob`` is its density. Under an ELBO, use it in both model and guide, or in a guide only if this density may
    replace the probability of the sample.

    Args:
        temperature, logits, relaxation, validate_args: See :class:`RelaxedKHot`; the relaxation keeps the order.
        k: Number of ones, an int or an integer tensor that broadcasts with the batch shape.

    References:
        [1] Jang, Gu, Poole (2017), "Categorical reparameterization with Gumbel-softmax", arXiv:1611.01144.

    Example:
        >>> logits = torch.zeros(4, requires_grad=True)
        >>> x = RelaxedKHotStraightThrough(0.5, logits=logits, k=2).rsample()
        >>> sorted(x.tolist()), torch.autograd.grad(x[0], logits)[0].sum().abs() < 1e-6
        ([0.0, 0.0, 1.0, 1.0], tensor(True))
    """

    def __init__(
        self,
        temperature: float | Tensor,
        logits: Tensor,
        k: int | Tensor,
        *,
        relaxation: Relaxation = sigmoid_topk,
        validate_args: bool | None = None,
    ) -> None:
        _, k = with_size("logits", checked_param("logits", logits), k)
        super().__init__(temperature, logits, k, relaxation=relaxation, validate_args=validate_args)

    def _draw(self, scores: Tensor) -> Tensor:
        relaxed = self._relaxed(scores)
        # Select by the scores, which distinguish entries that round to the same number.
        hard = with_derivatives_of(topk_mask(scores.detach(), cast(Tensor, self.k)).to(relaxed.dtype), relaxed)
        _RELAXED.remember(hard, relaxed)
        return hard

    def _score(self, value: Tensor) -> Tensor:
        source = _RELAXED.find(value)
        if source is not None:
            value = source.made_from.detach() if source.is_constant else source.made_from
        return super()._score(value)


def _checked_sum(k: Any, logits: Tensor) -> float | Tensor:
    if isinstance(k, tuple):
        raise TypeError(f"`k` must be a real number or a torch.Tensor, but got {k!r}; {RANGE_ADVICE}")
    total: Any = capped_simplex(k).k  # which checks everything but the upper limit
    if isinstance(total, Tensor):
        return total
    if total > logits.shape[-1]:
        raise ValueError(f"`k` must satisfy 0 <= k <= n, but got k={k} with n={logits.shape[-1]}")
    return as_int(total) if isinstance(total, Integral) else float(total)  # some relaxations take only integers
