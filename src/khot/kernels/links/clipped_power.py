r"""The links of the sparse maps: the compact F(z) = clip(z, 0, 1)^q, one for every exponent p of the regulariser.

argmax of <x, y> - (s / p) sum y^p over the capped simplex has y_i^(p-1) = (x_i - t) / s between 0 and 1, hence
q = 1 / (p - 1).
"""

from functools import lru_cache

import torch
from torch import Tensor

from .base import Link, Moments

LARGEST_PRODUCT = 100  # largest exponent of a power that is computed by multiplications


class ClippedPower(Link):
    r"""F(z) = clip(z, 0, 1)^q with q = 1 / (p - 1), the link of sparse top-k; for p = 2 it is linear between 0 and 1.

    Args:
        p: Exponent of the regulariser, 1 < p <= 2.
    """

    link_id = 3
    compact = True
    reach = 1.0

    def __init__(self, p: float) -> None:
        q = 1 / (p - 1)
        self.q = float(round(q)) if abs(q - round(q)) < 1e-12 * q else q  # p = 4/3 should give 3
        if self.link_id is not None:
            self.key = self.link_id, self.q  # type: ignore[misc]

    @property
    def condition(self) -> float:  # type: ignore[override]
        return self.q

    @property
    def kernel(self) -> str:  # type: ignore[override]
        return "clip" if self.q == 1 else "clip_power"

    @property
    def moments(self) -> Moments:  # type: ignore[override]
        q = self.q
        return Moments(mean=q / (q + 1), variance=q / ((q + 1) ** 2 * (q + 2)))

    def value(self, z: Tensor) -> Tensor:
        return _power(z.clamp(0, 1), self.q)

    def complement(self, z: Tensor) -> Tensor:
        return -torch.expm1(self.q * z.clamp(0, 1).log())

    def slope(self, z: Tensor) -> Tensor:
        inside = ((z > 0) & (z < 1)).to(z.dtype)
        base = z.clamp(0, 1) * inside + (1 - inside)  # 1 outside, where powers of 0 would have infinite derivatives
        return self.q * base ** (self.q - 1) * inside

    def value_and_slope(self, z: Tensor) -> tuple[Tensor, Tensor]:
        base = z.clamp(0, 1)
        if self.q == 1:
            return base, ((z > 0) & (z < 1)).to(z.dtype)
        power = _power(base, self.q - 1)
        return power * base, power * (z < 1) * self.q

    def inverse(self, p: Tensor) -> Tensor:
        return p ** (1 / self.q)


def _power(z: Tensor, exponent: float) -> Tensor:
    """z^exponent; for a small integer by multiplications, which take a tenth of the time of logarithms."""
    if exponent <= 3 or exponent > LARGEST_PRODUCT or exponent != int(exponent):
        return z.pow(exponent)
    root = _power(z, exponent // 2)
    return root * root * z if exponent % 2 else root * root


_kept_clipped_power = lru_cache(maxsize=256)(ClippedPower)  # limited, as an annealed exponent changes in each step


def clipped_power(p: float, is_compiling: bool | None = None) -> ClippedPower:
    """The link for this p; a caller may pass ``is_compiling`` if it knows whether the call is traced by a compiler."""
    if torch.compiler.is_compiling() if is_compiling is None else is_compiling:
        return ClippedPower(next(iter({p})))  # hashing makes an input of the graph one of its constants
    return _kept_clipped_power(p)
