"""The numbers of ones of the rows of a law on k-hot vectors."""

from typing import Any

import torch

from khot._contents import can_look


def size_of(design: Any) -> Any:
    """``k`` as an int if it is known to be the same in all rows, else as a tensor; a range as a pair of these."""
    return design._size


def size_varies(design: Any) -> bool:
    """Whether draws of one row may differ in their number of ones."""
    return bool(design._size_varies)


def sizes_of(law: Any, wanted: str) -> list[int]:
    """The different k of the rows in increasing order; ``[0]`` if there are no rows.

    Raises:
        NotImplementedError: If the contents of k cannot be read, or one row has several sizes; the message names
            ``wanted``.
    """
    if law._shared_k is not None:
        return [law._shared_k]
    varies = getattr(law, "_size_varies", False)
    if not can_look(law.k):
        needed = "the sizes, which are unknown" if varies else "`k` as an int"
        raise NotImplementedError(f"{wanted} needs {needed} under vmap and for tensors without contents")
    if varies and not torch.equal(law.k, law.largest_k):
        raise NotImplementedError(
            f"{wanted} needs draws of one size, but this {type(law).__name__} has a range of sizes, {law.support}"
        )
    return [int(size) for size in law.k.unique()] or [0]


def shared_ends(law: Any, wanted: str) -> tuple[int, int]:
    """The smallest and the largest size, which all rows share; 0 and 0 if there are no rows.

    Raises:
        NotImplementedError: If rows differ, or the contents of k cannot be read; the message names ``wanted``.
    """
    if isinstance(law._size, tuple) and isinstance(law._size[0], int):
        return law._size[:2]
    if not can_look(law.k, law.largest_k):
        raise NotImplementedError(
            f"{wanted} needs the sizes, which are unknown under vmap and for tensors without contents"
        )
    ends = torch.stack((law.k, law.largest_k), -1).view(-1, 2).unique(dim=0).tolist() or [[0, 0]]
    if len(ends) != 1:
        raise NotImplementedError(f"{wanted} needs the same sizes in all rows, but got {ends}")
    return ends[0][0], ends[0][1]


def shared_k(law: Any, wanted: str, advice: str = "") -> int:
    """The k of all rows.

    Raises:
        NotImplementedError: If they differ.
    """
    sizes = sizes_of(law, wanted)
    if len(sizes) != 1:
        advice = f"; {advice}" if advice else ""
        raise NotImplementedError(f"{wanted} needs the same k in all rows, but got k in {sizes}{advice}")
    return sizes[0]
