"""The logarithm of the constant of a conditional Poisson law, whose derivatives show those of the product tree."""

import torch
import torch.nn.functional as F
from torch import Tensor

from khot.laws.once import Once
from khot.laws.tilted_tree import Size, tilt


def log_partition(logits: Tensor, k: Size, kept: Once | None = None) -> Tensor:
    """Log of the elementary symmetric polynomial of order k at ``exp(logits)``; for a range the log of their sum.

    Its gradient is the vector of inclusion probabilities, and its Hessian is the covariance.
    """
    tilted = tilt(logits, k, kept)
    # log(1 + e^z) = max(z, 0) + log(1 + e^-|z|), and c times the number of z > 0 is combined with c k.
    positive = tilted.z > 0
    size = torch.where(positive, tilted.z, -tilted.z)
    terms = torch.where(positive, logits.double(), 0.0) - F.logsigmoid(size)
    return terms.sum(-1) + (positive.sum(-1) - tilted.k) * tilted.shift + tilted.log_probability()
