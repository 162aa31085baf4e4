"""Order sampling: takes the first k units in a random order. The base of two designs."""

import math
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Size, Tensor
from torch.types import _size as SizeLike
from typing_extensions import Self

from khot.kernels import order_sampling
from khot.kernels.order_sampling import depth_for
from khot.kernels.order_sampling.noises import Noise
from khot.kernels.random_numbers.philox import draw_seed
from khot.laws import order_sampling as law
from khot.relaxations import topk_mask
from khot.relaxations.hard import indices_of_largest

from .base import lazy
from .design import SamplingDesign
from .entry import entry
from .rows import in_slabs
from .sizes import shared_k

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
    needed. On a CPU without numba a few rows are processed at a time, in at most 150 MB unless a single row needs more.
    On an accelerator an integral and its gradient take at most 40 launches each for rows of one k that are neither
    many nor long, and positions that are finite and at most 160 apart; otherwise several hundred.
    """

    _noise: ClassVar[Noise]

    @lazy
    def _positions(self) -> Tensor:
        """The positions: ``inf`` for units that are always drawn, ``-inf`` for those that are never drawn."""
        raise NotImplementedError(f"{type(self).__name__} does not define `_positions`")

    @lazy
    def _centre(self) -> Tensor:
        return order_sampling.rank_centre(self._positions.detach(), self._size)

    @lazy
    def _rank_scale(self) -> Tensor:
        return order_sampling.rank_scale(self._positions.detach(), self._centre)

    @lazy
    def _inclusion(self) -> Tensor:
        return self._integral(law.inclusion_probabilities).to(self._wide.dtype)

    @entry
    def expand(self, batch_shape: SizeLike, _instance: Any = None) -> Self:
        _ = self._rank_scale if self._kernel(1) is None else self._centre  # once here, rather than for every copy
        return super().expand(batch_shape, _instance)

    @property
    def _mean(self) -> Tensor:
        return self._inclusion

    def _mode(self) -> Tensor:
        """The k-hot vector of the k largest positions; the density of the noise is log-concave."""
        return topk_mask(self._positions, self._size)

    def _sample(self, shape: Size, generator: torch.Generator | None) -> Tensor:
        kernel = self._kernel(math.prod(shape))
        if kernel is None:
            return topk_mask(self._ranks(shape, generator).neg_(), self._size)
        theta, draws = self._positions.detach(), math.prod(shape)
        seed = draw_seed(theta.device, generator)
        drawn = kernel(theta, self._k, self._centre, seed, draws, self.dtype, self._noise.name)
        return drawn.view(shape + self._batch_shape + self._event_shape)

    def _sample_indices(self, shape: Size, generator: torch.Generator | None) -> Tensor:
        k = shared_k(self, "sample_indices")
        if self._kernel(math.prod(shape)) is None:
            return indices_of_largest(self._ranks(shape, generator).neg_(), k)
        return indices_of_largest(self._sample(shape, generator), k)

    def _kernel(self, draws: int) -> Callable[..., Tensor] | None:
        return order_sampling.order_draw.kernel(self._positions, draws)

    def _ranks(self, shape: Size, generator: torch.Generator | None) -> Tensor:
        whole = shape + self._batch_shape + self._event_shape
        return order_sampling.draw_ranks(self._noise, self._rank_scale, whole, generator)

    def _log_prob(self, value: Tensor) -> Tensor:
        return self._integral(law.log_prob, value)

    def _integral(self, function: Callable[..., Tensor], *values: Tensor) -> Tensor:
        """``function(noise, positions, k, *values, depth)``; rows go in slabs where no kernel computes them."""
        depth = depth_for(self._wide.dtype)

        def of_rows(positions: Tensor, k: Tensor, *values: Tensor) -> Tensor:
            return function(self._noise, positions, k if self._shared_k is None else self._shared_k, *values, depth)

        positions = self._positions
        if law.is_fused(positions):
            return of_rows(positions, self._k, *values)
        return in_slabs(of_rows, self._k, positions, *values, largest=SLAB)
