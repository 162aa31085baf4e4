"""Relaxed top-k maps: deterministic, differentiable stand-ins for "the k largest of n". Needs torch only."""

from khot.kernels.links import Link, Logistic

from .engine import capped_simplex_map
from .hard import topk_mask
from .sigmoid import log_sigmoid_topk, sigmoid_topk

__all__ = ["Link", "Logistic", "capped_simplex_map", "log_sigmoid_topk", "sigmoid_topk", "topk_mask"]
