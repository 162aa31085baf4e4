"""Broadcasting of shapes."""

from itertools import chain

import torch
from torch.types import _size as SizeLike

__all__ = ["broadcast_shapes"]

INTEGERS = {int}


def broadcast_shapes(*shapes: SizeLike) -> torch.Size:
    """Like torch's function, but for shapes of integers, and faster.

    A call of torch's function takes as long as ten operations on small tensors, and the first one in a process imports
    SymPy. It is used only for shapes with symbols.
    """
    if torch.compiler.is_compiling() or not INTEGERS.issuperset(map(type, chain(*shapes))):
        return torch.broadcast_shapes(*shapes)
    first = torch.Size(shapes[0])
    return first if shapes.count(first) == len(shapes) else _broadcast_integers(shapes)


def _broadcast_integers(shapes: tuple[SizeLike, ...]) -> torch.Size:
    found = [1] * max(map(len, shapes))
    for shape in shapes:
        for i, length in enumerate(shape, len(found) - len(shape)):
            if length != 1 and found[i] not in (1, length):
                raise RuntimeError(f"shapes {', '.join(str(tuple(shape)) for shape in shapes)} do not broadcast")
            found[i] = length if found[i] == 1 else found[i]
    return torch.Size(found)
