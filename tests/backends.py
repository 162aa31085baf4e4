"""The backends of a CPU that tests run in, and which of them a user has without asking."""

import pytest

from khot.kernels.operators.platforms import HAS_NUMBA, lacks_triton

USUAL = "numba" if HAS_NUMBA else "torch"
BACKENDS = ["numba", "torch"] if HAS_NUMBA else ["torch"]


def skip_without_triton() -> None:
    """Skips a module before it imports Triton's kernels, if no Triton can compile them."""
    if reason := lacks_triton():
        pytest.skip(reason, allow_module_level=True)
