"""Isotonic regression of rows one by one with SciPy's compiled stack algorithm (PAV), for p = 2."""

import torch
from scipy.optimize import isotonic_regression  # type: ignore[import-untyped]
from torch import Tensor

from .torch_backend import Objective, block_sums, solve


def isotonic(
    s: Tensor, w: Tensor, strength: Tensor, p: float, magnitude: bool, dual: bool, max_iter: int, names: str
) -> tuple[Tensor, Tensor]:
    return solve(pool_row_by_row, s, w, strength, p, magnitude, dual, max_iter, names)


def pool_row_by_row(objective: Objective) -> Tensor:
    """The blocks of the solution, numbered from 0 along each row: int64 (rows, n)."""
    linear, constant = objective.quadratic()
    target = constant / linear
    weights = linear.numpy() if objective.magnitude else [None] * len(target)
    starts = torch.zeros_like(target, dtype=torch.bool)
    for row, weight, start in zip(target.numpy(), weights, starts.numpy(), strict=True):
        start[isotonic_regression(row, weights=weight, increasing=False).blocks[:-1]] = True
    # It pools ties too, which would tie their derivatives for no reason: undo it.
    rises = (target.diff(dim=-1, prepend=target[:, :1]) != 0) & ~starts
    blocks = starts.cumsum(-1) - 1
    return (starts | (block_sums(rises.to(target.dtype), blocks) == 0)).cumsum(-1) - 1
