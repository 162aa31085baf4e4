"""Random numbers as a function of a seed, a draw and a place in it, which torch and Triton kernels have in common.

Philox4x32 with ten rounds; the counter is (place, draw, 0, 0), the key the seed. In plain torch it is here as the
definition: for numbers alone torch's own generator is faster.

References:
    [1] Salmon, Moraes, Dror, Shaw (2011), "Parallel random numbers: as easy as 1, 2, 3".
"""

import math

import torch
from torch import Tensor

WORD = 2**32 - 1


def draw_seed(device: torch.device, generator: torch.Generator | None = None) -> Tensor:
    """An int64 seed ``(1,)`` from a generator, or torch's own, of the device, where it stays: nobody waits for it."""
    return torch.randint(2**63 - 1, (1,), device=device, generator=generator)


def random_words(seed: Tensor, draws: int, places: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Four blocks ``(draws, places)`` of 32 random bits, as int64."""
    place = torch.arange(places, device=seed.device).expand(draws, places)
    draw = torch.arange(draws, device=seed.device).unsqueeze(-1).expand(draws, places)
    zero = torch.zeros_like(place)
    c = (place, draw, zero, zero)
    low, high = seed & WORD, (seed >> 32) & WORD
    for _ in range(10):
        first, third = c[0] * 0xD2511F53, c[2] * 0xCD9E8D57  # modulo 2^64
        c = ((third >> 32) & WORD ^ c[1] ^ low, third & WORD, (first >> 32) & WORD ^ c[3] ^ high, first & WORD)
        low, high = (low + 0x9E3779B9) & WORD, (high + 0xBB67AE85) & WORD
    return c


def uniform(high: Tensor, low: Tensor) -> Tensor:
    """float64 numbers uniform on [0, 1), of 53 bits."""
    return ((high << 21) | (low >> 11)).double() * 2.0**-53


def uniform_rows(seed: Tensor, shape: tuple[int, ...]) -> Tensor:
    """:func:`uniform` numbers for draws ``shape[:-1]`` of ``shape[-1]`` units, two for each place of the counter."""
    a, b, c, d = random_words(seed, math.prod(shape[:-1]), (shape[-1] + 1) // 2)
    high, low = (torch.stack(pair, -1).flatten(-2)[:, : shape[-1]] for pair in ((a, c), (b, d)))
    return uniform(high, low).view(shape)
