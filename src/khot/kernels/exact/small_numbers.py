"""Logarithms and quotients of probabilities near the end of the floating-point range, with representable derivatives.

The derivative of log x is 1 / x. The derivative of 1 / x would be 1 / x², which overflows long before x underflows,
although it is multiplied by something equally small. Relative to its own value, taken as a constant, x is 1, and so are
its powers in all derivatives. A number below ``TINY`` keeps its value and counts as a constant: its derivative is out
of range.
"""

import torch
from torch import Tensor

from ..operators.autograd import by_formula

TINY = torch.finfo(torch.float64).tiny  # the reciprocals of smaller numbers may overflow


def constant_if_tiny(x: Tensor) -> Tensor:
    """Removes the gradient of entries whose reciprocals, the size of derivatives of logarithms, are out of range."""
    return torch.where(x < torch.finfo(x.dtype).tiny, x.detach(), x)


def log_of_small(x: Tensor) -> Tensor:
    """The logarithm of positive numbers, ``TINY`` or larger, with derivatives of every order in range."""
    return by_formula(_log, lambda x: (x.log(),), torch.div, x)


def _log(x: Tensor) -> Tensor:
    size = x.detach()
    return (x / size).log() + size.log()


def quotient(a: Tensor, b: Tensor) -> Tensor:
    """``a / b`` for positive b, ``TINY`` or larger, with derivatives of every order in range."""
    size = b.detach()
    return (a / size) / (b / size)


def log_odds(probs: Tensor) -> Tensor:
    """``logit(probs)``; infinite, without gradient, where they are 0 or 1."""
    interior = (probs > 0) & (probs < 1)
    inner = constant_if_tiny(probs.masked_fill(~interior, 0.5))
    certain = torch.where(interior, 0.0, (probs.detach() - 0.5) * torch.inf)
    return log_of_small(inner) - (1 - inner).log() + certain


def sigmoid(log_odds: Tensor) -> Tensor:
    """The probability with these log-odds; unlike in ``torch.sigmoid``, the derivative next to 1 is not 0."""
    return torch.where(log_odds > 0, 1 - torch.sigmoid(-log_odds), torch.sigmoid(log_odds))
