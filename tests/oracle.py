"""Reads the reference values in tests/oracles, whose README describes them and the required accuracy."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

EPS = torch.finfo(torch.float64).eps


def cases(name: str) -> list[Any]:
    """The cases of one file as pytest parameters, by their id."""
    document = json.loads((Path(__file__).parent / "oracles" / f"{name}.json").read_text())
    return [pytest.param(case, id=case["id"]) for case in document["cases"]]


def interpreted_cases(name: str) -> list[Any]:
    """Pairs of a case and a dtype: each case in both, and in Triton's interpreter in one of them, in turn."""
    pairs = [(case, dtype) for case in cases(name) for dtype in (torch.float64, torch.float32)]
    return [
        pytest.param(
            *case.values, dtype, id=f"{case.id}-{dtype}", marks=[pytest.mark.interpreted] if i % 4 in (0, 3) else []
        )
        for i, (case, dtype) in enumerate(pairs)
    ]


def tensor(values: Any, dtype: torch.dtype = torch.float64) -> Tensor:
    """Numbers, some of which are written as strings."""
    return torch.tensor([float(v) for v in values], dtype=torch.float64).to(dtype)


def sum_tolerance(dtype: torch.dtype, size: float = 1.0) -> float:
    """How far the sum of a mask may be from k, relative to k: the rounding of its entries, and of inputs of ``size``.

    In float32 the Triton kernels compute in float32; torch solves in float64 and rounds once.
    """
    if dtype == torch.float32:
        return 1e-6 if os.environ.get("KHOT_BACKEND") == "triton" else 2 * torch.finfo(dtype).eps
    return max(1e-12, 2 * EPS * size)
