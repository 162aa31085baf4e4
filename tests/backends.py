"""The backends of a CPU that tests run in, and which of them a user has without asking."""

import os
from typing import Any

import pytest

from khot.kernels.operators.platforms import HAS_NUMBA, lacks_triton

USUAL = "numba" if HAS_NUMBA else "torch"
BACKENDS = ["numba", "torch"] if HAS_NUMBA else ["torch"]
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # a run of chosen files, of which all cases count
TESTED = ["triton"] if INTERPRETED else BACKENDS


def in_turn(cells: list[Any], width: int) -> list[Any]:
    """The cells of a contract, ``width`` checks to a member, each in one backend: each check and member meets all."""
    backends = [TESTED[(i + i // width) % len(TESTED)] for i in range(len(cells))]
    return [
        pytest.param(*cell.values, name, id=f"{cell.id}-{name}", marks=cell.marks)
        for cell, name in zip(cells, backends, strict=True)
    ]


def skip_without_triton() -> None:
    """Skips a module before it imports Triton's kernels, if no Triton can compile them."""
    if reason := lacks_triton():
        pytest.skip(reason, allow_module_level=True)
