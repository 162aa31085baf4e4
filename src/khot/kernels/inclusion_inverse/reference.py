"""The definition: Newton's method on the log of an elementary symmetric polynomial, whose Hessian is the covariance."""

import torch
from torch import Tensor
from torch.func import grad, hessian

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
    return torch.linalg.pinv(hessian(_log_esp)(logits, k), hermitian=True) @ (b - b.mean())


def _inverse(log_odds: Tensor, k: int) -> Tensor:
    logits = log_odds
    for _ in range(STEPS):
        step = _solve(logits, torch.sigmoid(log_odds) - grad(_log_esp)(logits, k), k)
        logits = logits + step
        if step.abs().max() < NOTHING:
            break
    return logits - logits.mean()


def inclusion_inverse(log_odds: Tensor, k: Tensor, goal: float) -> tuple[Tensor, Tensor]:
    """Logits ``(R, n)`` of mean 0, and the errors ``(R,)`` of the log-odds relative to the largest logit.

    Args:
        log_odds: Float64 ``(R, n)``, those of the inclusion probabilities up to a constant in each row; infinite ones
            fix a unit and are passed on.
        k: Integers ``(R,)``, the sums of the inclusion probabilities.
        goal: Error that is small enough. A larger one in the result says that this row is not solved.
    """
    logits = log_odds.clone()
    for row, target, size in zip(logits, log_odds, k.tolist(), strict=True):
        free = target.isfinite()
        if free.any():
            row[free] = _inverse(target[free], size - int((target == torch.inf).sum()))
    return logits, torch.zeros_like(logits[:, 0])


def covariance_inverse(logits: Tensor, b: Tensor, k: Tensor, tolerance: float) -> Tensor:
    """v ``(R, n)``, of mean 0 over the finite logits, with C v = b - mean(b) there, and 0 elsewhere.

    To a relative ``tolerance``; NaN in rows that a kernel could not solve.
    """
    v = torch.zeros_like(b)
    for row, theta, right, size in zip(v, logits, b, k.tolist(), strict=True):
        free = theta.isfinite()
        if free.any():
            row[free] = _solve(theta[free], right[free], size - int((theta == torch.inf).sum()))
    return v
