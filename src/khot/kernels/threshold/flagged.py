"""What the numba backend leaves, by the torch backends of this folder and of the magnitudes."""

from torch import Tensor

from ..contents import check_contents
from ..magnitude import torch_backend as by_size
from ..rows import row_range
from . import torch_backend as by_value

ODD = "signed", "magnitude"


def check(x: Tensor, k: Tensor, scale: Tensor, kind: str, softness: str) -> None:
    """ValueError for rows of x (rows, n) with bad contents, or a k or scale (rows,) out of range."""
    if kind in ODD:
        by_size.check_rows(x, k, scale)
    else:
        check_contents(x, k, scale, softness, row_range(x))


def threshold(
    x: Tensor, k: Tensor, scale: Tensor, link: str, kind: str, softness: str, check: bool
) -> tuple[Tensor, Tensor]:
    if kind in ODD:
        return by_size.threshold(x, k, scale, link, kind == "magnitude", check)
    return by_value.threshold(x, k, scale, link, softness, check)


def mask(
    x: Tensor, k: Tensor, scale: Tensor, link: str, kind: str, softness: str, check: bool
) -> tuple[Tensor, Tensor, Tensor]:
    if kind in ODD:
        return by_size.odd_map(x, k, scale, link, kind == "magnitude", check)
    return by_value.mask(x, k, scale, link, kind == "log_mask", softness, check)


def mask_derivative(
    x: Tensor, scale: Tensor, anchor: Tensor, offset: Tensor, grad: Tensor, link: str, kind: str, with_scale: bool
) -> tuple[Tensor, Tensor, Tensor]:
    if kind in ODD:
        return by_size.odd_map_derivative(x, scale, anchor, offset, grad, link, kind == "magnitude", with_scale)
    return by_value.mask_derivative(x, scale, anchor, offset, grad, link, kind == "log_mask", with_scale)
