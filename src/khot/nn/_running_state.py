"""State that training changes: once for each row, although an activation checkpoint runs a block twice."""

from typing import Any

import torch
from torch import Tensor

from khot._contents import can_look
from khot._distributed.placements import is_dtensor
from khot._torch_internals import is_recomputed, is_wrapped
from khot.kernels.registry import define


def is_first_pass() -> bool:
    """Whether a call changes the state. A graph does not know; there, :func:`write` finds out when it runs."""
    return torch.compiler.is_compiling() or not is_recomputed()


def check_in_place(module: str, x: Tensor, state: Tensor, what: str, cure: str) -> None:
    """Raises if x is wrapped by a transform of ``torch.func`` and the state is not: it could not be updated."""
    if not torch.compiler.is_compiling() and is_wrapped(x) and not is_wrapped(state):
        raise RuntimeError(
            f"{module} {what} in place, which a transform of torch.func refuses: {cure}, or call it in evaluation mode"
        )


def write(state: Tensor, new: Tensor) -> None:
    """Writes to the state, except in a graph that a backward pass runs again."""
    new = new.to(state.dtype)
    state.copy_(_unless_recomputed(new, state) if torch.compiler.is_compiling() else new)


def _chosen(new: Tensor, old: Tensor) -> Tensor:
    return (old if is_recomputed() else new).clone()


_unless_recomputed = define("unless_recomputed", _chosen)
_unless_recomputed.register_fake(lambda new, old: torch.empty_like(old))


def number_of_rows(x: Any) -> int | Tensor:
    """The number of rows of x (..., n), without padding: rows in which all entries are ``-inf``."""
    if is_dtensor(x):
        rows: Tensor = ((x != -torch.inf).sum(-1) > 0).sum().full_tensor()
        return rows
    rows_and_padding = x.shape[:-1].numel()
    if x.numel() == 0:
        return rows_and_padding
    looks = x.device.type == "cpu" and can_look(x)
    if looks and bool(x.detach()[..., 0].amin() > -torch.inf):  # quick, and true of most batches
        return rows_and_padding
    rows = (x.detach().amax(-1) != -torch.inf).sum()
    return int(rows) if looks else rows
