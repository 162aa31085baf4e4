"""ReinMax: a hard k-hot sample in the forward pass, a Jacobian of second-order accuracy in the backward pass."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from khot import relaxations
from khot._notes import feels_between_vertices
from khot._validation import check_draw, check_function
from khot.distributions import ConditionalPoisson, PhantomUnit, SamplingDesign
from khot.distributions.base import column, unrounded
from khot.distributions.design import Relaxation, relaxes_logits
from khot.distributions.entry import entry
from khot.distributions.phantom_unit import with_phantom
from khot.distributions.sizes import size_of, size_varies
from khot.kernels.links.base import Link
from khot.laws.conditional_poisson import inclusion_probabilities
from khot.laws.inverse import times_covariance_at
from khot.laws.size_range import sizes_around
from khot.relaxations import sigmoid_topk
from khot.relaxations.linked import link_of, scale_of

from .wrapper import DesignWrapper, Scorer, substitute_gradient, wide


@feels_between_vertices
class ReinMax(DesignWrapper):
    r"""A sampling design whose draws carry a gradient of second-order accuracy.

    .. math:: x &\sim \text{design}, \quad \frac{\partial x}{\partial \theta} := 2 J(\pi_1) - \tfrac12 J(\pi_0), \\
        \pi_1 &= \tfrac12 (x + \pi_\tau), \\ J(\pi) &= \frac1T \Big(\mathrm{diag}(d) - \frac{d d^\top}{\sum_i d_i}\Big)

    :math:`\pi_0` are the inclusion probabilities that the relaxation computes from the logits :math:`\theta` at the
    softness T of the design, and :math:`\pi_\tau` those at ``temperature`` times T. :math:`d = F'(F^{-1}(\pi))` is the
    slope of the relaxation's link, which is :math:`\pi(1-\pi)` for :func:`~khot.sigmoid_topk`: J is the Jacobian of the
    relaxation where its value is :math:`\pi`. ``rsample`` returns exact k-hot vectors.

    With the logistic link, ``temperature = 1``, n = 2 and k = 1 the gradient of E[f(x)] is exact for quadratic f.
    Otherwise it is biased; for n > 2 there is a small bias even for linear f, because :math:`dd^\top / \sum d` is not
    linear in x. In return it takes the curvature of f into account, which :class:`~khot.StraightThrough` ignores. The
    method rests on an identity for quadratic d, :math:`E[2d(\pi_1) - \frac12 d(\pi_0)] = d(\pi_0)`. It holds for the
    logistic link, and for softmax, for which this is the estimator of Liu et al. ReinMax is the recommended estimator
    for a k-hot site in Pyro.

    With another link the bias can exceed that of straight-through. In that case pass ``relaxation=sigmoid_topk``: J is
    then taken with respect to the log-odds of :math:`\pi_0`, whatever map they come from, which restores second-order
    accuracy. A ``temperature`` above 1 reduces variance and increases bias.

    On :class:`~khot.ConditionalPoisson`, whose logits are natural parameters, J is the covariance of the design with
    inclusion probabilities :math:`\pi`. :math:`J(\pi_1)` needs the logits of another design for every draw, found by
    solving an equation: this is exact, but takes several times as long as a draw. With a range of sizes, J is the
    covariance under that range, and the size is learned too.

    On :class:`~khot.PhantomUnit`, x and :math:`\pi` include the phantom, which keeps their sum fixed, and the size is
    learned too. Where their sum is an integer, the change of the size has the straight-through gradient. The logits are
    log-odds: J is that of sigmoid_topk, or the covariance of a wrapped ConditionalPoisson.

    Gradients go to the logits and to the temperature of the design, but not to ``temperature``, which only enters
    :math:`\pi_1`. Second derivatives are those of the estimate.

    Args:
        design, log_prob, validate_args: See :class:`~khot.StraightThrough`.
        temperature: Softness of :math:`\pi_\tau` as a multiple of the design's own; a positive number, or a tensor that
            broadcasts to the batch shape.
        relaxation: The map whose Jacobian to use, for designs that do not know it: those made from ``probs``, such as
            ``probs=relaxation(logits, k, T)``, and those whose mean is not a relaxation of their logits. The gradient
            with respect to ``probs``, passed on through that relaxation, is the one above. Overrides the design's own.

    Raises:
        ValueError: With validation on, if the two designs differ in size or inclusion probabilities.
        NotImplementedError: If the design has a prior over its size, if it has a range of sizes and a relaxation is
            given, if it has no relaxation and none is given, or if the slope of the relaxation at given probabilities
            is not known, which takes a :class:`~khot.Link`. The links of the sparse maps do not qualify, because their
            slope vanishes at the cap.

    References:
        [1] "Differentiable top-k: from one-hot to k-hot", algorithm 5.
        [2] Liu, Dong, Liu, Yu, Gao (2023), "Bridging discrete and backpropagation: straight-through and beyond".

    Example:
        >>> logits = torch.zeros(2, requires_grad=True)
        >>> x = ReinMax(Pivotal(logits=logits, k=1)).rsample()
        >>> torch.autograd.grad(x[0], logits)[0]  # 2 * 3/4 - 1/2 = 1 times that of the probability
        tensor([ 0.1250, -0.1250])
    """

    def __init__(
        self,
        design: SamplingDesign,
        temperature: float | Tensor = 1.0,
        log_prob: Scorer = None,
        *,
        relaxation: Relaxation | None = None,
        validate_args: bool | None = None,
    ) -> None:
        super().__init__(design, log_prob, validate_args)
        self.temperature = self._checked_softness("temperature", temperature)
        if relaxation is not None:
            check_function("relaxation", relaxation, "(scores, k, temperature)")
        if isinstance(design, PhantomUnit):
            if relaxation is None and relaxes_logits(design) and not isinstance(design.wrapped, ConditionalPoisson):
                relaxation = sigmoid_topk  # the logits are log-odds
            design = design.wrapped
        self.relaxation = relaxation
        if isinstance(design, ConditionalPoisson) and design.log_prior is not None:
            raise NotImplementedError(
                "ReinMax needs the covariance at other inclusion probabilities, which is not known under a prior over "
                "the size: use khot.score_function or khot.StraightThrough, or k=(low, high) in the guide"
            )
        if relaxation is not None and size_varies(design):
            raise NotImplementedError(
                f"`relaxation` must be None for a {type(design).__name__} with a range of sizes, as a relaxation has a "
                "Jacobian only for a fixed size: without it, ReinMax uses the covariance of the design"
            )
        if relaxation is not None or not isinstance(design, ConditionalPoisson):
            _link_for(design, relaxation)  # validates the argument early

    def _rsample(self, shape: torch.Size, generator: torch.Generator | None) -> Tensor:
        return self.attach_gradient(self.design.sample(shape, generator=generator))

    @entry
    def attach_gradient(self, value: Tensor) -> Tensor:
        """``value``, a draw ``(*sample_shape, *batch_shape, n)`` from any source, with this estimator's gradient."""
        check_draw("value", value, self)
        value = value.detach()
        law = unrounded(self)
        if law is not self:
            return law.attach_gradient(wide(value)).to(value.dtype)
        if isinstance(self.design, PhantomUnit):
            return self._attach_with_phantom(self.design, value)
        if self.relaxation is None and isinstance(self.design, ConditionalPoisson):
            tangent = _covariance_tangent(self.design)
        else:
            tangent = _link_tangent(self.design, self.relaxation)
        unchanged = isinstance(self.temperature, (int, float)) and self.temperature == 1
        softened = tangent.probs if unchanged else tangent.softened(self.temperature)
        shifted = (value + softened) / 2
        sizes = (self.design.k, self.design.largest_k) if size_varies(self.design) else (self.design.k,)
        doubled = substitute_gradient(value, tangent.scores, tangent.pull_back, shifted, *sizes)
        return doubled - (tangent.probs - tangent.probs.detach()) / 2

    def _attach_with_phantom(self, design: PhantomUnit, value: Tensor) -> Tensor:
        wrapped = design.wrapped
        slope = (wrapped.probs * (1 - wrapped.probs)).detach()
        # Where the sum is an integer, the phantom is certain and cannot offset a change of the sum: its gradient
        # is that of straight-through. Elsewhere the sum including the phantom does not change.
        total = wrapped.probs.sum(-1, keepdim=True)
        share = slope / slope.sum(-1, keepdim=True).clamp(min=torch.finfo(slope.dtype).tiny)
        change = share * (total - total.detach())
        fixed = design.design_class(
            probs=wrapped.probs - change, k=wrapped.k, validate_args=False, **design.design_kwargs
        )
        estimator = ReinMax(fixed, self.temperature, relaxation=self.relaxation)
        return (estimator.attach_gradient(with_phantom(design, value)) + change)[..., :-1].to(value.dtype)


