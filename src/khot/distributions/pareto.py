"""Pareto sampling: order sampling by odds ratios."""

from typing import Literal

import torch
from torch import Tensor

from khot._validation import check_choice
from khot.kernels import order_sampling
from khot.kernels.links.logistic import LOGISTIC as LINK
from khot.kernels.order_sampling.noises import LOGISTIC
from khot.laws import order_sampling as law
from khot.laws.pareto import adjusted, adjusted_scores
from khot.relaxations import sigmoid_topk
from khot.relaxations.linked import link_of, scale_of
from khot.relaxations.mask_log_odds import mask_log_odds

from .base import lazy
from .design import Relaxation, relaxes_logits
from .order_sampling import OrderSampling


class ParetoSampling(OrderSampling):
    r"""Selects the k units of smallest odds ratios :math:`Q_i = \frac{U_i}{1 - U_i} / \frac{\lambda_i}{1 - \lambda_i}`.

    The U are independent and uniform. A draw costs noise and a top-k, and the design is close to
    :class:`~khot.ConditionalPoisson`. With :math:`\lambda` = ``probs`` itself, the inclusion probabilities ``mean`` are
    near ``probs``, but not equal to it. ``adjust`` chooses the odds:

    * ``"analytic"``: log-odds :math:`\operatorname{logit} p_i - p_i (1 - p_i)(p_i - \tfrac12) / d^2` with
      :math:`d = \max(\sum_j p_j (1 - p_j), \tfrac14)`; this makes the error 2 to 10 times smaller.
    * ``"exact"``: the odds for which ``mean`` = ``probs``, found by Newton's method, with first derivatives only.
    * None: log-odds logit p.

    ``log_prob`` and ``mean`` are exact and differentiable to any order unless ``adjust="exact"``. They are
    computed by quadrature, to about 1e-12, or 1e-9 where the result is rounded to float32:

    .. math:: P(S) = \prod_{i \in S} o_i \sum_{j \in S} c_j, \quad
        c_j = \int_0^\infty \frac{t^{k - 1}}{(1 + t o_j) \prod_i (1 + t o_i)} dt

    with odds o. The most probable vector has the k largest odds.

    Args:
        probs: Target inclusion probabilities ``(..., n)`` in [0, 1], each row with an integer sum; 0 and 1 are legal.
        logits: Real scores ``(..., n)``, from which ``probs = relaxation(logits, k, temperature)``.
        k: Number of ones, an int or an integer tensor that broadcasts with the batch shape. Required with ``logits``.
        adjust: ``"analytic"``, ``"exact"`` or None.
        relaxation: Map onto the capped simplex.
        temperature: Softness of the relaxation.
        validate_args: Whether to check the contents of tensors.

    Raises:
        TypeError: If an argument has the wrong type or dtype.
        ValueError: If both or neither of ``probs`` and ``logits`` are given, or shapes or values are out of range.

    References:
        [1] Rosén (1997), "On sampling with probability proportional to size", Journal of Statistical Planning and
            Inference 62(2).
        [2] Bondesson, Traat, Lundqvist (2006), "Pareto sampling versus Sampford and conditional Poisson sampling",
            Scandinavian Journal of Statistics 33(4): P(S), and the analytic adjustment.

    Example:
        >>> design = ParetoSampling(probs=torch.tensor([0.2, 0.4, 0.6, 0.8]), adjust="exact")
        >>> design.mean
        tensor([0.2000, 0.4000, 0.6000, 0.8000])
        >>> ParetoSampling(probs=torch.tensor([0.2, 0.4, 0.6, 0.8])).mean
        tensor([0.1987, 0.3962, 0.6038, 0.8013])
    """

    _noise = LOGISTIC
    _settings = ("adjust",)

    def __init__(
        self,
        probs: Tensor | None = None,
        logits: Tensor | None = None,
        k: int | Tensor | None = None,
        *,
        adjust: Literal["analytic", "exact"] | None = "analytic",
        relaxation: Relaxation = sigmoid_topk,
        temperature: float | Tensor = 1.0,
        validate_args: bool | None = None,
    ) -> None:
        check_choice("adjust", adjust, ("analytic", "exact"), optional=True)
        self.adjust = adjust
        super().__init__(probs, logits, k, relaxation=relaxation, temperature=temperature, validate_args=validate_args)

    @lazy
    def _positions(self) -> Tensor:
        if self.adjust == "exact":
            return law.solve_positions(self._noise, self._probs, self._size, self._log_odds)
        if self.adjust is None:
            return self._log_odds
        if relaxes_logits(self) and link_of(self.relaxation) is LINK:
            scale = scale_of(self.relaxation, self.temperature)
            return adjusted_scores(self._log_odds_of, self._logits, self._size, scale)
        return adjusted(self._log_odds)

    def _log_odds_of(self, scores: Tensor) -> Tensor:
        found = mask_log_odds(self.relaxation, scores, self._size, self.temperature)
        assert found is not None  # for the logistic link
        return found

    @lazy
    def _centre(self) -> Tensor:
        if self.adjust == "exact":
            return order_sampling.rank_centre(self._positions.detach(), self._size)
        # Positions are close to log-odds whose probabilities sum to k.
        return self._positions.new_zeros(self.batch_shape, dtype=torch.float64)

    @property
    def _mean(self) -> Tensor:
        return self._probs if self.adjust == "exact" else self._inclusion
