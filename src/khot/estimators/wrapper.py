"""The shared part of the pathwise estimators: draws and scores of a design, and a gradient attached to values."""

from collections.abc import Callable
from inspect import signature
from typing import Any, Literal, cast

import torch
from pyro.distributions import MaskedDistribution, TorchDistribution
from torch import Tensor
from torch.autograd import Function
from torch.distributions import Distribution, Independent, constraints, kl_divergence, register_kl
from typing_extensions import Self

from khot._contents import looks_at_contents
from khot._shapes import broadcast_shapes
from khot._validation import check_flag, check_positive_contents, checked_positive, described
from khot.distributions import SamplingDesign
from khot.distributions.base import KHotDistribution, unrounded
from khot.kernels.exact.rows import compute_dtype
from khot.kernels.operators.autograd import wants_gradient

# How far rounding may separate the inclusion probabilities of two laws, relative to their size, in units of eps; at
# least that of float32, because its results are also compared in float64, and at most 0.05 in half types.
ROUNDING = 64.0
SMALLEST_TOLERANCE = 1e-6
LARGEST_TOLERANCE = 0.05

Scorer = SamplingDesign | Literal["none"] | None


class DesignWrapper(KHotDistribution):
    """A sampling design whose draws carry a gradient: a Pyro distribution with ``rsample``.

    A subclass defines ``_rsample(shape, generator)``. A tensor among its own attributes starts with
    ``batch_shape``. Arguments and errors are those of :class:`StraightThrough`.
    """

    arg_constraints: dict[str, constraints.Constraint] = {}
    has_rsample = True
    # For a design without log_prob: a law that can score its draws instead, and a description of it.
    stand_in = "ConditionalPoisson(probs=design.mean)"
    stand_in_is = "a design with the same inclusion probabilities"

    def __init__(self, design: SamplingDesign, log_prob: Scorer = None, validate_args: bool | None = None) -> None:
        if not isinstance(design, SamplingDesign):
            advice = "; wrap it before `to_event`" if isinstance(design, Independent) else ""
            got = f"{described(design, SamplingDesign)}{advice}"
            raise TypeError(f"`design` must be a khot.distributions.SamplingDesign, but got {got}")
        given: Any = log_prob
        if isinstance(log_prob, SamplingDesign):
            if log_prob.shape() != design.shape():
                raise ValueError(
                    f"`log_prob` must have the shape of `design`, {tuple(design.shape())}, "
                    f"but has {tuple(log_prob.shape())}"
                )
        elif not (given is None or (isinstance(given, str) and given == "none")):
            got = described(given, SamplingDesign) if isinstance(given, type) else repr(given)
            raise TypeError(f"`log_prob` must be None, a SamplingDesign or 'none', but got {got}")
        if validate_args is None:
            validate_args = design._validate_args
        check_flag("validate_args", validate_args, optional=True)
        self.design = design
        # The law whose `log_prob` scores a draw; None for a score of 0.
        self.scorer = None if isinstance(log_prob, str) else log_prob or design
        self._provenance = design._provenance.union(() if self.scorer is None else self.scorer._provenance)
        super().__init__(design.batch_shape, design.event_shape, validate_args=validate_args)
        if self._validate_args and isinstance(log_prob, SamplingDesign) and log_prob is not design:
            _check_sizes(design, log_prob)
            _check_marginals(design, log_prob)

    def _checked_softness(self, name: str, value: float | Tensor) -> float | Tensor:
        """A positive number, or a tensor that broadcasts to the batch shape."""
        softness = checked_positive(name, value, self.batch_shape)
        if self._validate_args:
            check_positive_contents(name, softness)
        return softness

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.design})"

    @property
    def parameter(self) -> Tensor:  # type: ignore[override]
        return self.design.parameter

    @property
    def dtype(self) -> torch.dtype:  # type: ignore[override]
        return self.design.dtype

    @property
    def _wide(self) -> Tensor:  # type: ignore[override]
        return unrounded(self.design).parameter

    def _unrounded(self) -> Self:
        design = unrounded(self.design)
        return (
            self if design is self.design else self._with(design=design, scorer=self.scorer and unrounded(self.scorer))
        )

    def _validate_parameters(self) -> None:
        """Checks nothing: the designs were checked when they were made."""

    @property
    def _support(self) -> constraints.Constraint:
        return cast(constraints.Constraint, self.design.support)

    @property
    def _mean(self) -> Tensor:
        return self.design.mean

    @property
    def _variance(self) -> Tensor:
        return self.design.variance

    def _mode(self) -> Tensor:
        return self.design.mode

    def _enumerated_support(self, expand: bool) -> Tensor:
        raise NotImplementedError(
            f"{type(self).__name__} has no enumerate_support: to enumerate the site, use the design without the "
            "estimator, or khot.infer.subset_categorical(design)"
        )

    def _score(self, value: Tensor) -> Tensor:
        """Score of a k-hot value, differentiable in the value if the log_prob of the scoring design is."""
        self._check_sample(value)
        if self.scorer is None:
            return value.new_zeros(broadcast_shapes(value.shape[:-1], self.batch_shape))
        return self._delegate("log_prob", value)

    def _entropy(self) -> Tensor:
        if self.scorer is None:
            raise NotImplementedError(f"{type(self).__name__}(log_prob='none') drops the entropy of its draws")
        return self._delegate("entropy")

    def _delegate(self, method: str, *args: Any) -> Tensor:
        try:
            return getattr(self.scorer, method)(*args)
        except NotImplementedError as error:
            name = type(self).__name__
            by_another_law = f"{name}(..., log_prob={self.stand_in}), {self.stand_in_is}"
            raise NotImplementedError(
                f"{error}. For an ELBO, choose how draws are scored: {by_another_law}, or {name}(..., "
                "log_prob='none'), which scores 0 and drops the entropy of the draws"
            ) from error


