"""The random numbers of :mod:`khot.kernels.random_numbers.philox` inside Triton kernels, which do not store them.

The seed is in device memory, so a replayed graph makes new draws, and the host does not wait for the device.
"""

# mypy: disable-error-code="no-untyped-def"

import triton
import triton.language as tl


@triton.jit
def random_words(seed, draw, row, place):
    """Four blocks of 32 random bits for a block of places of one row of a draw."""
    place = place.to(tl.uint32)
    zero = place * 0
    return tl.philox(seed, place, zero + row.to(tl.uint32), zero + draw.to(tl.uint32), zero)


@triton.jit
def _fraction(high, low):
    return high.to(tl.float32) * 2.3283064365386963e-10 + low.to(tl.float32) * 5.421010862427522e-20  # 2^-32, 2^-64


@triton.jit
def uniform_and_rest(high, low):
    """u uniform on (0, 1) and 1 - u in float32 from 64 bits, neither of them 0, each with its own relative accuracy."""
    return _fraction(high, low | 1), _fraction(high ^ 0xFFFFFFFF, (low ^ 0xFFFFFFFF) | 1)


@triton.jit
def uniform_double(high, low):
    """A float64 number uniform on [0, 1), with 53 random bits."""
    bits = (high.to(tl.uint64) << 21) | (low >> 11).to(tl.uint64)
    return bits.to(tl.float64) * 1.1102230246251565e-16  # 2^-53
