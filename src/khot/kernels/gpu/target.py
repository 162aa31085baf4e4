"""The target of a compilation: whether it is CUDA, and whether Triton interprets the kernel.

Triton 3.5 and newer have a function for the former; in 3.4 it is found in the options of the compiler.
"""

# mypy: disable-error-code="no-untyped-def"

from importlib.util import find_spec

import triton
import triton.language as tl
from triton.runtime import driver

__all__ = ["INTERPRETED", "compiles_for_cuda", "is_cuda"]


def compiles_for_cuda() -> bool:
    """Whether Triton's driver has a CUDA device, for launchers; False without a driver, as in the interpreter."""
    try:
        return bool(driver.active.get_current_target().backend == "cuda")
    except RuntimeError:
        return False


if find_spec("triton.language.target_info") is not None:
    from triton.language.target_info import is_cuda
else:

    @tl.core.builtin
    def is_cuda(_semantic=None):
        """Whether a kernel is compiled for CUDA."""
        return tl.constexpr(_semantic.builder.options.backend_name == "cuda")


INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
