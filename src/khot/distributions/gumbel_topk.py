"""Gumbel top-k: successive sampling without replacement, which is order sampling with exponential variables."""

from torch import Tensor

from khot.kernels.order_sampling.noises import LOG_EXPONENTIAL
from khot.laws import order_sampling as law

from .base import lazy
from .order_sampling import OrderSampling


class GumbelTopK(OrderSampling):
    r"""Draws k units one after another, each with a probability proportional to its weight among the remaining units.

    Equivalently, it selects the k largest of :math:`\theta_i + g_i` with independent standard Gumbel variables g. The
    drawn set is distributed as the first k places of a Plackett-Luce ranking. ``logits`` are the natural parameters
    :math:`\theta = \log w`; adding a constant to a row changes nothing. For k = 1 it is the Categorical distribution.

    .. math:: P(S) = \int_0^1 \prod_{i \in S} \big(1 - u^{w_i / W}\big) du, \quad W = \sum_{j \notin S} w_j

    ``log_prob`` and ``mean`` are exact for weights of any size and differentiable to any order in ``logits``. They are
    computed by quadrature, to about 1e-12, or 1e-9 where the result is rounded to float32. ``mean`` is not proportional
    to the weights. ``probs`` are inclusion probabilities, from which the logits are found by solving an equation, with
    first derivatives only. The most probable vector has the k largest logits.

    Args:
        probs: Inclusion probabilities ``(..., n)`` in [0, 1], each row with an integer sum; 0 and 1 are legal.
        logits: Log-weights ``(..., n)``; ``-inf`` excludes a unit, ``inf`` includes it.
        k: Number of ones, an int or an integer tensor that broadcasts with the batch shape. Required with ``logits``.
        validate_args: Whether to check the contents of tensors.

    Raises:
        TypeError: If an argument has the wrong type or dtype.
        ValueError: If both or neither of ``probs`` and ``logits`` are given, or shapes or values are out of range.

    References:
        [1] Rosén (1972), "Asymptotic theory for successive sampling with varying probabilities without replacement",
            Annals of Mathematical Statistics 43(2).
        [2] Vieira (2014), "Gumbel-max trick and weighted reservoir sampling".
        [3] Kool, van Hoof, Welling (2020), "Estimating gradients for discrete random variables by sampling without
            replacement", arXiv:2002.06043, appendix B: the integral.

    Example:
        >>> design = GumbelTopK(logits=torch.tensor([0.0, 0.0, 1.0]), k=2)
        >>> design.log_prob(torch.tensor([1.0, 0.0, 1.0])).exp()
        tensor(0.4430)
    """

    _noise = LOG_EXPONENTIAL
    _relaxes = False

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

    @lazy
    def _logits(self) -> Tensor:
        """Log-weights; if they were computed from ``probs``, their mean is 0."""
        return self._positions.to(self._wide.dtype)

    @lazy
    def _probs(self) -> Tensor:
        return self._inclusion

    @lazy
    def _positions(self) -> Tensor:
        if self.parameter_name == "logits":
            return self._logits
        return law.solve_positions(self._noise, self._probs, self._size)

    @property
    def _mean(self) -> Tensor:
        return self._probs