class _Tangent(NamedTuple):
    """A map at its scores, with twice its Jacobian J at another value."""

    scores: Tensor  # the variables of the Jacobian
    probs: Tensor  # value of the map
    softened: Callable[[float | Tensor], Tensor]  # its value at a temperature
    pull_back: Callable[..., Tensor]  # (g, probs, k) -> 2 J(probs) g, with both ends of a range of sizes in place of k


def _covariance_tangent(design: ConditionalPoisson) -> _Tangent:
    logits, k = design.logits, size_of(design)

    def softened(temperature: "float | Tensor") -> Tensor:
        return inclusion_probabilities(logits / column(temperature), k).to(logits.dtype)

    return _Tangent(logits, design.mean, softened, _pull_back_covariance)


def _pull_back_covariance(g: Tensor, probs: Tensor, k: Tensor, largest_k: Tensor | None = None) -> Tensor:
    sizes = k if largest_k is None else sizes_around(probs, k, largest_k)
    return 2 * times_covariance_at(probs, sizes, g).to(g.dtype)


def _link_tangent(design: SamplingDesign, relaxation: Relaxation | None) -> _Tangent:
    link = _link_for(design, relaxation)
    if relaxation is None:
        relaxation, probs, logits, softness = design.relaxation, design.probs, design.logits, design.temperature
        finite = logits.masked_fill(logits.isinf(), 0) if isinstance(softness, Tensor) else logits
        scores = finite / column(scale_of(relaxation, softness))
    else:  # scores for which the relaxation gives these probabilities
        probs, softness = design.mean, 1.0
        constant, inside = probs.detach(), (probs > 0) & (probs < 1)  # units of probability 0 and 1 get no gradient
        certain = link.inverse(constant)
        scores = link.inverse(torch.where(inside, probs, 0.5)).where(inside, certain)
        logits = scale_of(relaxation, softness) * certain
        probs = probs.where(inside, constant)

    def softened(temperature: "float | Tensor") -> Tensor:
        return relaxation(logits, design.k, temperature * softness)

    return _Tangent(scores, probs, softened, partial(_pull_back_mask, link=link))


