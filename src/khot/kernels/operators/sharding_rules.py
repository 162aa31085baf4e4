"""What DTensors may do with operators that reach them directly, as in graphs: batches may be cut, rows may not.

``register_sharding`` is asked along each axis of a mesh for placements of arguments and results; these rules know no
communication. Draws stay whole: cut ones would begin at the same place of their seed.
"""

import importlib
import sys
from typing import Any

import torch

KNOWN = set[str]()


def teach_rules(names: list[str], batched: set[str]) -> bool:
    """Registers the rules of operators that have none yet, if anybody has imported DTensors.

    Args:
        names: Of operators ``khot::name``.
        batched: Those of them in whose tensors the axes of the batch go first, those of the first one but the last.

    Returns:
        True.
    """
    if "torch.distributed.tensor" not in sys.modules:
        return True
    new = [name for name in names if name not in KNOWN]
    KNOWN.update(new)
    try:
        experimental: Any = importlib.import_module("torch.distributed.tensor.experimental")
        register = experimental.register_sharding
    except (ImportError, AttributeError):  # a torch in which these experiments are elsewhere
        return True
    for name in new:
        register(getattr(torch.ops.khot, name).default)(_rule(name, name in batched))
    return True


def _rule(name: str, is_batched: bool) -> Any:
    results = len(getattr(torch.ops.khot, name).default._schema.returns)

    def placements(*arguments: Any) -> list[tuple[list[Any], list[Any]]]:
        """Of results and arguments, one pair for each way to place them along an axis of the mesh."""
        kinds = torch.distributed.tensor
        axes = range(len(arguments[0].shape) - 1) if is_batched else ()
        ways = [kinds.Replicate(), *map(kinds.Shard, axes)]
        return [([way] * results, [way if hasattr(v, "tensor_meta") else None for v in arguments]) for way in ways]

    return placements
