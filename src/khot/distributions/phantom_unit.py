"""Designs of a real-valued size, for inclusion probabilities whose sum need not be an integer."""

from typing import Any, TypeGuard

import torch
from torch import Size, Tensor
from torch.distributions import constraints

from khot.constraints import k_hot
from khot.kernels.exact.small_numbers import log_odds, sigmoid
from khot.kernels.operators.autograd import with_derivatives_of

from .base import lazy
from .design import POSTERIOR_ADVICE, SamplingDesign
from .entry import entry
from .sizes import shared_ends

INTEGER_TOLERANCE = 16.0  # in units of eps and of the sum, as in constraints.capped_simplex


class PhantomUnit(SamplingDesign):
    r"""Draws vectors of zeros and ones whose inclusion probabilities may have any sum, with a design of fixed size.

    With :math:`\kappa = \sum_i \pi_i` and :math:`k = \lfloor \kappa \rfloor`, a phantom unit of probability
    :math:`1 - (\kappa - k)` brings the sum to k + 1. The wrapped design draws k + 1 out of the n + 1 units, and the
    phantom is dropped. So the number of ones is as close to :math:`\kappa` as possible:

    .. math:: P(|x| = k) &= 1 - (\kappa - k), \\ P(|x| = k + 1) &= \kappa - k,

    if the inclusion probabilities of the wrapped design are exact. Those of :class:`~khot.ParetoSampling` are only
    close to :math:`\pi`, unless ``adjust="exact"``. Then :math:`P(|x| = k)` is the inclusion probability of the phantom
    in the wrapped design, ``wrapped.mean[..., -1]``.

    The size is learned together with :math:`\pi`. A row whose sum is an integer, up to rounding, has the wrapped
    design's distribution of that size. Rows of different sums form one batch.

    The distribution has a kink where the sum passes an integer. There, log_prob has derivatives only in directions that
    keep the sum, and score-function estimators do not learn the size: start from a sum that is not an integer, or use
    pathwise estimators.

    As x and the phantom determine each other, this design has what the wrapped design has: ``mean`` (equal to ``probs``
    if it is in the wrapped design), ``log_prob``, ``entropy``, ``pairwise_inclusion`` and ``mode``. All are
    differentiable in the parameter, including through the phantom's probability, as often as the wrapped design is in
    its ``probs``. Members that the wrapped design lacks raise NotImplementedError. ``k`` is the smaller of the two
    sizes.

    Probabilities in bfloat16 or float16 are used as they are, with the sum that they have. If rounding must not change
    the size, pass ``logits``, from which the probabilities are computed in float32.

    Args:
        design_class: The class of the wrapped design, a SamplingDesign that takes ``probs``.
        probs: Inclusion probabilities ``(..., n)`` in [0, 1].
        logits: Log-odds of the inclusion probabilities, ``probs = sigmoid(logits)``.
        validate_args: Whether to check the contents of tensors.
        **design_kwargs: Further arguments of ``design_class``.

    Raises:
        TypeError: If an argument has the wrong type or dtype, or a size or a relaxation is given.
        ValueError: If both or neither of ``probs`` and ``logits`` are given, or shapes or values are out of range.

    References:
        [1] "Differentiable top-k: from one-hot to k-hot", the phantom unit; its Eq. (15) has the two sizes swapped.

    Example:
        >>> design = PhantomUnit(Sampford, probs=torch.tensor([0.5, 0.2, 0.6]))
        >>> design.support.check(torch.tensor([[0.0, 1.0, 0.0], [1.0, 0.0, 1.0], [1.0, 1.0, 1.0]]))
        tensor([ True,  True, False])
        >>> x = design.enumerate_support()
        >>> design.log_prob(x).exp() @ x
        tensor([0.5000, 0.2000, 0.6000])
    """

    _size_varies = True
    _settings = ("design_class",)
    _complete_with = None  # it has the members that the wrapped design has

    def __init__(
        self,
        design_class: type[SamplingDesign] | None = None,
        probs: Tensor | None = None,
        logits: Tensor | None = None,
        *,
        validate_args: bool | None = None,
        **design_kwargs: Any,
    ) -> None:
        if not _is_design_class(design_class):
            advice = f". {POSTERIOR_ADVICE}" if design_class is None else ""
            raise TypeError(
                "`design_class` must be a class of sampling designs, as in PhantomUnit(Pivotal, logits=logits), but "
                f"got {design_class!r}{advice}"
            )
        for name in ("k", "relaxation", "temperature"):
            if name in design_kwargs:
                raise TypeError(
                    f"PhantomUnit takes no `{name}`: it draws as many units as the sum of the probabilities"
                )
        self.design_class, self.design_kwargs = design_class, design_kwargs
        super().__init__(probs, logits, k=0, validate_args=validate_args)  # the sizes follow from the parameter
        _ = self._wrapped  # raises its errors here

    def _with_sizes(self, param: Tensor, k: Any) -> Tensor:
        return param

    def _validate_contents(self) -> None:
        """Checks nothing beyond the ranges of the parameters: every sum is legal."""

    def _fits(self) -> bool:
        return False

    @property
    @entry
    def k(self) -> Tensor:
        """The smaller of the two sizes."""
        return self._sizes[..., 0]

    @property
    @entry
    def largest_k(self) -> Tensor:
        return self._sizes[..., 1]

    @lazy
    def _size(self) -> Tensor:
        return self._k

    @lazy
    def _sizes(self) -> Tensor:
        probs = self._probs.detach()
        total = probs.sum(-1, dtype=torch.float64)
        tolerance = INTEGER_TOLERANCE * torch.finfo(probs.dtype).eps
        is_integer = (total - total.round()).abs() <= tolerance * total.clamp(min=1)
        k = torch.where(is_integer, total.round(), total.floor()).long()
        return torch.stack((k, k + ~is_integer), -1)

    @property
    @entry
    def wrapped(self) -> SamplingDesign:
        """The design of k + 1 out of n + 1 units, the phantom last; in float64, in which the sum is an integer."""
        return self._wrapped

    @lazy
    def _wrapped(self) -> SamplingDesign:
        given, (k, largest) = self.parameter_name == "logits", self._sizes.unbind(-1)
        probs = self._probs.double()
        if given:
            probs = with_derivatives_of(probs.detach(), sigmoid(self._log_odds))
        phantom = torch.where(largest > k, 1 + k - probs.sum(-1), 1.0).unsqueeze(-1)
        probs = torch.cat((probs, phantom), -1)
        design = self.design_class(probs=probs, k=k + 1, validate_args=False, **self.design_kwargs)
        if given:
            design.__dict__["_log_odds"] = torch.cat((self._log_odds, log_odds(phantom)), -1)
        return design

    @lazy
    def _probs(self) -> Tensor:
        return torch.sigmoid(self._logits)

    @lazy
    def _log_odds(self) -> Tensor:
        return self._logits.double() if self.parameter_name == "logits" else log_odds(self._probs.double())

    @lazy
    def _logits(self) -> Tensor:
        """Log-odds of ``probs``."""
        return log_odds(self._probs)

    @lazy
    def _support(self) -> constraints.Constraint:
        return k_hot(*self._sizes.unbind(-1))

    @property
    def _mean(self) -> Tensor:
        return self._wrapped.mean[..., :-1].to(self._wide.dtype)

    def _pairwise_inclusion(self) -> Tensor:
        return self._wrapped.pairwise_inclusion[..., :-1, :-1]

    def _covariance_matrix(self) -> Tensor:
        return self._wrapped.covariance_matrix[..., :-1, :-1]

    def _enumerates(self, wanted: str) -> bool:
        return self._wrapped._enumerates(wanted)

    def _mode(self) -> Tensor:
        """The most probable vector, of either size."""
        return self._wrapped.mode[..., :-1]

    def _sample(self, shape: Size, generator: torch.Generator | None) -> Tensor:
        return self._wrapped.sample(shape, generator=generator)[..., :-1]

    def _score(self, value: Tensor) -> Tensor:
        self._check_sample(value)
        # A value is outside the support if and only if, with its phantom, it is outside the support of the wrapped
        # design or impossible there.
        return self._wrapped.log_prob(with_phantom(self, value))

    def _entropy(self) -> Tensor:
        return self._wrapped.entropy()

    def _enumerated_support(self, expand: bool) -> Tensor:
        """All vectors of both sizes, in the order of the wrapped design's support."""
        smallest, largest = shared_ends(self, "enumerate_support")
        values = self._wrapped.enumerate_support(expand=False).to(self.dtype)
        if smallest == largest and self._sizes.numel():
            values = values[values.flatten(1)[:, -1] == 1]
        values = values[..., :-1]
        return values.expand(-1, *self.batch_shape, -1) if expand else values


def with_phantom(design: PhantomUnit, value: Tensor) -> Tensor:
    """A value of a design as a value of ``wrapped``."""
    value = value.double()
    phantom = (1 + design._k - value.sum(-1)).unsqueeze(-1)
    return torch.cat((value.expand(*phantom.shape[:-1], -1), phantom), -1)


def _is_design_class(x: Any) -> TypeGuard[type[SamplingDesign]]:
    return isinstance(x, type) and issubclass(x, SamplingDesign)
