"""The tournament of :mod:`khot.kernels.draws` in Triton: one program plays all duels of a draw, on chip.

Random bits, with the number of a unit in the last ones, are sorted: this is the random order. In every round the first
half of the places duels with the second half and writes the fates of the units that are decided; half as many go on.
Units beyond the row fill it up to a power of two; with probability 0 they lose, and change nothing. The duel of places
i and j uses the random number of place j, which is the second place in no other duel.

Layout: probs (rows, n), unit last stride; k (rows,); x (draws, n), the rows of a sample one after another. Arithmetic
is in float64, whatever the dtype of probs.
"""

# mypy: disable-error-code="no-untyped-def"
import torch
import triton
import triton.language as tl
from torch import Tensor

from ..gpu.plans import Table, plan
from ..gpu.random_numbers import random_words, uniform_double
from ..gpu.tools import on_device, rows_of, without_expansion

TOURNAMENT: Table = {torch.float64: ((128, 1), (512, 4), (4096, 16))}


@triton.jit
def _balance(p, k):
    """:func:`khot.kernels.draws.balance` of a row."""
    spread = p * (1.0 - p)
    share = (k.to(tl.float64) - tl.sum(p, 0)) / tl.maximum(tl.sum(spread, 0), 2.2250738585072014e-308)
    return p + spread * tl.minimum(tl.maximum(share, -1.0), 1.0)


@triton.jit
def _tournament(
    p_ptr, x_ptr, k_ptr, seed_ptr, stride_p, stride_x, stride_k, rows, batch, n,
    BLOCK: tl.constexpr,
):  # fmt: skip
    serial = tl.program_id(0)
    draw, number = serial // batch, serial % batch
    row = (serial % rows).to(tl.int64)
    x_ptr += serial.to(tl.int64) * stride_x
    place = tl.arange(0, BLOCK)
    a, b, c, d = random_words(tl.load(seed_ptr), draw, number, place)
    bits = ((a.to(tl.uint64) << 31) | (b >> 1).to(tl.uint64)).to(tl.int64)
    bits = tl.where(place < n, bits, 0x7FFFFFFFFFFFFFFF)  # padding comes last
    unit = (tl.sort((bits & -BLOCK) | place) & (BLOCK - 1)).to(tl.int32)  # at each place of the order
    p = tl.load(p_ptr + row * stride_p + unit, mask=unit < n, other=0.0).to(tl.float64)
    p = _balance(p, tl.load(k_ptr + row * stride_k))
    u = uniform_double(c, d)
    half = tl.full((), BLOCK // 2, tl.int32)
    while half > 0:
        rival = (place + half) & (BLOCK - 1)
        right, right_unit, luck = tl.gather(p, rival, 0), tl.gather(unit, rival, 0), tl.gather(u, rival, 0)
        excess = (tl.maximum(p, right) - 1.0) + tl.minimum(p, right)
        chosen = excess >= 0
        total = tl.where(chosen, (1.0 - p) + (1.0 - right), p + right)
        # Written so that where p + right is 1 up to rounding, both cases end the same way.
        right_goes_on = (luck * total < tl.where(chosen, 1.0 - p, right)) ^ chosen
        decided = tl.where(right_goes_on, unit, right_unit)
        tl.store(x_ptr + decided, chosen.to(tl.float32).to(x_ptr.dtype.element_ty), mask=(place < half) & (decided < n))
        p = tl.where(chosen, excess, total)
        unit = tl.where(right_goes_on, right_unit, unit)
        half = half // 2
    tl.store(x_ptr + unit, (p > 0.5).to(tl.float32).to(x_ptr.dtype.element_ty), mask=(place == 0) & (unit < n))


def pivotal_draw(probs: Tensor, k: Tensor, seed: Tensor, draws: int, dtype: torch.dtype) -> Tensor:
    shape, batch = (draws, *probs.shape), k.numel()
    draws, (probs, k) = without_expansion(draws, probs, k)
    rows, sizes = rows_of(probs), k.reshape(-1)
    count, n = rows.shape
    how = plan(count, n, torch.float64, TOURNAMENT)
    x = torch.empty(draws * count, n, dtype=dtype, device=probs.device)
    with on_device(probs):
        _tournament[(draws * count,)](
            rows, x, sizes, seed, rows.stride(0), x.stride(0), sizes.stride(0), count, batch, n,
            BLOCK=how.block, num_warps=how.warps,
        )  # fmt: skip
    return x.reshape(shape)
