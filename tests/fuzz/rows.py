"""Seeded rows for fuzz tests: scales, softness, ties, outliers, masks, sums of all sizes, in batches of one length."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

LENGTHS = {1: 3, 2: 10, 3: 15, 5: 20, 8: 20, 17: 15, 64: 12, 300: 4, 4500: 0.2}  # with their shares of the rows
LARGEST = {torch.float32: 30.0, torch.float64: 30.0}  # decimal exponents of ordinary scales
NEAREST = {torch.float32: 5.0, torch.float64: 10.0}  # of how near to an integer a sum comes, still off every kink
NUMBERS = 2**12  # entries of a batch that are made at a time, at most so many rows


class Rows(NamedTuple):
    """A batch of rows.

    Attributes:
        x: Scores (rows, n), float32 or float64.
        k: Sums (rows,), float64.
        softness: Softness (rows,), float64, in the normal range of the dtype of ``x``.
        weight: Cotangent (rows, n) in the dtype of ``x``, for one scalar that is differentiated.
    """

    x: Tensor
    k: Tensor
    softness: Tensor
    weight: Tensor


class _Dice:
    """Random numbers for a batch of rows."""

    def __init__(self, seed: int, rows: int, n: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.rows, self.n = rows, n

    def uniform(self, low: float = 0.0, high: float = 1.0) -> Tensor:
        return low + (high - low) * torch.rand(self.rows, 1, generator=self.generator, dtype=torch.float64)

    def integer(self, count: int) -> Tensor:
        return torch.randint(count, (self.rows, 1), generator=self.generator)

    def happens(self, probability: float) -> Tensor:
        return self.uniform() < probability

    def normal(self) -> Tensor:
        return torch.randn(self.rows, self.n, generator=self.generator, dtype=torch.float64)

    def items(self, probability: float) -> Tensor:
        """Which items of a row something happens to."""
        return torch.rand(self.rows, self.n, generator=self.generator) < probability


def _shapes(dice: _Dice) -> Tensor:
    """Rows of about unit size: normal, uniform, with ties, equal, in clusters, spread over many powers of ten."""
    normal = dice.normal()
    uniform = torch.rand(normal.shape, generator=dice.generator, dtype=torch.float64)
    kinds = [
        normal,
        uniform,
        normal.mul(2).round(),
        normal[:, :1].expand_as(normal),
        normal.sign() + 1e-6 * uniform,
        normal.sign() * (30 * (uniform - 1)).mul(0.5).exp(),
    ]
    return torch.stack(kinds).gather(0, dice.integer(len(kinds)).expand_as(normal).unsqueeze(0)).squeeze(0)


def _outliers(dice: _Dice, x: Tensor, spread: Tensor, largest: float) -> Tensor:
    """One or a few items far away, most of them below, as what masks without -inf."""
    far = torch.where(dice.happens(0.3), dice.uniform(2, 20), dice.uniform(17, 32))
    size = (spread.log10() + far).clamp(max=torch.tensor(largest, dtype=torch.float64).log10()).float().double()
    size = torch.where(dice.happens(0.2), largest, 10.0**size).clamp(max=largest)
    place = torch.zeros_like(x).scatter(1, dice.integer(dice.n), 1.0).bool() | dice.items(0.1)
    sign = torch.where(dice.happens(0.8), -1.0, 1.0)
    return torch.where(place & dice.happens(0.15), sign * size, x)


def _sums(dice: _Dice, free: Tensor, nearest: float, limits: bool, integers: bool) -> Tensor:
    """k from 0 to the number of unmasked items: integers, reals, some next to integers, some next to the limits."""
    integer = (dice.uniform() * (free + 1)).floor().clamp(max=free)
    if not integers:
        integer = torch.where(dice.happens(0.5), 0, free)
    distance = 10.0 ** -dice.uniform(2, nearest)
    tiny = 10.0 ** -dice.uniform(1, 0.8 * nearest)
    kinds = [
        dice.uniform() * free,
        integer if limits else integer.clamp(min=1).minimum((free - 1).clamp(min=1)),
        integer + torch.where(dice.happens(0.5), distance, -distance),
        torch.where(dice.happens(0.5), tiny, free - tiny),
        dice.uniform() * free,
    ]
    k = torch.stack(kinds).gather(0, dice.integer(len(kinds)).unsqueeze(0)).squeeze(0)
    return torch.where((k >= 0) & (k <= free), k, 0.371 * free)


def make_rows(
    seed: int,
    rows: int,
    n: int,
    dtype: torch.dtype,
    *,
    masked: bool = True,
    limits: bool = True,
    integers: bool = True,
    extremes: bool = True,
) -> Rows:
    """One batch.

    Args:
        seed: What the batch is a function of.
        rows: Number of rows.
        n: Their length.
        dtype: float32 or float64.
        masked: Whether some items are -inf.
        limits: Whether k may be 0 or the number of unmasked items.
        integers: Whether k may be an integer in between, or next to one.
        extremes: Whether some rows come near the largest and smallest numbers of the dtype.
    """
    dice, limit = _Dice(seed, rows, n), torch.finfo(dtype)
    largest = LARGEST[dtype]
    exponent = torch.where(dice.happens(0.5), dice.uniform(-1, 1), dice.uniform(-largest, largest))
    spread = 10.0**exponent
    x = _shapes(dice) * spread
    x = x + torch.where(dice.happens(0.2), spread * 10.0 ** dice.uniform(0, 18) * dice.uniform(-1, 1), 0.0)
    relative = torch.where(dice.happens(0.5), dice.uniform(-2, 2), dice.uniform(-12, 12))
    softness = torch.where(dice.happens(0.75), spread * 10.0**relative, 10.0 ** dice.uniform(-12, 12))
    x = _outliers(dice, x, spread, limit.max)
    if extremes:
        chosen = dice.happens(0.02)
        x = torch.where(chosen, x / x.abs().amax(-1, keepdim=True).clamp(min=1e-200) * limit.max, x)
        softness = torch.where(chosen & dice.happens(0.5), limit.max * 10.0 ** -dice.uniform(0, 8), softness)
        softness = torch.where(dice.happens(0.01), limit.tiny * 10.0 ** dice.uniform(0, 3), softness)
    x = x.clamp(-limit.max, limit.max).to(dtype)
    if masked:
        hidden = dice.items(0.3) & dice.happens(0.15)
        hidden[:, 0] = False
        x = x.masked_fill(hidden, -torch.inf)
    k = _sums(dice, x.isfinite().sum(-1, keepdim=True).double(), NEAREST[dtype], limits, integers)
    softness = softness.clamp(2 * limit.tiny, limit.max)  # half of transport's epsilon is a temperature
    return Rows(x, k.squeeze(1), softness.squeeze(1), dice.normal().to(dtype))


def batches(seed: int, total: int, dtype: torch.dtype, **options: bool) -> Iterator[Rows]:
    """Batches of all lengths with about ``total`` rows between them; options of :func:`make_rows`."""
    shares = sum(LENGTHS.values())
    for n, share in LENGTHS.items():
        left = round(total * share / shares)
        step = max(1, 8 * NUMBERS // n)
        while left > 0:
            rows = min(left, step, NUMBERS)
            seed += 1
            yield make_rows(1000 * seed + n, rows, n, dtype, **options)
            left -= rows


def compare(
    name: str, rows: Rows, what: str, got: Tensor, expected: Tensor, tolerance: Tensor, used: Tensor | None = None
) -> None:
    """All rows, or those that are ``used``, within their tolerance, and none with a NaN."""
    largest, got = torch.finfo(rows.x.dtype).max, got.double()
    near = ((got - expected).abs() <= tolerance) | (tolerance > largest)  # of numbers beyond the dtype that cancel
    edge = (expected.abs() > largest / 16) & (got.sign() == expected.sign())  # overflows sooner or later
    counts = torch.ones_like(rows.k, dtype=torch.bool) if used is None else used
    wrong = ~(near | edge) & counts.reshape(-1, *[1] * (got.dim() - 1)) | got.isnan()
    if bool(wrong.any()):
        row = int(wrong.nonzero()[0, 0])
        x, k, s = rows.x[row].tolist(), rows.k[row].item(), rows.softness[row].item()
        shown = x if len(x) <= 12 else f"{x[:12]}... n={len(x)}"
        raise AssertionError(
            f"{int(wrong.reshape(len(wrong), -1).any(1).sum())} rows, {name}: {what} of {rows.x.dtype} x={shown}, "
            f"k={k!r}, softness={s!r}, weight={rows.weight[row][:12].tolist()}: "
            f"got {got[row].tolist()}, expected {expected[row].tolist()}"
        )
