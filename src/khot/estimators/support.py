"""All values that a law can take, numbered. For several independent latents, these are all combinations."""

import math
from collections import Counter
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributions import Distribution

from khot._contents import can_look
from khot.constraints import k_hot
from khot.distributions.design import MAX_SUPPORT
from khot.laws.subsets import k_hot_vectors_of_rank

from .wrapper import base_law


class Support:
    """The values of a law, any range of which can be computed without the others.

    They are ordered by the values of the latents; the last latent varies fastest.

    Args:
        design: A law with ``enumerate_support``, or one over k-hot vectors; either may be made independent over batch
            dimensions (``to_event``).
        limit: Start of the error message if there are too many values.

    Raises:
        NotImplementedError: If the rows of the batch differ in the number of ones of a latent.
        ValueError: If there are more than ``MAX_SUPPORT`` values.
    """

    def __init__(self, design: Distribution, limit: str) -> None:
        self.design, law = design, base_law(design)
        latents = math.prod(design.event_shape[: len(design.event_shape) - len(law.event_shape)])
        self._factor = (_KHot if isinstance(law.support, k_hot) else _Listed)(law, latents)
        counts = self._factor.counts
        if sum(math.log10(max(count, 1)) for count in counts) > math.log10(MAX_SUPPORT) + 1e-9:
            raise ValueError(f"{limit}, but {self._factor.terms()} = {_in_words(counts)}; score_function samples")
        self.count = math.prod(counts)
        # A value is numbered in a mixed radix: the number of each latent times the number of values of all later ones.
        place = [math.prod(counts[latent + 1 :]) for latent in range(len(counts))]
        self._place, self._radix = torch.tensor([place, counts], dtype=torch.long, device=self._factor.like.device)

    def values(self, start: int, stop: int) -> Tensor:
        """The values ``start`` to ``stop - 1``: ``(stop - start, *1 for each batch dimension, *event_shape)``."""
        number = torch.arange(start, stop, device=self._place.device).unsqueeze(-1)
        values = self._factor.values(number // self._place % self._radix)
        return values.view(stop - start, *(1,) * len(self.design.batch_shape), *self.design.event_shape)


class _KHot:
    """Latents that are k-hot vectors, each of one size or of several; values of smaller sizes come first."""

    def __init__(self, law: Distribution, latents: int) -> None:
        self.n, self.sizes = law.event_shape[0], _sizes(law, cast(k_hot, law.support), latents)
        self.like = law.mean.detach()
        self.counts = [sum(math.comb(self.n, k) for k in sizes) for sizes in self.sizes]

    def terms(self) -> str:
        return _product({sizes: [f"C({self.n}, {k})" for k in sizes] for sizes in self.sizes}, self.sizes)

    def values(self, ranks: Tensor) -> Tensor:
        """The values ``(m, latents, n)`` of ranks ``(m, latents)``."""
        values = self.like.new_empty(*ranks.shape, self.n)
        for sizes in set(self.sizes):
            columns = [latent for latent, own in enumerate(self.sizes) if own == sizes]
            values[:, columns] = self._of_sizes(ranks[:, columns], sizes)
        return values

    def _of_sizes(self, ranks: Tensor, sizes: tuple[int, ...]) -> Tensor:
        if len(sizes) == 1:
            return k_hot_vectors_of_rank(self.n, sizes[0], ranks, self.like)
        values = self.like.new_empty(*ranks.shape, self.n)
        for k in sizes:
            count = math.comb(self.n, k)
            own = (ranks >= 0) & (ranks < count)
            values[own] = k_hot_vectors_of_rank(self.n, k, ranks[own], self.like)
            ranks = ranks - count
        return values


class _Listed:
    """Latents of a law that lists its own values."""

    def __init__(self, law: Distribution, latents: int) -> None:
        self.like = law.enumerate_support(expand=False)
        self.counts = [self.like.shape[0]] * latents

    def terms(self) -> str:
        return _product({count: [str(count)] for count in self.counts}, self.counts)

    def values(self, ranks: Tensor) -> Tensor:
        return self.like[ranks]


def _sizes(law: Distribution, support: k_hot, latents: int) -> list[tuple[int, ...]]:
    """The possible numbers of ones of each latent, which must be the same in all rows of the batch."""
    shape = (math.prod(law.batch_shape) // max(latents, 1), latents)
    ends = []
    for k in (support.k, support.upper):
        if not isinstance(k, Tensor):
            ends.append([k] * latents)
            continue
        if not can_look(k):
            raise NotImplementedError("enumeration needs `k` as an int under vmap and for tensors without contents")
        rows = k.cpu().expand(law.batch_shape).reshape(shape)
        if len(rows) and not bool((rows == rows[0]).all()):
            sizes = [int(size) for size in rows.unique()]
            raise NotImplementedError(f"enumeration needs the same k in all rows, but got k in {sizes}")
        ends.append([int(size) for size in rows[0]] if len(rows) else [0] * latents)
    return [tuple(range(low, high + 1)) for low, high in zip(*ends, strict=True)]


def _product(terms: dict[Any, list[str]], factors: list[Any]) -> str:
    """Such as ``C(10, 5)^10 * (C(4, 1) + C(4, 2))``, where latents with the same terms are combined."""
    parts = []
    for key, power in Counter(factors).items():
        term = " + ".join(terms[key])
        parts.append(f"({term})" if len(terms[key]) > 1 and len(factors) > 1 else term)
        parts[-1] += f"^{power}" if power > 1 else ""
    return " * ".join(parts)


def _in_words(counts: list[int]) -> str:
    digits = sum(math.log10(max(count, 1)) for count in counts)
    return str(math.prod(counts)) if digits < 15 else f"about 1e{math.floor(digits)}"
