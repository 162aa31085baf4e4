r"""The analytic adjustment of Pareto sampling: log-odds whose design has nearly the wanted inclusion probabilities.

.. math:: \vartheta_i = \operatorname{logit} p_i - p_i (1 - p_i) (p_i - \tfrac12) / d^2, \qquad
    d = \max\big(\sum_j p_j (1 - p_j), \tfrac14\big)

A common shift of the positions does not change the design. For scores x with :math:`p_i = \sigma((x_i - t) / s)` on a
CPU, with numbers for k and s, two loops compute the positions and their gradient.

References:
    [1] Bondesson, Traat, Lundqvist (2006), "Pareto sampling versus Sampford and conditional Poisson sampling",
        Scandinavian Journal of Statistics 33(4).
"""

from collections.abc import Callable

import torch
from torch import Tensor

from khot._validation import SOFTNESS_LIMITS
from khot.kernels.call import runs_on_cpu
from khot.kernels.links.logistic import LOGISTIC
from khot.kernels.operators.autograd import by_formula
from khot.kernels.order_sampling import LEAST_SPREAD
from khot.kernels.order_sampling import adjusted as loops
from khot.kernels.threshold import recipes
from khot.kernels.threshold.kinds import MASK


def adjusted(log_odds: Tensor) -> Tensor:
    """The positions for log-odds of probabilities, ``(*batch, n)``."""
    excess = torch.tanh(0.5 * log_odds)  # 2 p - 1; a few large operations take most of the time of short rows
    spread = 1 - excess * excess  # 4 p (1 - p)
    d = spread.sum(-1, keepdim=True).clamp(min=4 * LEAST_SPREAD)
    return log_odds - spread * excess * (2 / d.square())


def adjusted_scores(log_odds: Callable[[Tensor], Tensor], x: Tensor, k: int | Tensor, scale: float | Tensor) -> Tensor:
    """``adjusted(log_odds(x))``, where ``log_odds`` are those of the mask with the logistic link, k and a scale."""
    if type(k) is int and type(scale) in (int, float) and 0 < k < x.shape[-1] and runs_on_cpu(x) and x.numel():
        limits, code = SOFTNESS_LIMITS[x.dtype], loops.find(x)
        recipe = recipes.find(x, *LOGISTIC.key, MASK.name) if code and limits[0] <= scale <= limits[1] else None
        found = recipe and recipe.mask(x.detach(), k, scale)
        if found:
            anchor, offset = map(torch.from_numpy, found[1])
            positions, shift = code.value(x, anchor, offset, k, float(scale))

            def pull_back(grad: Tensor, x: Tensor) -> Tensor:
                return code.gradient(x, anchor, shift, float(scale), grad)

            return by_formula(lambda x: adjusted(log_odds(x)), lambda x: (positions,), pull_back, x)
    return adjusted(log_odds(x))
