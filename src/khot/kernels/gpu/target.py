"""The target of a compilation: whether it is CUDA, and whether Triton interprets the kernel.

Triton 3.5 and newer have a function for the former; in 3.4 it is found in the options of the compiler.
"""

# mypy: disable-error-code="no-untyped-def"

import functools
from importlib.util import find_spec
from typing import Any

import triton
import triton.language as tl
from triton.runtime import driver

__all__ = ["INTERPRETED", "compiles_for_cuda", "is_cuda"]


def compiles_for_cuda() -> bool:
    """Whether Triton's driver has a CUDA device, for launchers; False without a driver, as in the interpreter."""
    try:
        return _is_for_cuda(driver.active)
    except RuntimeError:
        return False


@functools.cache  # asking takes longer than a launch
def _is_for_cuda(active: Any) -> bool:
    return bool(active.get_current_target().backend == "cuda")


if find_spec("triton.language.target_info") is not None:
    from triton.language.target_info import is_cuda
else:

    @tl.core.builtin
    def is_cuda(_semantic=None):
        """Whether a kernel is compiled for CUDA."""
        return tl.constexpr(_semantic.builder.options.backend_name == "cuda")


INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
