"""What the tests of Triton kernels know about a kernel."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

Inputs = tuple[Tensor, ...]
Outputs = tuple[Tensor, ...]
HALF, SINGLE, DOUBLE = torch.float16, torch.float32, torch.float64


@dataclass(frozen=True)
class KernelCase:
    """A launcher of Triton kernels.

    Attributes:
        name: Identifier of the tests.
        launch: From tensors to tensors, through the kernels.
        reference: The same in plain torch, for float64 inputs.
        make: From a shape, dtype and seed to the inputs of both, on the CPU.
        shapes: At which it is compared with the reference.
        compile: From empty x, and two float64 tensors of its batch shape, to launches of the kernels.
        compiled: Shapes and dtypes of x at which it is compiled ahead of time, one for each set of kernel options.
        tolerance: Largest error of float32 relative to 1 + abs(reference).
        dtypes: Of x, other than float32, with arithmetic or rounding of their own.
        alike: Whether nothing but the formulas of a link sets it apart from another case.
    """

    name: str
    launch: Callable[..., Outputs]
    reference: Callable[..., Outputs]
    make: Callable[[tuple[int, ...], torch.dtype, int], Inputs]
    shapes: list[tuple[int, ...]]
    compile: Callable[[Tensor, Tensor, Tensor], object]
    compiled: list[tuple[tuple[int, ...], torch.dtype]]
    tolerance: float = 1e-5
    dtypes: tuple[torch.dtype, ...] = (DOUBLE, HALF, torch.bfloat16)
    alike: bool = False
