"""A gate that learns which k of n inputs to let through."""

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import Parameter

from khot._host import has_float64
from khot._module import Module
from khot._validation import check_function, check_strided, checked_count, checked_int, expanded
from khot.distributions import ConditionalPoisson, PhantomUnit, SamplingDesign
from khot.estimators import StraightThrough
from khot.estimators.wrapper import check_estimator
from khot.kernels.exact.rows import compute_dtype
from khot.relaxations import topk_mask


class KHotGate(Module):
    r"""Lets k of n inputs through: a random draw in training, the k with the largest logits in evaluation.

    In training, x ``(..., n)`` is multiplied by one draw from a design for each leading index, and an estimator carries
    the gradient back to the parameter ``logits``. The draws come from torch's default generator. With ``k=None`` the
    size is learned by :class:`~khot.PhantomUnit`, whose inclusion probabilities are
    :math:`\pi = \sigma(\text{logits})`; evaluation then keeps the :math:`\mathrm{round}(\sum \pi)` largest.
    ``torch.compile`` compiles evaluation in one graph; in training, graphs end at the design. ``k`` may be assigned at
    any time; ``module(x, k)`` uses another k for one call, an int or an integer tensor with one for each leading index.

    Args:
        n: Number of inputs.
        k: Number of inputs to let through; None to learn it.
        design: Class of sampling designs, called as ``design(logits=..., k=k)``, or with ``probs`` if the size is
            learned.
        estimator: The estimator that gives draws a gradient, called with the design, such as :class:`~khot.ReinMax`;
            its ``rsample`` is used.

    Attributes:
        k: Number of inputs to let through, or None if it is learned. It may be assigned at any time.

    Example:
        >>> gate = KHotGate(4, 2)
        >>> int(gate(torch.ones(4)).sum())
        2
        >>> gate.kl()
        tensor(0., grad_fn=<SubBackward0>)
    """

    _numbers = ("k",)
    k: int | None

    def __init__(
        self,
        n: int,
        k: int | None = None,
        *,
        design: type[SamplingDesign] | Callable[..., SamplingDesign] = ConditionalPoisson,
        estimator: Callable[[Any], Any] = StraightThrough,
    ) -> None:
        super().__init__()
        _check_design(design)
        check_estimator("estimator", estimator)
        self.n = checked_count("n", n)
        self.k, self.estimator = k, estimator
        self.design: Any = design  # a class if the size is learned
        self.logits = Parameter(torch.zeros(self.n))
        self._start["logits"] = 0.0
        self.law()  # validates the arguments at construction

    def _checked(self, name: str, value: Any) -> int | None:
        """The checked ``k``, an int or None."""
        if value is None:
            return None
        k = checked_int("k", value, "an int, or None to learn it")
        if not 0 <= k <= self.n:
            raise ValueError(f"`k` must satisfy 0 <= k <= n, but got k={k} with n={self.n}")
        return k

    def law(self, k: int | Tensor | None = None) -> SamplingDesign:
        """The design that training draws from, made from the current logits; on the host if the device lacks float64.

        Args:
            k: Number of inputs to let through, if not that of the gate; a tensor gives the batch shape.
        """
        logits = self.logits.to(compute_dtype(self.logits))
        logits = logits if has_float64(logits) else logits.cpu()
        k = self._number("k") if k is None else k
        if k is None:
            return PhantomUnit(self.design, logits=logits)
        return self.design(logits=logits, k=k)

    def kl(self) -> Tensor:
        r"""KL divergence from the uniform distribution over vectors of the same sizes, for use in an ELBO.

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
        return (uniform.to(law.parameter.dtype) - law.entropy()).to(self.logits)

    def mask(self, shape: torch.Size = torch.Size(), k: int | Tensor | None = None) -> Tensor:
        """One mask ``(*shape, n)``: draws with a gradient in training, the largest logits in evaluation.

        Args:
            shape: Shape of the leading indices.
            k: Number of inputs to let through, if not that of the gate; a tensor broadcasts with ``shape``.
        """
        if k is None:
            k = self._number("k")
        elif isinstance(k, Tensor) and k.dim():
            k = expanded("k", k, shape)
        if self.training:
            law = self.law(k)
            drawn = cast(Tensor, self.estimator(law).rsample(shape[: len(shape) - len(law.batch_shape)]))
            return drawn.to(self.logits)
        if k is None:
            k = torch.sigmoid(self.logits.detach().to(compute_dtype(self.logits))).sum().round().long()
        sizes = k.shape if isinstance(k, Tensor) else ()
        return topk_mask(self.logits.expand(*sizes, self.n), k).expand(*shape, self.n)

    def forward(self, x: Tensor, k: int | Tensor | None = None) -> Tensor:
        check_strided("x", x)
        if x.dim() == 0 or x.shape[-1] != self.n:
            raise ValueError(
                f"`x` must have shape (..., {self.n}), since this is KHotGate(n={self.n}, k={self.k}) and n is the "
                f"number of inputs, but got {tuple(x.shape)}{self._advice(x)}"
            )
        y = x * self.mask(x.shape[:-1], k)
        return y.to(x.dtype) if x.is_floating_point() else y  # logits in single precision may gate half precision

    def _advice(self, x: Tensor) -> str:
        """Advice in case k was passed in place of n."""
        if self.k is not None or x.dim() == 0 or x.shape[-1] < self.n:
            return ""
        return f"; KHotGate({x.shape[-1]}, {self.n}) lets {self.n} of {x.shape[-1]} inputs through"

    def extra_repr(self) -> str:
        names = (getattr(part, "__name__", repr(part)) for part in (self.design, self.estimator))
        return f"n={self.n}, k={self.k}, design={next(names)}, estimator={next(names)}"


def _check_design(design: Any) -> None:
    check_function("design", design, "logits and k, such as a class of sampling designs")
    if isinstance(design, type) and not issubclass(design, SamplingDesign):
        raise TypeError(f"`design` must be a class of sampling designs, such as Pivotal, but got {design.__name__}")


def log_binomial(n: int, k: Tensor) -> Tensor:
    """log C(n, k), float64."""
    whole = torch.tensor(float(n), dtype=k.dtype, device=k.device)
    return torch.lgamma(whole + 1) - torch.lgamma(k + 1) - torch.lgamma(whole - k + 1)
