r"""The start of training with a linear predictor: least squares of features that are let through at random.

Let independent gates let feature i through with probability :math:`\pi_i`. Let all features have mean 0, variance 1 and
correlations G, and let B be their covariances with the targets. The least mean squared error of a linear predictor
behind the gates is, up to a constant, with :math:`v_i = \pi_i w_i` for its weights w,

.. math:: L(\pi) = -\operatorname{tr} B^T M^{-1} B, \quad M = G + \operatorname{diag}(1 / \pi_i - 1), \quad
    v = M^{-1} B, \quad \partial L / \partial \pi_i = -\lVert w_i \rVert^2,

which is ridge regression with its own penalty for each feature. A few steps that raise the logits of :math:`\pi` by
these derivatives take one linear system each and no draws, where training with draws takes hundreds of steps.

References:
    [1] Moka, Liquet, Zhu, Muller (2024), "COMBSS: best subset selection via continuous optimization", Statistics and
        Computing 34, which minimises the same kind of relaxation.
"""

import torch
from torch import Tensor

from khot.relaxations import sigmoid_topk

from .data import Data

LARGEST_SYSTEM = 500  # unknowns of a linear system: features, or rows (the start uses no more rows than these)
MOST_STEPS = 100
# The start ends where sum pi (1 - pi) is at most this share of its value for equal logits. Training minimises
# squared error only for regression, so in classification the start should decide less.
UNTIL_FOR_VALUES, UNTIL_FOR_CLASSES = 0.5, 0.9
RATE = 0.3  # change of the logits in a step, for the feature with the largest derivative
SMALLEST, LARGEST = 1e-6, 1 - 1e-3  # limits of the probabilities in the penalties


def least_squares_start(data: Data, k: int | None, price: float) -> tuple[Tensor, Tensor]:
    r"""Logits of the gates ``(n,)``, and weights of a linear predictor behind them, ``(outputs, n)``.

    Args:
        data: The data to learn from.
        k: How many features to select; None if each costs ``price``, and the gates are independent with these logits.
        price: Price of a feature.
    """
    systems = Systems(data)
    until = UNTIL_FOR_CLASSES if data.classes else UNTIL_FOR_VALUES
    n = data.x.shape[-1]
    logits = torch.zeros(n, dtype=torch.float64)
    share = 0.5 if k is None else k / n
    untrained = n * share * (1 - share)
    for _ in range(MOST_STEPS):
        probs = torch.sigmoid(logits) if k is None else sigmoid_topk(logits, k)
        weights = systems.weights(probs.clamp(SMALLEST, LARGEST))
        if (probs * (1 - probs)).sum() <= until * untrained:
            break
        gains = weights.square().mean(-1)
        if k is None:
            gains = gains - price
        largest = gains.abs().max()
        if largest == 0:
            break
        logits = logits + RATE * gains / largest
    return logits, weights.T


class Systems:
    """The linear systems of some data, with as many unknowns as there are features or rows, whichever are fewer."""

    def __init__(self, data: Data) -> None:
        if data.x.shape[-1] > LARGEST_SYSTEM < len(data):
            data = data.rows(torch.randperm(len(data))[:LARGEST_SYSTEM])
        shares = (data.weights / data.weights.sum()).double().sqrt()[:, None]
        self.x = shares * data.x
        self.covariances = self.x.T @ (shares * data.codes())
        self.by_rows = len(data) < data.x.shape[-1]
        self.correlations = None if self.by_rows else self.x.T @ self.x

    def weights(self, probs: Tensor) -> Tensor:
        """The best weights ``(n, outputs)`` behind gates with these probabilities."""
        penalty = (1 / probs - 1)[:, None]
        if self.correlations is not None:
            best = torch.linalg.solve(self.correlations + penalty.squeeze(-1).diag(), self.covariances)
        else:  # (X'X + D)^-1 B = D^-1 (B - X' (I + X D^-1 X')^-1 X D^-1 B)
            scaled = self.covariances / penalty
            inner = self.x @ (self.x.T / penalty)
            inner.diagonal().add_(1)
            best = scaled - (self.x.T / penalty) @ torch.linalg.solve(inner, self.x @ scaled)
        return best / probs[:, None]
