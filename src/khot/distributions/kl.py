"""Divergences that are exact, registered for ``torch.distributions.kl_divergence``; TraceMeanField_ELBO uses them."""

import torch
from torch import Tensor
from torch.distributions import register_kl

from khot.kernels.conditional_poisson import log_prob

from .conditional_poisson import ConditionalPoisson


@register_kl(ConditionalPoisson, ConditionalPoisson)
def _kl_conditional_poisson(p: ConditionalPoisson, q: ConditionalPoisson) -> Tensor:
    """E_p[log p - log q], at the mean of p because log q is linear in its value; infinite where the sizes differ."""
    cross_entropy = -log_prob(q.logits, q.k, p.mean).to(p.mean.dtype)
    return torch.where(p.k == q.k, cross_entropy - p.entropy(), torch.inf)
