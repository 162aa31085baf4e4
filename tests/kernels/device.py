"""Where the tests of Triton kernels run: on an accelerator, or in the interpreter in a process made for it."""

import os

import pytest
import torch

from tests.backends import skip_without_triton

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
TILED = 8300 if INTERPRETED else 20_000  # entries of a row that a program reads again and again
SPLIT = 9000 if INTERPRETED else 70_000  # entries of a row that several programs take together


def kernel_marks() -> list[pytest.MarkDecorator]:
    """Marks of a module of such tests, which is skipped where they cannot run, before it imports Triton."""
    if INTERPRETED:
        return []
    if not torch.cuda.is_available():
        pytest.skip("needs an accelerator, or TRITON_INTERPRET=1", allow_module_level=True)
    skip_without_triton()
    return [pytest.mark.gpu]
