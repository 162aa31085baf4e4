"""The kernels of sorted transport, with a fixed k each."""

from functools import partial

import torch
from torch import Tensor

from khot.kernels import backend
from khot.kernels.transport import sorted_transport, sorted_transport_derivative, triton_backward
from khot.kernels.transport.triton_forward import launch_forward
from tests.kernels.kernel_case import DOUBLE, SINGLE, Inputs, KernelCase, Outputs

SINGLES = [((64, n), SINGLE) for n in (64, 1000)]
DOUBLES = [((64, n), DOUBLE) for n in (64, 1000)]
# Of each k: shapes to compare at, few and small, and sizes to compile, one for each number of warps.
SIZES = {
    3: ([(2, 3), (1, 33), (1, 300)], []),
    7: ([(1, 40)], SINGLES + DOUBLES),
    10: ([(1, 5), (1, 12)], [((64, 1000), SINGLE), ((1000, 1000), SINGLE)]),
    15: ([], SINGLES),
}
DOUBLE_UP_TO = 7


def inputs(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Inputs:
    """x, half the epsilon, and what makes a cotangent."""
    generator = torch.Generator().manual_seed(seed)
    x, grad = torch.randn(2, *shape, generator=generator, dtype=DOUBLE).to(dtype)
    return x, 0.1 + torch.rand(shape[:-1], generator=generator, dtype=DOUBLE), grad


def tolerance(x: Tensor) -> float:
    return 1e-13 if x.dtype == DOUBLE else 1e-9


def forward_kernel(x: Tensor, half: Tensor, grad: Tensor, k: int) -> Outputs:
    y, t, error = launch_forward(x, half, min(k, x.shape[-1]), tolerance(x), 100, True)
    assert error is not None and (error == 0).all()
    return y, t


def forward_reference(x: Tensor, half: Tensor, grad: Tensor, k: int) -> Outputs:
    return sorted_transport(x, half, min(k, x.shape[-1]), tolerance(x), 100, True)


def thresholds_and_cotangent(x: Tensor, half: Tensor, grad: Tensor, k: int) -> Outputs:
    k = min(k, x.shape[-1])
    with backend("torch"):
        t = sorted_transport(x.double(), half, k, 1e-13, 100, True)[1]
    return t, (grad.unsqueeze(-1) * torch.arange(1, k + 1, device=x.device)).mT


def gradient_kernel(x: Tensor, half: Tensor, grad: Tensor, k: int) -> Outputs:
    given = thresholds_and_cotangent(x, half, grad, k)
    return triton_backward.sorted_transport_derivative(x, half, *given, True)


def gradient_reference(x: Tensor, half: Tensor, grad: Tensor, k: int) -> Outputs:
    return sorted_transport_derivative(x, half, *thresholds_and_cotangent(x, half, grad, k), True)


def compile_forward(x: Tensor, half: Tensor, _: Tensor, k: int) -> object:
    return launch_forward(x, half, k, 1e-9, 1000)


def compile_backward(x: Tensor, half: Tensor, _: Tensor, k: int) -> object:
    t = torch.empty(*x.shape[:-1], k, dtype=DOUBLE)
    grad = torch.empty(*x.shape[:-1], k, x.shape[-1], dtype=x.dtype)
    return triton_backward.sorted_transport_derivative(x, half, t, grad, True)


def transports() -> list[KernelCase]:
    entries: list[KernelCase] = []
    for k, (shapes, compiled) in SIZES.items():
        for kind, launch, reference, launches in (
            ("transport", forward_kernel, forward_reference, compile_forward),
            ("transport_gradient", gradient_kernel, gradient_reference, compile_backward),
        ):
            functions = (partial(launch, k=k), partial(reference, k=k), inputs, shapes, partial(launches, k=k))
            dtypes = KernelCase.dtypes if k <= DOUBLE_UP_TO else ()
            entries.append(KernelCase(f"{kind}_k{k}", *functions, compiled, dtypes=dtypes))
    return entries
