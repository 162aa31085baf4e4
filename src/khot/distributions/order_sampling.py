"""Order sampling: takes the first k units in a random order. The base of two designs."""

import math
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.distributions.utils import lazy_property
from torch.types import _size as SizeLike
from typing_extensions import Self

from khot._validation import check_generator, checked_shape
from khot.kernels import order_sampling
from khot.kernels.order_sampling import depth_for
from khot.kernels.order_sampling.noises import Noise
from khot.kernels.random_numbers.philox import draw_seed
from khot.laws import order_sampling as law
from khot.relaxations import topk_mask

from .design import SamplingDesign

SLAB = 2**13  # units of the rows that are integrated at a time; all their nodes take up to 150 MB


class OrderSampling(SamplingDesign):
    r"""Base of the designs that select the k smallest of independent ranks, one per unit.

    .. math:: Q_i = e^{E_i - \vartheta_i}, \quad x_i = 1 \text{ if } Q_i \text{ is among the } k \text{ smallest}

    with noise E of a given law, so a draw is noise and a top-k. The log-probability and the inclusion probabilities are
    integrals over one variable, computed by quadrature. A subclass defines the noise, and how the positions
    :math:`\vartheta` follow from its parameter.

    On CUDA and ROCm tensors, and on a CPU with numba, a draw is one kernel, which makes the noise and selects by it,
    also with a k per row. On an accelerator, a small number of draws of more than 131072 units is left to torch.

    On a CPU with numba, both integrals and their gradients are loops over rows with negligible memory, unless positions
    that matter are more than 300 apart, as those of the least probable sets are. Elsewhere the integrals hold all units
    at all nodes of the quadrature, 80 or more, in several float64 numbers each: up to 20 KB per unit if gradients are
    needed. On a CPU without numba some rows are processed at a time, so that this is 150 MB, or one row.
    On an accelerator an integral and its gradient take at most 40 launches each for rows of one k that are neither
    many nor long, and positions that are finite and at most 160 apart; otherwise several hundred.
    """

    _noise: ClassVar[Noise]

    @lazy_property
    def _positions(self) -> Tensor:
        """The positions: ``inf`` for units that are always drawn, ``-inf`` for those that are never drawn."""
        raise NotImplementedError(f"{type(self).__name__} does not define `_positions`")

    @lazy_property
    def _centre(self) -> Tensor:
        return order_sampling.rank_centre(self._positions.detach(), self.size)

    @lazy_property
    def _rank_scale(self) -> Tensor:
        return order_sampling.rank_scale(self._positions.detach(), self._centre)

    @lazy_property
    def _inclusion(self) -> Tensor:
        def inclusion(positions: Tensor, k: Tensor) -> Tensor:
            return law.inclusion_probabilities(self._noise, positions, self._size_of(k), self._depth)

        positions = self._positions
        if law.is_fused(positions):
            return inclusion(positions, self.k).to(self.parameter.dtype)
        return self._in_slabs(inclusion, positions, largest=SLAB).to(self.parameter.dtype)

    @property
    def _depth(self) -> float:
        return depth_for(self.parameter.dtype)

    def expand(self, batch_shape: SizeLike, _instance: Any = None) -> Self:
        _ = self._rank_scale if self._kernel(()) is None else self._centre  # once here, rather than for every copy
        return super().expand(batch_shape, _instance)

    @property
    def mean(self) -> Tensor:
        """Inclusion probabilities P(x_i = 1)."""
        return self._inclusion

    @property
    def mode(self) -> Tensor:
        """The k-hot vector of the k largest positions; the density of the noise is log-concave."""
        return topk_mask(self._positions, self.size).to(self.parameter.dtype)

    def sample(self, sample_shape: SizeLike = torch.Size(), *, generator: torch.Generator | None = None) -> Tensor:
        check_generator(generator, self.parameter.device)
        kernel = self._kernel(sample_shape)
        if kernel is not None:
            return self._draw_with(kernel, sample_shape, generator)
        ranks = self._ranks(sample_shape, generator)
        return topk_mask(ranks.neg_(), self.size).to(self.parameter.dtype)

    def sample_indices(
        self, sample_shape: SizeLike = torch.Size(), *, generator: torch.Generator | None = None
    ) -> Tensor:
        check_generator(generator, self.parameter.device)
        k = self._require_shared_k("sample_indices")
        kernel = self._kernel(sample_shape)
        if kernel is None:
            ranks = self._ranks(sample_shape, generator)
        else:
            ranks = -self._draw_with(kernel, sample_shape, generator)
        return ranks.topk(k, largest=False, sorted=False).indices.sort(-1).values

    def _kernel(self, sample_shape: SizeLike) -> Callable[..., Tensor] | None:
        draws = math.prod(checked_shape("sample_shape", sample_shape))
        return order_sampling.order_draw.kernel(self._positions, draws)

    def _draw_with(
        self, kernel: Callable[..., Tensor], sample_shape: SizeLike, generator: torch.Generator | None
    ) -> Tensor:
        theta, dtype = self._positions.detach(), self.parameter.dtype
        seed, draws = draw_seed(theta.device, generator), math.prod(sample_shape)
        drawn = kernel(theta, self.k, self._centre, seed, draws, dtype, self._noise.name)
        return drawn.view(self._extended_shape(sample_shape))

    def _ranks(self, sample_shape: SizeLike, generator: torch.Generator | None) -> Tensor:
        return order_sampling.draw_ranks(self._noise, self._rank_scale, self._extended_shape(sample_shape), generator)

    def _log_prob(self, value: Tensor) -> Tensor:
        def log_prob(positions: Tensor, k: Tensor, value: Tensor) -> Tensor:
            return law.log_prob(self._noise, positions, self._size_of(k), value, self._depth)

        positions = self._positions
        if law.is_fused(positions):
            return log_prob(positions, self.k, value).to(self.parameter.dtype)
        return self._in_slabs(log_prob, positions, value, largest=SLAB).to(self.parameter.dtype)
