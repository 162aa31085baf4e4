"""The Triton kernels of the order maps under test."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from khot import soft_permutation, soft_rank, soft_sort
from khot.kernels.order import sorted_positions, triton_points, triton_rank, triton_scans
from khot.kernels.order.torch_sums import sums_by_doubling
from tests.kernels.kernel_case import DOUBLE, HALF, SINGLE, Inputs, KernelCase, Outputs

MAPS: dict[str, Callable[..., Tensor]] = {"rank": soft_rank, "sort": soft_sort, "permutation": soft_permutation}


def items(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Inputs:
    """x with ties, a scale that spreads it far in one row, and a cotangent."""
    generator = torch.Generator().manual_seed(seed)
    x, grad = torch.randn(2, *shape, generator=generator, dtype=DOUBLE).to(dtype)
    x[..., ::3] = x[..., ::3].round()
    scale = 0.1 + torch.rand(shape[:-1], generator=generator, dtype=DOUBLE)
    scale[0] = 0.02
    return x, scale, grad


LAUNCHERS = {
    "rank": triton_rank.SOFT_RANK,
    "sort": triton_points.SOFT_SORT,
    "permutation": triton_points.SOFT_PERMUTATION,
}


def cotangent(grad: Tensor, name: str) -> Tensor:
    """The given cotangent; for a matrix, one that every dtype can represent."""
    if name != "permutation":
        return grad
    place = torch.arange(grad.shape[-1], device=grad.device)
    return ((7 * place[:, None] + 3 * place) % 5 - 2).to(grad.dtype).repeat(*grad.shape[:-1], 1, 1)


def map_kernel(x: Tensor, scale: Tensor, grad: Tensor, name: str) -> Outputs:
    return LAUNCHERS[name].forward(*x.sort(-1), scale)[:1]


def map_reference(x: Tensor, scale: Tensor, grad: Tensor, name: str) -> Outputs:
    return (MAPS[name](x, scale),)


def derivative_kernel(x: Tensor, scale: Tensor, grad: Tensor, name: str) -> Outputs:
    values, order = x.sort(-1, descending=True)
    _, *saved = LAUNCHERS[name].forward(values, order, -scale)
    grad_x, grad_scale = LAUNCHERS[name].backward(values, order, -scale, cotangent(grad, name), True, *saved)
    return grad_x, -grad_scale


def derivative_reference(x: Tensor, scale: Tensor, grad: Tensor, name: str) -> Outputs:
    inputs = x.detach().requires_grad_(), scale.detach().requires_grad_()
    return torch.autograd.grad(MAPS[name](*inputs, descending=True), inputs, cotangent(grad, name))


def sums_inputs(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Inputs:
    x, scale, grad = items(shape, DOUBLE, seed)
    return sorted_positions(x.sort(-1).values, scale[..., None])[1], grad, grad.flip(-1)


def sums_reference(gap: Tensor, left: Tensor, right: Tensor) -> Outputs:
    return sums_by_doubling(gap, left, right)


def compile_map(x: Tensor, scale: Tensor, _: Tensor, name: str) -> None:
    LAUNCHERS[name].forward(x, torch.empty(x.shape, dtype=torch.long), scale)


def compile_derivative(x: Tensor, scale: Tensor, _: Tensor, name: str) -> None:
    saved = (x[..., 1:].double(),) * 2 if name == "permutation" else ()
    grad = torch.empty(*x.shape, x.shape[-1], dtype=x.dtype) if name == "permutation" else x
    LAUNCHERS[name].backward(x, torch.empty(x.shape, dtype=torch.long), scale, grad, True, *saved)


def order_maps() -> list[KernelCase]:
    cases = [
        KernelCase(
            "decayed_sums",
            partial(triton_scans.decayed_sums, None),
            sums_reference,
            sums_inputs,
            [(3, 1), (2, 33), (2, 2500)],
            lambda x, *_: triton_scans.decayed_sums(*[x.double()] * 4),
            [((2, n), DOUBLE) for n in (2000, 5000)],
        )
    ]
    for name in MAPS:
        matrix = name == "permutation"
        sizes = [((2, n), SINGLE) for n in (100, 500, 1000)] + [((2, 1000), kind) for kind in (HALF, DOUBLE)]
        for kind, kernel, reference, launch in (
            ("order", map_kernel, map_reference, compile_map),
            ("order_gradient", derivative_kernel, derivative_reference, compile_derivative),
        ):
            cases.append(
                KernelCase(
                    f"{kind}_{name}",
                    partial(kernel, name=name),
                    partial(reference, name=name),
                    items,
                    [(3, 1), (2, 33), (2, 150 if matrix else 300)],
                    partial(launch, name=name),
                    sizes,
                    1e-4 if matrix else 1e-5,  # sums of entries in float32, over a small scale
                )
            )
    return cases
