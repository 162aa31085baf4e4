"""Rows of a table: what was compared with which version of a package, and the largest difference."""

import sys
from types import ModuleType
from typing import Any

import torch


def compare(package: str, module: ModuleType, what: str, found: Any, expected: Any, tolerance: float) -> None:
    """Prints a row, and raises if two tensors, or sequences of numbers, differ by more than the tolerance."""
    found, expected = (torch.as_tensor(v, dtype=torch.float64).detach() for v in (found, expected))
    assert found.shape == expected.shape and found.isfinite().all(), what
    difference = (found - expected).abs().max().item()
    sys.stdout.write(f"| {package} {module.__version__} | {what} | {difference:.1e} | {tolerance:.0e} |\n")
    assert difference <= tolerance, what
