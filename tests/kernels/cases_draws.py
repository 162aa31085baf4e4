"""The kernels that draw, for :mod:`tests.kernels.kernel_cases`: with a seed they are functions like any other."""

from functools import partial

import torch
from torch import Tensor

from khot import sigmoid_topk
from khot.kernels.draws import pivotal_draw, triton_tournament
from khot.kernels.order_sampling import order_draw, rank_centre
from khot.kernels.order_sampling import triton_draw as triton_order
from khot.kernels.order_sampling.noises import NOISES
from tests.kernels.kernel_case import DOUBLE, SINGLE, Inputs, KernelCase, Outputs

SEED, DRAWS = 0x123456789ABCDEF, 2
COMPILED_ORDER = [((64, n), SINGLE) for n in (300, 1000, 4096, 8192, 100_000)]
COMPILED_DOUBLE = [((64, n), DOUBLE) for n in (1000, 8192, 100_000)]
COMPILED_TOURNAMENT = [((64, n), SINGLE) for n in (100, 500, 2000, 4096)]


def sizes(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    n = shape[-1]
    return 1 + (0.6 * (n - 1) * torch.rand(shape[:-1], generator=generator)).long()


def positions(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Inputs:
    """theta, with a unit excluded and one included in long rows, and k."""
    generator = torch.Generator().manual_seed(seed)
    theta = 2 * torch.randn(shape, generator=generator, dtype=DOUBLE)
    if shape[-1] > 30:
        theta[0, 3], theta[0, 5] = -torch.inf, torch.inf
    return theta.to(dtype), sizes(shape, generator)


def probabilities(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Inputs:
    """Inclusion probabilities, among them 0 and 1 in long rows, and their sums."""
    theta, k = positions(shape, DOUBLE, seed)
    return sigmoid_topk(theta, k).to(dtype), k


def seed_for(x: Tensor) -> Tensor:
    return torch.tensor([SEED], device=x.device)


def order_kernel(theta: Tensor, k: Tensor, noise: str) -> Outputs:
    return (triton_order.order_draw(theta, k, rank_centre(theta, k), seed_for(theta), DRAWS, theta.dtype, noise),)


def order_reference(theta: Tensor, k: Tensor, noise: str) -> Outputs:
    return (order_draw.plain(theta, k, rank_centre(theta, k), seed_for(theta), DRAWS, theta.dtype, noise),)


def order_compile(theta: Tensor, number: Tensor, _: Tensor, noise: str) -> object:
    return triton_order.order_draw(theta, number.long(), number, torch.zeros(1).long(), 1, SINGLE, noise)


def tournament_kernel(probs: Tensor, k: Tensor) -> Outputs:
    return (triton_tournament.pivotal_draw(probs, k, seed_for(probs), DRAWS, probs.dtype),)


def tournament_reference(probs: Tensor, k: Tensor) -> Outputs:
    return (pivotal_draw.plain(probs, k, seed_for(probs), DRAWS, probs.dtype),)


def tournament_compile(probs: Tensor, number: Tensor, _: Tensor) -> object:
    return triton_tournament.pivotal_draw(probs, number.long(), torch.zeros(1).long(), 1, SINGLE)


def draws() -> list[KernelCase]:
    orders = [
        KernelCase(
            f"order_{noise}_draw",
            partial(order_kernel, noise=noise),
            partial(order_reference, noise=noise),
            positions,
            [(3, 1), (2, 33), (1, 1000), (1, 9000)] if noise == "logistic" else [(2, 33)],
            partial(order_compile, noise=noise),
            COMPILED_ORDER + COMPILED_DOUBLE if noise == "logistic" else COMPILED_ORDER,
        )
        for noise in NOISES
    ]
    return [
        *orders,
        KernelCase(
            "tournament",
            tournament_kernel,
            tournament_reference,
            probabilities,
            [(3, 1), (2, 33), (1, 600)],
            tournament_compile,
            COMPILED_TOURNAMENT,
        ),
    ]
