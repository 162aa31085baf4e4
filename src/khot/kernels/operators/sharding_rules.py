"""Rules for DTensors that reach operators directly, as in graphs: batches may be sharded, rows may not.

torch calls these rules for each axis of a mesh, through ``register_sharding``, to get placements of arguments and
results that need no communication. Draws stay whole: shards would begin at the same place of their seed.
"""

import importlib
import sys
from typing import Any

import torch

KNOWN = set[str]()


def teach_rules(names: list[str], batched: set[str]) -> bool:
    """Registers the rules of operators that have none yet, if DTensors have been imported.

    Args:
        names: Names of operators ``khot::name``.
        batched: Those among them whose tensors begin with the axes of the batch, which are all axes of the first tensor
            except the last.

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
    except (ImportError, AttributeError):  # a torch version that has these experimental functions elsewhere
        return True
    for name in new:
        register(getattr(torch.ops.khot, name).default)(_rule(name, name in batched))
    return True


def _rule(name: str, is_batched: bool) -> Any:
    results = len(getattr(torch.ops.khot, name).default._schema.returns)

    def placements(*arguments: Any) -> list[tuple[list[Any], list[Any]]]:
        """Placements of results and arguments, one pair for each way to place them along an axis of the mesh."""
        kinds = torch.distributed.tensor
        axes = range(len(arguments[0].shape) - 1) if is_batched else ()
        ways = [kinds.Replicate(), *map(kinds.Shard, axes)]
        return [([way] * results, [way if hasattr(v, "tensor_meta") else None for v in arguments]) for way in ways]

    return placements
