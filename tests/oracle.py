"""Reads the reference values in tests/oracles, whose README describes them and the required accuracy."""

import json
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

EPS = torch.finfo(torch.float64).eps


def cases(name: str) -> list[dict[str, Any]]:
    """The cases of one file."""
    return list(json.loads((Path(__file__).parent / "oracles" / f"{name}.json").read_text())["cases"])


def interpreted_cases(name: str, dtype: torch.dtype) -> list[dict[str, Any]]:
    """All cases; in Triton's interpreter every fourth one, and with the other dtype those between them."""
    found = cases(name)
    return found[2 * (dtype == torch.float32) :: 4] if os.environ.get("TRITON_INTERPRET") == "1" else found


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