def _check_sizes(design: SamplingDesign, scorer: SamplingDesign) -> None:
    if not looks_at_contents(design.k, scorer.k):
        return
    for wanted, got in ((design.k, scorer.k), (design.largest_k, scorer.largest_k)):
        got = got.to(wanted.device)
        wrong = wanted != got
        if wrong.any():
            raise ValueError(
                f"`log_prob` must have the k of `design`, {wanted[wrong][0]}, but has {got[wrong][0]} in the same row"
            )


def _check_marginals(design: SamplingDesign, scorer: SamplingDesign) -> None:
    """Compares inclusion probabilities, if neither law has to solve an equation for them."""
    try:
        wanted, got = design.mean.detach(), scorer.mean.detach()
    except NotImplementedError:
        return
    if not looks_at_contents(wanted, got):
        return
    eps = max(torch.finfo(wanted.dtype).eps, torch.finfo(got.dtype).eps)
    relative = min(max(ROUNDING * eps, SMALLEST_TOLERANCE), LARGEST_TOLERANCE)
    wanted, got = wanted.double(), got.double().to(wanted.device)
    difference = (wanted - got).abs()
    # Relative to each entry and to the row's mean, k / n: in long rows all probabilities are small.
    wrong = ~(difference <= relative * (wanted + wanted.mean(-1, keepdim=True)))
    if wrong.any():
        raise ValueError(
            f"`log_prob` must have the inclusion probabilities of `design`, but they differ by up to "
            f"{difference[wrong].max():.3g} (rounding may explain only {relative:.1g} of their size); "
            "ConditionalPoisson(probs=design.mean) has the same"
        )


def check_estimator(name: str, value: Any) -> None:
    """Checks for a function that wraps a design, such as an estimator class; neither a design class nor an instance."""
    got = repr(value)
    if isinstance(value, DesignWrapper):
        got += f": pass the class, {type(value).__name__}, or a partial of it"
    elif isinstance(value, type) and issubclass(value, KHotDistribution):
        if "design" in signature(value).parameters:
            return
        got = f"the class {value.__name__}, which does not take a design"
    elif callable(value) and not isinstance(value, Distribution):
        return
    raise TypeError(f"`{name}` must be a function of a design, such as ReinMax or StraightThrough, but got {got}")


def wrap_latents(law: Distribution, wrap: Callable[[Any], TorchDistribution]) -> TorchDistribution:
    """``wrap`` applied to the design inside a law that is masked or made independent over batch dimensions."""
    if isinstance(law, Independent):
        return wrap_latents(law.base_dist, wrap).to_event(law.reinterpreted_batch_ndims)
    if isinstance(law, MaskedDistribution):
        return wrap_latents(law.base_dist, wrap).mask(law._mask)
    return wrap(law)


def unrounded_law(law: Distribution) -> Distribution:
    """The law with results in float32, if they are in a half type, for further computations."""
    return wrap_latents(law, lambda latent: unrounded(latent) if isinstance(latent, KHotDistribution) else latent)


def scores_of(law: Distribution, values: Tensor) -> tuple[Tensor, torch.dtype]:
    """``law.log_prob(values)``, in float32 if the law would round it to a half type, and the dtype of the law."""
    log_prob = unrounded_law(law).log_prob(values)
    dtype = getattr(base_law(law), "dtype", log_prob.dtype)
    return wide(log_prob), dtype


def wide(x: Tensor) -> Tensor:
    """x, converted to float32 if it has a half type."""
    return x.to(compute_dtype(x))


def base_law(law: Any) -> Any:
    """The law inside one that is masked, or made independent over batch dimensions."""
    while isinstance(law, (Independent, MaskedDistribution)):
        law = law.base_dist
    return law


@register_kl(DesignWrapper, Distribution)
def _kl_wrapper(p: DesignWrapper, q: Distribution) -> Tensor:
    if p.scorer is None:
        raise NotImplementedError(
            f"{type(p).__name__}(log_prob='none') has no divergence: it drops the entropy of its draws"
        )
    return kl_divergence(p.scorer, q)


@register_kl(SamplingDesign, DesignWrapper)
def _kl_to_wrapper(p: SamplingDesign, q: DesignWrapper) -> Tensor:
    if q.scorer is None:
        raise NotImplementedError(
            f"there is no divergence to {type(q).__name__}(log_prob='none'): it gives no log-probability"
        )
    return kl_divergence(p, q.scorer)


class _Substitute(Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(value: Tensor, x: Tensor, pull_back: Callable[..., Tensor], *constants: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, _, ctx.pull_back, *constants = inputs
        ctx.save_for_backward(*constants)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        constants = ctx.saved_tensors  # only once: a checkpoint does not allow a second read
        return None, ctx.pull_back(grad_output, *constants), None, *(None,) * len(constants)


def substitute_gradient(value: Tensor, x: Tensor, pull_back: Callable[..., Tensor], *constants: Tensor) -> Tensor:
    """``value`` as if it were a function of ``x`` whose cotangents g are pulled back to ``pull_back(g, *constants)``.

    If ``pull_back`` is differentiable in g and in constants that have a gradient, so is the result, to any order.
    """
    if torch.compiler.is_compiling() and not wants_gradient(x):
        return value.detach()  # Dynamo cannot trace a Function with variadic arguments if nothing needs a gradient
    return _Substitute.apply(value.detach(), x.expand(value.shape), pull_back, *constants)
