"""The kernels of sorted transport, as entries of ``kernel_cases.KERNELS``; k is fixed by the entry."""

import torch
from torch import Tensor

from khot.kernels import backend
from khot.kernels.sorted_transport_triton import launch_forward
from khot.kernels.transport_gradient_triton import launch_backward
from khot.kernels.transport_plan import sorted_transport, sorted_transport_derivative

SINGLE, DOUBLE = torch.float32, torch.float64


def transport_inputs(shape: tuple[int, ...], dtype: torch.dtype, seed: int, k: int) -> tuple[Tensor, ...]:
    """x, half the epsilon, and a cotangent."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator, dtype=DOUBLE).to(dtype)
    half = 0.1 + torch.rand(shape[:-1], generator=generator, dtype=DOUBLE)
    grad = torch.randn(*shape[:-1], min(k, shape[-1]), shape[-1], generator=generator, dtype=DOUBLE)
    return x, half, grad.to(dtype)


def tolerance(x: Tensor) -> float:
    return 1e-13 if x.dtype == DOUBLE else 1e-9


def forward_kernel(x: Tensor, half: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
    y, t, error = launch_forward(x, half, grad.shape[-2], tolerance(x), 100, True)
    assert error is not None and (error == 0).all()
    return y, t


def forward_reference(x: Tensor, half: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
    return sorted_transport(x, half, grad.shape[-2], tolerance(x), 100, True)


def thresholds(x: Tensor, half: Tensor, k: int) -> Tensor:
    with backend("torch"):
        return sorted_transport(x.double(), half, k, 1e-13, 100, True)[1]


def gradient_kernel(x: Tensor, half: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
    return launch_backward(x, half, thresholds(x, half, grad.shape[-2]), grad)


def gradient_reference(x: Tensor, half: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
    return sorted_transport_derivative(x, half, thresholds(x, half, grad.shape[-2]), grad, True)


def compile_forward(x: Tensor, half: Tensor, _: Tensor, k: int) -> object:
    return launch_forward(x, half, k, 1e-9, 1000)


def compile_backward(x: Tensor, half: Tensor, _: Tensor, k: int) -> object:
    t = torch.empty(*x.shape[:-1], k, dtype=DOUBLE)
    return launch_backward(x, half, t, torch.empty(*x.shape[:-1], k, x.shape[-1], dtype=x.dtype))


SINGLES = [((64, n), SINGLE) for n in (64, 1000)]
DOUBLES = [((64, n), DOUBLE) for n in (64, 1000)]
# Of each k: shapes to compare at, few and small, and sizes to compile, one for each number of warps.
SIZES = {
    3: ([(2, 3), (1, 33), (1, 300)], []),
    7: ([(1, 40)], SINGLES + DOUBLES),
    10: ([(1, 5), (1, 12)], [((64, 1000), SINGLE)]),
    15: ([], SINGLES),
}
