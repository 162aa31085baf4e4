"""A gate that learns which k of n inputs to let through."""

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from khot._tracing import has_float64
from khot._validation import check_count, check_function
from khot.distributions import ConditionalPoisson, PhantomUnit, SamplingDesign
from khot.estimators import StraightThrough
from khot.relaxations import topk_mask


class KHotGate(Module):
    r"""Lets k of n inputs through: drawn at random in training, the k with the largest logits in evaluation.

    Training multiplies x ``(..., n)`` by one draw of a design for each leading index; an estimator carries the gradient
    back to the parameter ``logits``. The draws come from torch's default generator. With ``k=None`` the size is learned
    by :class:`~khot.PhantomUnit`, whose inclusion probabilities are :math:`\pi = \sigma(\text{logits})`; evaluation
    then keeps the :math:`\mathrm{round}(\sum \pi)` largest. ``torch.compile`` takes training, and
    evaluation, in one graph.

    Args:
        n: Number of inputs.
        k: Number of inputs that are let through; None to learn it.
        design: Class of sampling designs, called as ``design(logits=..., k=k)``, or for a learned size with ``probs``.
        estimator: What gives draws a gradient, called with the design, such as :class:`~khot.ReinMax`; its ``rsample``
            is used.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If ``n`` is less than 1, or ``k`` not in [0, n].

    Example:
        >>> gate = KHotGate(4, 2)
        >>> int(gate(torch.ones(4)).sum())
        2
        >>> gate.kl()
        tensor(0., grad_fn=<SubBackward0>)
    """

    def __init__(
        self,
        n: int,
        k: int | None = None,
        design: type[SamplingDesign] | Callable[..., SamplingDesign] = ConditionalPoisson,
        estimator: Callable[[Any], Any] = StraightThrough,
    ) -> None:
        super().__init__()
        check_count("n", n)
        if k is not None and (isinstance(k, bool) or not isinstance(k, int)):
            raise TypeError(f"`k` must be an int, or None to learn it, but got {k!r}")
        if k is not None and not 0 <= k <= n:
            raise ValueError(f"`k` must satisfy 0 <= k <= n, but got k={k} with n={n}")
        check_function("design", design, "logits and k, such as a class of sampling designs")
        check_function("estimator", estimator, "a design")
        self.n, self.k, self.estimator = n, k, estimator
        self.design: Any = design  # a class, where the size is learned
        self.logits = Parameter(torch.zeros(n))
        self.law()  # whose errors are due now

    def law(self) -> SamplingDesign:
        """The design that training draws from, made of the logits as they are; on the host, if need be for float64."""
        logits = self.logits if has_float64(self.logits) else self.logits.cpu()
        if self.k is None:
            return PhantomUnit(self.design, logits=logits)
        return self.design(logits=logits, k=self.k)

    def kl(self) -> Tensor:
        r"""The divergence from the law of equal logits on the same sizes, for an ELBO; 0 where all logits are equal.

        .. math:: \mathrm{KL} = H(|x|) + E \log \tbinom{n}{|x|} - H(x)

        Raises NotImplementedError for a design without entropy.
        """
        law = self.law()
        k = torch.as_tensor(law.k, dtype=torch.float64, device=law.parameter.device)
        uniform = log_binomial(self.n, k)
        if isinstance(law, PhantomUnit):
            has_two = law.largest_k > law.k
            more = torch.where(has_two, law.mean.double().sum() - k, 0.5)  # the probability of the larger size
            growth = log_binomial(self.n, (k + 1).clamp(max=self.n)) - uniform
            of_size = -(torch.xlogy(more, more) + torch.xlogy(1 - more, 1 - more))
            uniform = uniform + torch.where(has_two, more * growth + of_size, 0.0)
        return (uniform.to(self.logits.dtype) - law.entropy()).to(self.logits.device)

    def mask(self, shape: torch.Size = torch.Size()) -> Tensor:
        """One mask ``(*shape, n)``: draws with a gradient in training, the largest logits in evaluation."""
        if self.training:
            return cast(Tensor, self.estimator(self.law()).rsample(shape)).to(self.logits.device)
        size = torch.sigmoid(self.logits.detach()).sum().round().long() if self.k is None else self.k
        return topk_mask(self.logits, size).expand(*shape, self.n)

    def forward(self, x: Tensor) -> Tensor:
        if x.dim() == 0 or x.shape[-1] != self.n:
            raise ValueError(f"`x` must have shape (..., {self.n}), but got {tuple(x.shape)}")
        return x * self.mask(x.shape[:-1])

    def extra_repr(self) -> str:
        names = (getattr(part, "__name__", repr(part)) for part in (self.design, self.estimator))
        return f"n={self.n}, k={self.k}, design={next(names)}, estimator={next(names)}"


def log_binomial(n: int, k: Tensor) -> Tensor:
    """log C(n, k), float64."""
    whole = torch.tensor(float(n), dtype=k.dtype, device=k.device)
    return torch.lgamma(whole + 1) - torch.lgamma(k + 1) - torch.lgamma(whole - k + 1)
