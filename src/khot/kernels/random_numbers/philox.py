"""Random numbers as a function of a seed, a draw and a place in it, which torch and Triton kernels have in common.

Philox4x32 with ten rounds; the counter is (place, row, draw, 0), and the key is the seed. The
version in plain torch is the definition: torch's own generator is faster.

References:
    [1] Salmon, Moraes, Dror, Shaw (2011), "Parallel random numbers: as easy as 1, 2, 3".
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

WORD = 2**32 - 1


def draw_seed(device: torch.device, generator: torch.Generator | None = None) -> Tensor:
    """An int64 seed ``(1,)`` from a generator, or torch's own. It stays on the device, so the host does not wait."""
    return torch.randint(2**63 - 1, (1,), device=device, generator=generator)


def random_words(seed: Tensor, draws: int, rows: int, places: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Four blocks ``(draws, rows, places)`` of 32 random bits, as int64."""
    shape, zero = (draws, rows, places), torch.zeros((), dtype=torch.long, device=seed.device)
    draw, row, place = (
        torch.arange(count, device=seed.device).view(view).expand(shape)
        for count, view in zip(shape, ((-1, 1, 1), (-1, 1), (-1,)), strict=True)
    )
    c = (place, row, draw, zero.expand(shape))
    low, high = seed & WORD, (seed >> 32) & WORD
    for _ in range(10):
        first_word, third = c[0] * 0xD2511F53, c[2] * 0xCD9E8D57  # modulo 2^64
        c = (
            (third >> 32) & WORD ^ c[1] ^ low,
            third & WORD,
            (first_word >> 32) & WORD ^ c[3] ^ high,
            first_word & WORD,
        )
        low, high = (low + 0x9E3779B9) & WORD, (high + 0xBB67AE85) & WORD
    return c


def uniform(high: Tensor, low: Tensor) -> Tensor:
    """float64 numbers uniform on [0, 1), with 53 random bits."""
    return ((high << 21) | (low >> 11)).double() * 2.0**-53


def uniform_rows(seed: Tensor, draws: int, batch: Sequence[int], n: int) -> Tensor:
    """:func:`uniform` numbers ``(draws, *batch, n)``; two units share a value of the counter."""
    words = random_words(seed, draws, math.prod(batch), (n + 1) // 2)
    high, low = (torch.stack((words[i], words[j]), -1).flatten(-2)[..., :n] for i, j in ((0, 2), (1, 3)))
    return uniform(high, low).reshape(draws, *batch, n)
