"""Several chains of one model in a batch, in an additional plate to the left of all others, like vectorised particles.

A site whose value has the shape ``(*batch_shape, *event_shape)`` in one run of the model has the shape
``(chains, 1, ..., 1, *batch_shape, *event_shape)`` in that plate. Users pass and get values of the shape
``(chains, *batch_shape, *event_shape)``, as with the processes of ``MCMC(num_chains=...)``.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pyro
import torch
from pyro import poutine
from torch import Tensor

from .sites import nesting_of, terms_from, total_log_prob

PLATE = "khot_chains"
ADVICE = (
    "`chains` needs a model that is written for an additional batch dimension on the left, as for "
    "vectorize_particles=True: (inputs * x).sum(-1) instead of inputs @ x"
)


class InChains:
    """A model in the plate of the chains; unlike a closure it can be pickled.

    Attributes:
        number: The number of chains.
        dim: The dimension of their plate among those of the batch, -1, -2, ...; known after :meth:`learn`.
    """

    def __init__(self, model: Callable[..., Any], number: int) -> None:
        self.model, self.number, self.dim = model, number, -1
        self._inserted: dict[str, int] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with pyro.plate(PLATE, self.number, dim=self.dim):
            return self.model(*args, **kwargs)

    def learn(self, trace: Any) -> None:
        """Learns the shapes of the sites from a run of the model outside the plate."""
        most = nesting_of(trace)
        self.dim = -1 - most
        self._inserted = {term["name"]: most - len(term["fn"].batch_shape) for term in terms_from(trace)}

    def inside(self, name: str, values: Tensor) -> Tensor:
        """Values ``(chains, ...)`` of a site in the shape that they have in the plate."""
        return values.reshape(self.number, *(1,) * self._inserted[name], *values.shape[1:])

    def by_chain(self, name: str, base: Any, value: Tensor) -> "ByChain":
        """The transform that moves the chains of this site to the front, given a value in the plate."""
        return ByChain(base, value.dim(), self._inserted[name])

    def trace_of(self, traces: list[Any], names: list[str], *args: Any, **kwargs: Any) -> Any:
        """A run of all chains, with the values of the latent sites from these runs of the model.

        Raises:
            ValueError: If the model fails in the plate, or has a different log joint density there.
        """
        values = {
            name: self.inside(name, torch.stack([trace.nodes[name]["value"].detach() for trace in traces]))
            for name in names
        }
        try:
            with torch.no_grad(), pyro.validation_enabled(False):
                together = poutine.trace(poutine.condition(self, data=values)).get_trace(*args, **kwargs)
                together.compute_log_prob()
        except (RuntimeError, ValueError, IndexError) as error:
            raise ValueError(f"{ADVICE} ({type(error).__name__}: {error})") from error
        expected = torch.stack([total_log_prob(trace) for trace in traces]).sum()
        found = total_log_prob(together)
        # In half precision, batching the chains may change the order of sums and thus the result.
        tolerance = max(torch.finfo(term["log_prob"].dtype).eps for term in terms_from(together)) ** 0.5
        if not torch.allclose(found, expected, rtol=tolerance, atol=tolerance):
            raise ValueError(
                f"{ADVICE}; the log joint density of {self.number} chains together is {float(found):.6g}, but the sum "
                f"over the chains is {float(expected):.6g}"
            )
        return together


class ByChain:
    """The inverse of a transform, after which samples start with the chain; ``MCMC`` applies it to all samples.

    Args:
        base: The transform of the site to unconstrained space; None for the identity.
        dim: Number of dimensions of an unconstrained value in the plate of the chains.
        inserted: Number of dimensions of size 1 after that of the chains.
    """

    def __init__(self, base: Any, dim: int, inserted: int) -> None:
        self.base, self.dim, self.inserted = base, dim, inserted

    def inv(self, z: Tensor) -> Tensor:
        """Transforms ``(chains, 1, ..., *shape)``, or samples ``(processes, samples, chains, 1, ..., *shape)``.

        Returns:
            ``(chains, *shape)``, or ``(processes * chains, samples, *shape)``.
        """
        before = z.dim() - self.dim
        value = z if self.base is None else self.base.inv(z)
        value = value.flatten(before, before + self.inserted)
        return value.movedim(before, before - 1).flatten(0, 1) if before == 2 else value


@dataclass
class Acceptance:
    """The mean acceptance probability of each chain; 0 for a chain in which nothing could be swapped."""

    total: Tensor | float = 0.0
    count: Tensor | float = 0.0

    def add(self, probability: Tensor, possible: Tensor, chains: int) -> None:
        if len(probability) > chains:
            probability, possible = (x.view(chains, -1).sum(-1) for x in (probability, possible))
        self.total = self.total + probability
        self.count = self.count + possible

    def value(self) -> Tensor:
        total, count = (torch.as_tensor(x, dtype=torch.float64).cpu().reshape(-1) for x in (self.total, self.count))
        return total / count.clamp(min=1)
