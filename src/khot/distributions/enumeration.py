"""Enumeration: all k-hot vectors of a design, and quantities that are sums over all of them."""

import math
import operator
from collections.abc import Iterator

import torch
from torch import Tensor

from khot.laws.subsets import k_hot_vectors, k_hot_vectors_of_rank

from .rows import DesignOfRows

MAX_SUPPORT = 1_000_000  # the most subsets that enumerate_support lists; a longer list would not fit into memory
LISTED = 2**20  # units of the k-hot vectors that a sum over all of them lists at a time: 8 MB

TOO_MANY_ADVICE = "for a site that is too large to enumerate, khot.infer.KHotSwap samples the posterior"
DIFFERENT_SIZES_ADVICE = (
    "khot.infer.subset_categorical(design) enumerates rows of different sizes by the numbers of their vectors"
)


class EnumeratedDesign(DesignOfRows):
    """A design whose moments, entropy and mode are sums over all k-hot vectors unless a subclass overrides them."""

    has_enumerate_support = True

    def enumerate_support(self, expand: bool = True) -> Tensor:
        """All C(n, k) k-hot vectors in lexicographic order of their positions, along a new first dimension.

        Raises:
            NotImplementedError: If rows differ in ``k``.
            ValueError: If there are more than ``MAX_SUPPORT`` vectors.
        """
        n, k = operator.index(self.event_shape[0]), self._require_shared_k("enumerate_support", DIFFERENT_SIZES_ADVICE)
        count, batch_shape, param = math.comb(n, k), self.batch_shape, self.parameter
        if count > MAX_SUPPORT:
            raise ValueError(
                f"enumerate_support lists at most {MAX_SUPPORT} k-hot vectors, but C({n}, {k}) = {count}; "
                f"{TOO_MANY_ADVICE}"
            )
        values = k_hot_vectors(n, k, 0, count, like=param.detach())
        values = values.view(count, *(1,) * len(batch_shape), n)
        return values.expand(count, *batch_shape, n) if expand else values

    @property
    def pairwise_inclusion(self) -> Tensor:
        """Matrix ``(..., n, n)`` of E[x_i x_j], with ``mean`` on the diagonal; a sum over all k-hot vectors."""
        n = self.event_shape[0]
        pairs = self.parameter.new_zeros(*self.batch_shape, n, n, dtype=torch.float64)
        for value, log_prob in self._listed("pairwise_inclusion"):
            pairs = pairs + torch.einsum("s...,s...i,s...j->...ij", log_prob.exp(), value, value)
        return pairs.to(self.parameter.dtype)

    @property
    def covariance_matrix(self) -> Tensor:
        """Matrix ``(..., n, n)`` of the covariances of the x_i."""
        design = self.in_float64()
        mean = design.mean
        covariance = design.pairwise_inclusion - mean.unsqueeze(-1) * mean.unsqueeze(-2)
        return covariance.to(self.parameter.dtype)

    @property
    def mode(self) -> Tensor:
        """The most probable k-hot vector, found among all of them; for small C(n, k)."""
        best, most = self.parameter.detach().new_zeros(*self.batch_shape, self.event_shape[0]), None
        for value, log_prob in self._listed("mode"):
            largest, at = log_prob.detach().max(0)
            value = value.expand(*log_prob.shape, -1).take_along_dim(at[None, ..., None], 0).squeeze(0).to(best.dtype)
            is_better = largest > (-torch.inf if most is None else most)
            best = torch.where(is_better.unsqueeze(-1), value, best)
            most = largest if most is None else largest.maximum(most)
        return best

    def entropy(self) -> Tensor:
        """Entropy in nats, ``(...)``; computed as a sum over all k-hot vectors."""
        entropy = self.parameter.new_zeros(self.batch_shape, dtype=torch.float64)
        for _, log_prob in self._listed("entropy"):
            possible = log_prob > -torch.inf
            entropy = entropy - (log_prob.exp() * log_prob.masked_fill(~possible, 0.0)).sum(0)
        return entropy.to(self.parameter.dtype)

    def enumerates(self, wanted: str) -> bool:
        """Whether ``entropy`` or ``pairwise_inclusion`` is a sum over all k-hot vectors, if it exists at all."""
        return getattr(type(self), wanted) is getattr(EnumeratedDesign, wanted)

    def _listed(self, wanted: str) -> Iterator[tuple[Tensor, Tensor]]:
        """All k-hot vectors and their log-probabilities in float64, in chunks that fit into memory.

        Yields:
            Tensors ``(vectors, ..., n)``, which broadcast with the batch, and ``(vectors, *batch_shape)``. A row with
            fewer vectors than others repeats its last one with a log-probability of ``-inf``.

        Raises:
            NotImplementedError: If there is no ``_log_prob``, or there are too many vectors.
        """
        n, sizes, design = operator.index(self.event_shape[0]), self.sizes(wanted), self.in_float64()
        counts = [math.comb(n, k) for k in sizes]
        largest = max(counts, default=0)
        if largest > MAX_SUPPORT:
            raise self._unavailable(wanted, f" of {largest} k-hot vectors, which is more than {MAX_SUPPORT}")
        like, column = design.parameter.detach(), (-1, *(1,) * len(self.batch_shape))
        step = max(1, LISTED // max(1, like.numel()))
        for start in range(0, largest, step):
            rank = torch.arange(start, min(start + step, largest), device=like.device).view(column)
            if len(sizes) == 1:
                value, beyond = k_hot_vectors_of_rank(n, sizes[0], rank, like), None
            else:
                count = sum((number * (self.k == k) for k, number in zip(sizes, counts, strict=True)), 0 * self.k)
                value, beyond = k_hot_vectors_of_rank(n, self.k, rank.minimum(count - 1), like), rank >= count
            try:
                log_prob = design._log_prob(value)
            except NotImplementedError:
                raise self._unavailable(wanted) from None
            yield value, log_prob if beyond is None else log_prob.masked_fill(beyond, -torch.inf)

    def _log_prob(self, value: Tensor) -> Tensor:
        """The log-probability of k-hot values."""
        raise self._unavailable("log_prob")

    def _unavailable(self, wanted: str, of_what: str = "") -> NotImplementedError:
        *first, last = designs_with(wanted)
        return NotImplementedError(
            f"{type(self).__name__} has no {wanted}{of_what}; {', '.join(first)} and {last} have it"
        )


OPTIONAL = {"log_prob": "_log_prob", "entropy": "entropy", "pairwise_inclusion": "pairwise_inclusion", "mode": "mode"}
"""Members that not all designs have, each with the method that defines it."""


def designs_with(wanted: str) -> list[str]:
    """The designs of this package that have a ``log_prob``, ``entropy``, ``mode`` ..., as users write them.

    The most complete come first. Designs that have it only with one setting come last, with that setting.
    """
    members = [
        cls for cls in _members(EnumeratedDesign) if cls._complete_with is not None and wanted in _defined_by(cls)
    ]
    members.sort(key=lambda cls: (cls._complete_with != "", -len(_defined_by(cls)), cls.__name__))
    return [f"{cls.__name__}({cls._complete_with})" if cls._complete_with else cls.__name__ for cls in members]


def _defined_by(cls: type[EnumeratedDesign]) -> set[str]:
    return {name for name, own in OPTIONAL.items() if getattr(cls, own) is not getattr(EnumeratedDesign, own)}


def _members(base: type[EnumeratedDesign]) -> Iterator[type[EnumeratedDesign]]:
    """The designs of this package: its classes that have no subclasses there."""
    derived = [cls for cls in base.__subclasses__() if cls.__module__.startswith(f"{__package__}.")]
    for cls in derived:
        yield from _members(cls)
    if not derived:
        yield base
