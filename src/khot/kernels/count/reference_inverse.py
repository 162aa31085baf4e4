"""The definition: Newton's method on the log of an elementary symmetric polynomial, whose Hessian is the covariance."""

import torch
from torch import Tensor
from torch.func import grad, hessian

from .reference import tilt_of

STEPS, NOTHING = 60, 1e-13


def _log_esp(logits: Tensor, k: int) -> Tensor:
    """log of the elementary symmetric polynomial of order k at exp(logits)."""
    law = [torch.zeros_like(logits[0])] + [torch.full_like(logits[0], -torch.inf)] * k
    for x in logits:
        law = law[:1] + [
            law[j] if law[j - 1] == -torch.inf else torch.logaddexp(law[j], law[j - 1] + x) for j in range(1, k + 1)
        ]
    return law[k]


def _solve(logits: Tensor, b: Tensor, k: int) -> Tensor:
    covariance = hessian(_log_esp)(logits, k)
    share = covariance.diagonal() / covariance.trace()
    v = torch.linalg.pinv(covariance, hermitian=True) @ (b - share * b.sum())
    return v - share @ v


def _inverse(log_odds: Tensor, k: int) -> Tensor:
    logits = log_odds
    for _ in range(STEPS):
        step = _solve(logits, torch.sigmoid(log_odds) - grad(_log_esp)(logits, k), k)
        logits = logits + step
        if step.abs().max() < NOTHING:
            break
    return logits - logits.mean()


def inclusion_inverse(log_odds: Tensor, k: Tensor, goal: float) -> tuple[Tensor, Tensor, Tensor]:
    """Logits ``(R, n)`` of mean 0, their tilts ``(R, 2)``, and the errors ``(R,)`` relative to the largest logit.

    Args:
        log_odds: Float64 ``(R, n)``, those of the inclusion probabilities up to a constant in each row; infinite ones
            fix a unit and are returned unchanged.
        k: Integers ``(R,)``, the sums of the inclusion probabilities.
        goal: Error that is small enough. A larger error in the result means that the row is not solved.
    """
    logits = log_odds.clone()
    for row, target, size in zip(logits, log_odds, k.tolist(), strict=True):
        free = target.isfinite()
        if free.any():
            row[free] = _inverse(target[free], size - int((target == torch.inf).sum()))
    return logits, tilt_of(logits, k), torch.zeros_like(logits[:, 0])


def covariance_inverse(logits: Tensor, b: Tensor, k: Tensor, tolerance: float, rounding: float) -> Tensor:
    """v ``(R, n)`` with C v = b over the finite logits, and 0 elsewhere.

    b sums to 0 there. A sum of at most ``rounding`` times the sum of absolute values is removed in proportion to the
    diagonal D of C, a larger one evenly. Among the solutions, which differ by constants, v is the one with sum D v = 0.
    It has the relative accuracy ``tolerance``, and is NaN in rows that a kernel could not solve.
    """
    v = torch.zeros_like(b)
    for row, theta, right, size in zip(v, logits, b, k.tolist(), strict=True):
        free = theta.isfinite()
        if free.any():
            b = right[free]
            if b.sum().abs() > rounding * b.abs().sum():
                b = b - b.mean()
            row[free] = _solve(theta[free], b, size - int((theta == torch.inf).sum()))
    return v