def _pull_back_mask(g: Tensor, probs: Tensor, k: Tensor, *, link: Link) -> Tensor:
    slope = link.slope_at(probs)
    total = slope.sum(-1, keepdim=True)
    mean = (slope * g).sum(-1, keepdim=True) / total.clamp(min=torch.finfo(total.dtype).tiny)
    return 2 * slope * (g - mean)


def _link_for(design: SamplingDesign, relaxation: Relaxation | None) -> Link:
    if relaxation is None and not relaxes_logits(design):
        raise NotImplementedError(
            f"ReinMax needs the relaxation that made the inclusion probabilities, but this {type(design).__name__} "
            "has none: pass it, as in ReinMax(design, relaxation=sigmoid_topk)"
        )
    wanted = design.relaxation if relaxation is None else relaxation
    link = link_of(wanted)
    if link is None or link.compact:
        having = [name for name in relaxations.__all__ if _has_slope(getattr(relaxations, name))]
        raise NotImplementedError(
            f"ReinMax needs the slope of the relaxation at any probabilities, which {wanted!r} does not provide; "
            f"{', '.join(having)} and functools.partial(capped_simplex_map, link=...) have one, but the slope of "
            "sparse links vanishes at the cap"
        )
    return link


def _has_slope(relaxation: Callable[..., object]) -> bool:
    link = link_of(relaxation)
    return link is not None and not link.compact
