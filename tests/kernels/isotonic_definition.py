"""The definition of isotonic optimisation: pooling adjacent violators item by item, each block by bisection."""

import torch
from torch import Tensor

HALVINGS = 100  # of a bracket, until its ends are neighbouring doubles


def isotonic(
    s: Tensor, w: Tensor, strength: Tensor, p: float, magnitude: bool, dual: bool, max_iter: int, names: str
) -> tuple[Tensor, Tensor]:
    """The solution and its blocks; for the arguments see :func:`khot.kernels.isotonic.exact.isotonic`."""
    n = s.shape[-1]
    v, blocks = torch.zeros_like(s, dtype=torch.float64), torch.zeros_like(s, dtype=torch.long)
    rows = zip(s.double().reshape(-1, n), w.double().reshape(-1, n), strength.reshape(-1), strict=True)
    for i, (targets, weights, scale) in enumerate(rows):
        found: list[tuple[int, Tensor]] = []  # the start and the value of each block
        for j in range(n):
            start, value = j, _minimiser(targets[j : j + 1], weights[j : j + 1], scale, p, magnitude)
            while found and found[-1][1] < value:
                start = found.pop()[0]
                value = _minimiser(targets[start : j + 1], weights[start : j + 1], scale, p, magnitude)
            found.append((start, value))
        for number, (start, value) in enumerate(found):
            v.view(-1, n)[i, start:], blocks.view(-1, n)[i, start:] = value, number
    return v, blocks


def _minimiser(s: Tensor, w: Tensor, strength: Tensor, p: float, magnitude: bool) -> Tensor:
    """The v that minimises the sum of h over the items of a block."""

    def slope(v: Tensor) -> Tensor:
        distance = (s - v) / strength
        pull = distance.sign() * distance.abs() ** (1 / (p - 1))
        return ((w * v if magnitude else w) - pull).sum()

    low = high = s.mean()
    width = 1 + s.abs().sum() + strength * (1 + w.abs().sum())
    while slope(low) > 0:
        low, width = low - width, 2 * width
    while slope(high) < 0:
        high, width = high + width, 2 * width
    for _ in range(HALVINGS):
        middle = 0.5 * low + 0.5 * high
        low, high = (middle, high) if slope(middle) < 0 else (low, middle)
    return low
