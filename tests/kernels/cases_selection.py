"""The kernels of hard masks, for :mod:`tests.kernels.kernel_cases`."""

from collections.abc import Callable

import torch
from torch import Tensor

from khot.kernels.selection import exact, triton_backend
from tests.kernels.device import SPLIT, TILED
from tests.kernels.kernel_case import DOUBLE, HALF, SINGLE, Inputs, KernelCase, Outputs

COMPILED = [((64, n), SINGLE) for n in (40, 200, 300, 1000, 4096, 8192, 16_384)]
COMPILED_OTHERS = [
    ((1, 10**7), SINGLE),
    ((1, 10**6), DOUBLE),
    *(((64, n), DOUBLE) for n in (300, 4096)),
    ((64, 4096), HALF),
]


def tied(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Inputs:
    """Scores, rounded in the first row, with infinite ones and both zeros in long rows; and sizes."""
    generator = torch.Generator().manual_seed(seed)
    x, n = torch.randn(shape, generator=generator, dtype=DOUBLE), shape[-1]
    x[0] = (2 * x[0]).round()
    if n > 30:
        x[0, 3], x[0, 5], x[-1, 7], x[-1, 8] = torch.inf, -torch.inf, -0.0, 0.0
    return x.to(dtype), torch.randint(n + 1, shape[:-1], generator=generator)


def select(x: Tensor, k: Tensor) -> Outputs:
    return (triton_backend.topk_mask(x, k, False),)


def reference(x: Tensor, k: Tensor) -> Outputs:
    return (exact.topk_mask(x, k.long(), False),)


def positions(compute: Callable[..., Tensor]) -> Callable[..., Outputs]:
    """Of the 30 largest of parts that begin at k / 2, all rows and short ones among them."""

    def call(x: Tensor, k: Tensor) -> Outputs:
        begins, (n,) = k.long() // 2, x.shape[-1:]
        ends = torch.where(k % 3 == 0, torch.full_like(begins, n), (begins + k.long() // 3 + 1).clamp(max=n))
        parts = compute(x, 30, begins, ends, True, -1, False)
        return parts, compute(x, min(30, n), begins * 0, begins * 0 + n, False, -1, False)

    return call


def selections() -> list[KernelCase]:
    return [
        KernelCase(
            "topk_mask",
            select,
            reference,
            tied,
            [(3, 1), (20, 33), (2, 1000), (1, TILED), (2, SPLIT)],
            lambda x, number, _: triton_backend.topk_mask(x, number.long(), False),
            [*COMPILED, *COMPILED_OTHERS],
        ),
        KernelCase(
            "topk_indices",
            positions(triton_backend.topk_indices),
            positions(exact.topk_indices),
            tied,
            [(3, 1), (20, 33), (2, 1000), (1, TILED), (1, SPLIT)],
            lambda x, number, _: positions(triton_backend.topk_indices)(x, number.long()),
            [((64, 200), SINGLE), ((64, 4096), HALF), ((64, 16_384), SINGLE), ((1, 10**6), DOUBLE)],
        ),
    ]
