"""Convolution of pairs and its adjoint in plain torch: directly, or for wide children through the FFT."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

DIRECT_WIDTH = 33  # widest child that is convolved directly; beyond it the FFT is faster


def _fft_length(width: int, start: int, length: int) -> int:
    """A size with small factors, long enough that cyclic wrap-around spoils only entries that are not kept."""
    minimum = max(start + length, 2 * width - 1 - start)
    return min(odd << max(0, math.ceil(math.log2(minimum / odd))) for odd in (1, 3, 5, 9, 15))


def _compact(x: Tensor) -> Tensor:
    """A contiguous copy, never a view that keeps a larger buffer alive."""
    return x.clone(memory_format=torch.contiguous_format)


def pair_merge(x: Tensor, start: int, length: int) -> Tensor:
    """Convolves ``x[:, 0]`` with ``x[:, 1]`` along dim 0: ``(width, 2, ...)`` to ``length`` entries at ``start``."""
    width = x.shape[0]
    if width <= DIRECT_WIDTH:
        out = x.new_zeros(length, *x.shape[2:])
        for i in range(width):
            low, high = max(0, start - i), min(width, start + length - i)
            if low < high:
                out[i + low - start : i + high - start].addcmul_(x[low:high, 1], x[i, 0])
        return out
    size = _fft_length(width, start, length)
    spectrum = torch.fft.rfft(x, size, dim=0)
    return _compact(torch.fft.irfft(spectrum[:, 0] * spectrum[:, 1], size, dim=0)[start : start + length])


def pair_split(g: Tensor, x: Tensor, start: int) -> Tensor:
    """Gives each child the correlation of ``g`` with its sibling, ``(length, ...)`` to ``(width, 2, ...)``."""
    width, length = x.shape[0], g.shape[0]
    sibling = x.flip(1)
    if width <= DIRECT_WIDTH:
        out = torch.zeros_like(x)
        for j in range(width):
            low, high = max(0, start - j), min(width, start + length - j)
            if low < high:
                out[low:high].addcmul_(g[low + j - start : high + j - start].unsqueeze(1), sibling[j])
        return out
    size = _fft_length(width, start, length)
    spectrum = torch.fft.rfft(F.pad(g.movedim(0, -1), (start, 0)).movedim(-1, 0), size, dim=0)
    product = spectrum.unsqueeze(1) * torch.fft.rfft(sibling, size, dim=0).conj()
    return _compact(torch.fft.irfft(product, size, dim=0)[:width])
