"""The sparse maps by absolute value on a CPU, by the loops of all kinds of thresholds."""

from torch import Tensor

from ..threshold import numba_backend


def _kind(magnitude: bool) -> str:
    return "magnitude" if magnitude else "signed"


def threshold(x: Tensor, k: Tensor, strength: Tensor, link: str, magnitude: bool, check: bool) -> tuple[Tensor, Tensor]:
    return numba_backend.threshold(x, k, strength, link, _kind(magnitude), "strength", check)


def odd_map(
    x: Tensor, k: Tensor, strength: Tensor, link: str, magnitude: bool, check: bool
) -> tuple[Tensor, Tensor, Tensor]:
    return numba_backend.mask(x, k, strength, link, _kind(magnitude), "strength", check)


def odd_map_derivative(
    x: Tensor,
    strength: Tensor,
    anchor: Tensor,
    offset: Tensor,
    grad: Tensor,
    link: str,
    magnitude: bool,
    with_strength: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    return numba_backend.mask_derivative(x, strength, anchor, offset, grad, link, _kind(magnitude), with_strength)
