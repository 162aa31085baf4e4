"""Where the tests of Triton kernels run: on an accelerator, or in the interpreter in a process made for it."""

import os

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"


def kernel_marks() -> list[pytest.MarkDecorator]:
    """Marks of a module of such tests, which is skipped where they cannot run, before it imports Triton."""
    if INTERPRETED:
        return []
    if not torch.cuda.is_available():
        pytest.skip("needs an accelerator, or TRITON_INTERPRET=1", allow_module_level=True)
    return [pytest.mark.gpu]
