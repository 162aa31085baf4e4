"""What tensors were made from, found by their memory: a source still has the digits that rounding took from its tensor.

An entry belongs to the memory of a tensor and lives as long as that. It holds for all tensors that show the same
entries of it, the tensor itself and its detached forms, but not for copies. It ends with the next write that torch
counts.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from khot._torch_internals import has_memory, may_differentiate, version_of, writes_program

__all__ = ["Source", "Sources"]


class Source(NamedTuple):
    """What a tensor was made from.

    Attributes:
        made_from: The object that was remembered.
        is_constant: Whether the tensor at hand has no gradient, so that its source has none for it, either.
        is_certain: Whether torch would have counted writes to the tensor, which it does not in inference mode.
    """

    made_from: Any
    is_constant: bool
    is_certain: bool


class _Entry(NamedTuple):
    made_from: Any
    view: tuple[Any, ...]
    version: int | None
    node: Any  # of the graph of autograd


class Sources:
    """Sources by memory."""

    def __init__(self) -> None:
        self._entries = WeakIdKeyDictionary()

    def remember(self, y: Tensor, made_from: Any) -> None:
        """Remembers what a tensor was made from; not in graphs."""
        if not _is_recorded():
            self._entries[_key(y)] = _Entry(made_from, _view(y), version_of(y), y.grad_fn)

    def find(self, y: Tensor) -> Source | None:
        """The source of a tensor; None if it is unknown, or if derivatives with respect to the tensor are wanted."""
        key = None if _is_recorded() else _key(y)
        entry: _Entry | None = None if key is None else self._entries.get(key)
        if entry is None or entry.view != _view(y) or entry.version != version_of(y):
            return None
        is_constant = not may_differentiate(y)
        if not (is_constant or key is y) and (entry.node is None or y.grad_fn is not entry.node):
            return None
        return Source(entry.made_from, is_constant, entry.version is not None)


def _is_recorded() -> bool:
    return torch.compiler.is_compiling() or writes_program()


def _key(y: Tensor) -> Any:
    """The memory of a tensor; where a transform or a mode hides it, the tensor itself."""
    return y.untyped_storage() if has_memory(y) else y


def _view(y: Tensor) -> tuple[Any, ...]:
    return y.dtype, y.shape, y.stride(), y.storage_offset()
