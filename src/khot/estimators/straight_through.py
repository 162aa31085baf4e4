"""Straight-through: a hard k-hot sample forward, the inclusion probabilities backward."""

from typing import Any, Literal

import torch
from pyro.distributions import TorchDistribution
from torch import Size, Tensor
from torch.distributions import Distribution, constraints, kl_divergence, register_kl
from torch.types import _size as SizeLike

from khot.distributions import SamplingDesign


class StraightThrough(TorchDistribution):
    r"""A sampling design whose draws carry the gradient of its inclusion probabilities.

    .. math:: x \sim \text{design}, \qquad \frac{\partial x}{\partial \theta} := \frac{\partial \pi}{\partial \theta},
        \quad \pi = E[x]

    ``rsample`` returns exact k-hot vectors. The gradient of E[f(x)] that follows is exact for linear f, whatever the
    design, and biased otherwise (to first order in the curvature of f); its variance is small. On
    :class:`~khot.ConditionalPoisson` it is the SIMPLE estimator.

    A Pyro distribution with ``has_rsample``: it takes the place of the design in a guide or a model and trains under
    Trace_ELBO and TraceMeanField_ELBO. These need the log-probability of the draw. Where the design has none, say which
    term the ELBO shall use: ``log_prob=`` another design with the same inclusion probabilities, such as
    ``ConditionalPoisson(probs=pi)``, or ``log_prob="none"``, which scores 0 and thereby drops the entropy of the draw
    from the ELBO.

    Args:
        design: The design to draw from.
        log_prob: What scores a draw: None for the design itself, another design of the same shape, or ``"none"`` for 0.
        validate_args: Whether to check values given to ``log_prob``; the designs' own setting if None.

    Raises:
        TypeError: If ``design`` is not a SamplingDesign, or ``log_prob`` is none of the above.
        ValueError: If the two designs differ in shape.

    References:
        [1] Bengio, Leonard, Courville (2013), "Estimating or propagating gradients through stochastic neurons",
            arXiv:1308.3432.
        [2] "Differentiable top-k: from one-hot to k-hot", the pi-straight-through estimator.
        [3] Ahmed, Zeng, Niepert, Van den Broeck (2023), "SIMPLE: a gradient estimator for k-subset sampling".

    Example:
        >>> logits = torch.zeros(4, requires_grad=True)
        >>> x = StraightThrough(ConditionalPoisson(logits=logits, k=2)).rsample()
        >>> torch.autograd.grad(x[0], logits)[0]
        tensor([ 0.2500, -0.0833, -0.0833, -0.0833])
    """

    arg_constraints: dict[str, constraints.Constraint] = {}
    has_rsample = True

    def __init__(
        self,
        design: SamplingDesign,
        log_prob: SamplingDesign | Literal["none"] | None = None,
        validate_args: bool | None = None,
    ) -> None:
        if not isinstance(design, SamplingDesign):
            raise TypeError(f"`design` must be a khot.distributions.SamplingDesign, but got {type(design).__name__}")
        if isinstance(log_prob, SamplingDesign):
            if log_prob.shape() != design.shape():
                raise ValueError(
                    f"`log_prob` must have the shape of `design`, {tuple(design.shape())}, "
                    f"but has {tuple(log_prob.shape())}"
                )
        elif log_prob not in (None, "none"):
            raise TypeError(f"`log_prob` must be None, a SamplingDesign or 'none', but got {log_prob!r}")
        self.design = design
        self.scorer = None if log_prob == "none" else design if log_prob is None else log_prob
        super().__init__(design.batch_shape, design.event_shape, validate_args=validate_args)

    def expand(self, batch_shape: SizeLike, _instance: Any = None) -> "StraightThrough":
        new = self._get_checked_instance(StraightThrough, _instance)
        new.design = self.design.expand(batch_shape)
        new.scorer = None if self.scorer is None else self.scorer.expand(batch_shape)
        super(StraightThrough, new).__init__(Size(batch_shape), self.event_shape, validate_args=False)
        new._validate_args = self._validate_args
        return new

    @constraints.dependent_property(is_discrete=True, event_dim=1)
    def support(self) -> constraints.Constraint:
        return self.design.support

    @property
    def mean(self) -> Tensor:
        return self.design.mean

    @property
    def variance(self) -> Tensor:
        return self.design.variance

    @property
    def mode(self) -> Tensor:
        return self.design.mode

    def rsample(self, sample_shape: SizeLike = torch.Size()) -> Tensor:
        mean = self.design.mean
        return self.design.sample(sample_shape) + (mean - mean.detach())

    def log_prob(self, value: Tensor) -> Tensor:
        """Score of a k-hot value, differentiable in the value too where the scoring design's log_prob is."""
        if self._validate_args:
            self._validate_sample(value)
        if self.scorer is None:
            return value.new_zeros(torch.broadcast_shapes(value.shape[:-1], self.batch_shape))
        return self._delegate("log_prob", value)

    def entropy(self) -> Tensor:
        if self.scorer is None:
            raise NotImplementedError("StraightThrough(log_prob='none') drops the entropy of its draws")
        return self._delegate("entropy")

    def _delegate(self, method: str, *args: Any) -> Tensor:
        try:
            return getattr(self.scorer, method)(*args)
        except NotImplementedError as error:
            raise NotImplementedError(
                f"{error}. Under an ELBO, say which term it shall use: StraightThrough(design, "
                "log_prob=ConditionalPoisson(probs=design.mean)), a law with the same inclusion probabilities, or "
                "StraightThrough(design, log_prob='none'), which scores 0 and drops the entropy of the draws"
            ) from error


@register_kl(StraightThrough, Distribution)
def _kl_straight_through(p: StraightThrough, q: Distribution) -> Tensor:
    if p.scorer is None:
        raise NotImplementedError(
            "StraightThrough(log_prob='none') has no divergence: it drops the entropy of its draws"
        )
    return kl_divergence(p.scorer, q)
