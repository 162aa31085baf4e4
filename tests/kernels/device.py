"""Where the tests of Triton kernels run: on an accelerator, or in the interpreter in a process made for it."""

import os
from typing import Any

import pytest
import torch

from tests.backends import skip_without_triton

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
SPLIT = 9000 if INTERPRETED else 70_000  # entries of a row that several programs take together


def mark_interpreted(value: Any) -> Any:
    """A value for ``parametrize``, with which a test also runs in the interpreter."""
    given = value if isinstance(value, type(pytest.param())) else pytest.param(value)
    return given._replace(marks=[*given.marks, pytest.mark.interpreted])


def kernel_marks() -> list[pytest.MarkDecorator]:
    """Marks of a module of such tests, which is skipped where they cannot run, before it imports Triton."""
    if INTERPRETED:
        return []
    if not torch.cuda.is_available():
        pytest.skip("needs an accelerator, or TRITON_INTERPRET=1", allow_module_level=True)
    skip_without_triton()
    return [pytest.mark.gpu]
