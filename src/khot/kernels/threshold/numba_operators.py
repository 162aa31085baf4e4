"""The operators of masks, whose last argument says whether they are logarithms, by the loops of all kinds."""

from torch import Tensor

from . import numba_backend
from .numba_backend import PLAIN

__all__ = ["PLAIN", "mask", "mask_derivative", "threshold"]


def threshold(x: Tensor, k: Tensor, scale: Tensor, link: str, softness: str, check: bool) -> tuple[Tensor, Tensor]:
    return numba_backend.threshold(x, k, scale, link, "mask", softness, check)


def mask(
    x: Tensor, k: Tensor, scale: Tensor, link: str, log: bool, softness: str, check: bool
) -> tuple[Tensor, Tensor, Tensor]:
    return numba_backend.mask(x, k, scale, link, "log_mask" if log else "mask", softness, check)


def mask_derivative(
    x: Tensor, scale: Tensor, anchor: Tensor, offset: Tensor, grad: Tensor, link: str, log: bool, with_scale: bool
) -> tuple[Tensor, Tensor, Tensor]:
    kind = "log_mask" if log else "mask"
    return numba_backend.mask_derivative(x, scale, anchor, offset, grad, link, kind, with_scale)
