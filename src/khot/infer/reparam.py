"""Reparametrisation of k-hot sites by configuration, as in ``pyro.infer.reparam``."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from pyro.distributions import TorchDistribution
from pyro.infer.reparam.reparam import Reparam
from torch import Tensor

from khot._validation import check_positive_contents, check_strided, checked_positive
from khot.distributions import PhantomUnit, RelaxedKHot, SamplingDesign
from khot.distributions.base import unrounded
from khot.distributions.design import relaxes_logits
from khot.distributions.sizes import size_varies
from khot.estimators import StraightThrough
from khot.estimators.wrapper import check_estimator, wrap_latents
from khot.relaxations import sigmoid_topk


class KHotReparam(Reparam):
    """Gives a k-hot latent site pathwise gradients, for use with ``pyro.poutine.reparam``; it has two forms.

    ``KHotReparam(estimator)`` changes only the **guide**: the estimator wraps its sampling design. Samples stay k-hot,
    so the model is unchanged. :class:`~khot.ReinMax` is the recommended estimator. The default is
    :class:`~khot.StraightThrough`, which is cheap and takes every design but ignores curvature. With both, gradients
    depend on the model between k-hot vectors. How samples are scored is an argument of the estimator, as in
    ``KHotReparam(partial(ReinMax, log_prob="none"))``.

    ``KHotReparam(temperature=t)`` changes **model and guide**: the design becomes a :class:`~khot.RelaxedKHot` with the
    design's ``logits`` as log-weights, divided by its own temperature; if the design was made from ``probs``, with
    their log-odds. The problem is then continuous. As the temperature falls, the distributions of samples tend to those
    of Gumbel top-k, but their divergence stays larger: the relaxed posterior is less concentrated.
    ``temperature`` is an attribute that may be changed at any step::

        relax = KHotReparam(temperature=0.5)
        svi = SVI(poutine.reparam(model, {"x": relax}), poutine.reparam(guide, {"x": relax}), optimizer, Trace_ELBO())

    A model relaxed in this way also works with AutoNormal and NUTS, if they start from a sample
    (``init_loc_fn=init_to_sample`` and ``init_strategy=init_to_sample``): their default start is not available for
    k-hot vectors.

    If only one of the two is relaxed, its samples have no probability under the other, and scoring them raises
    ValueError. The site may be in plates, masked, or independent over batch dimensions.

    Args:
        estimator: Function that wraps the guide's design.
        temperature: Positive softness of the relaxed form, a number or a tensor that broadcasts to the batch shape.

    Raises:
        TypeError: When the site is reached, if it is not a sampling design, or has no fixed size in the relaxed form.
        ValueError: If both arguments are given.
        NotImplementedError: If the site is observed.

    Example:
        >>> import pyro
        >>> logits = torch.zeros(4, requires_grad=True)
        >>> def guide():
        ...     return pyro.sample("x", ConditionalPoisson(logits=logits, k=2))
        >>> x = pyro.poutine.reparam(guide, {"x": KHotReparam()})()
        >>> x.sum(), x.requires_grad
        (tensor(2., grad_fn=<SumBackward0>), True)
        >>> y = pyro.poutine.reparam(guide, {"x": KHotReparam(temperature=0.5)})()
        >>> constraints.capped_simplex(2).check(y)
        tensor(True)
    """

    def __init__(
        self,
        estimator: Callable[[SamplingDesign], TorchDistribution] | None = None,
        *,
        temperature: float | Tensor | None = None,
    ) -> None:
        if estimator is not None and temperature is not None:
            raise ValueError("`estimator` and `temperature` cannot be combined, but both were given")
        if estimator is not None:
            check_estimator("estimator", estimator)
        if temperature is not None:
            check_strided("temperature", temperature)
            batch_shape = temperature.shape if isinstance(temperature, Tensor) else torch.Size()
            checked_positive("temperature", temperature, batch_shape)
            check_positive_contents("temperature", temperature)
        self.estimator = StraightThrough if estimator is None else estimator
        self.temperature = temperature

    def apply(self, msg: Any) -> Any:
        """Replaces the distribution of the site."""
        if msg["is_observed"]:
            raise NotImplementedError(f"KHotReparam is for latent sites, but {msg['name']!r} is observed")
        value = msg["value"]
        if self.temperature is not None and not getattr(value, "_pyro_custom_init", True):
            value = None  # Pyro starts with a k-hot vector here; it asks again for the relaxed law
        fn = wrap_latents(msg["fn"], partial(self._replace, name=msg["name"]))
        return {"fn": fn, "value": value, "is_observed": False}

    def _replace(self, fn: Any, name: str) -> TorchDistribution:
        if not isinstance(fn, SamplingDesign):
            raise TypeError(f"KHotReparam is for sampling designs, but {name!r} has the distribution {fn}")
        if self.temperature is None:
            return self.estimator(fn)
        if isinstance(fn, PhantomUnit):
            raise TypeError(f"KHotReparam relaxes designs of a fixed size, but {name!r} is a PhantomUnit")
        if size_varies(fn):
            raise TypeError(f"KHotReparam relaxes designs of a fixed size, but {name!r} has the support {fn.support}")
        return RelaxedKHot(self.temperature, logits=_log_weights(fn), k=fn.k)


def _log_weights(design: SamplingDesign) -> Tensor:
    # The log-odds, where the logits are not log-odds: with a map other than the logistic one, or with probs.
    if design.parameter_name == "probs" or (relaxes_logits(design) and design.relaxation is not sigmoid_topk):
        return torch.logit(unrounded(design).probs).to(design.dtype)
    logits, softness = design.logits, design.temperature
    return logits / (softness.unsqueeze(-1) if isinstance(softness, Tensor) else softness)
