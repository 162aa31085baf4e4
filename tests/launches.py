"""How many kernels an accelerator would launch for a call, counted on a CPU.

Every operation of torch is a launch unless it is a view or an allocation. Backends are chosen as on a device that
Triton supports: an operator of ``torch.ops.khot`` that has a kernel for the call is one launch, and torch computes it;
of the others what the definition does is counted.
"""

from collections import Counter
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from khot.kernels import backend
from khot.kernels.count import tree
from khot.kernels.operators.platforms import OBSTACLES
from khot.kernels.registry import OPERATORS, Operator

FREE = {
    "_conj", "_reshape_alias", "_unsafe_view", "alias", "as_strided", "detach", "diagonal", "empty", "empty_like",
    "empty_strided", "expand", "is_same_size", "lift_fresh", "new_empty", "new_empty_strided", "permute", "reshape",
    "select", "slice", "split", "split_with_sizes", "squeeze", "t", "transpose", "unbind", "unfold", "unsqueeze",
    "view", "view_as_complex", "view_as_real",
}  # fmt: skip


class Launches(TorchDispatchMode):
    """A mode in which launches are counted by name."""

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = operation.overloadpacket.__name__, kwargs or {}
        operator = OPERATORS.get(name) if operation.namespace == "khot" else None
        if operator is not None and not operator.is_fused(*operator.asks(*args)):
            with self:
                return operator.plain(*args, **kwargs)
        if name not in FREE:
            self.names[name] += 1
        with backend("torch"):
            return operation(*args, **kwargs)

    def draw_forest(self, leaf: Tensor, bound: int, levels: int, counts: Tensor, generator: Any) -> Tensor:
        """The kernel that draws the units of a tree, which is launched without an operator."""
        self.names["uniform"] += 1
        self.names["forest_draw"] += 1
        with _disable_current_modes(), backend("torch"):
            return tree.ProductTree(leaf, counts[0, :, 0].long(), bound).draw(counts.shape[-1], generator)


def launches(function: Callable[[], Any]) -> tuple[Any, Counter[str]]:
    """The result of a call, and the number of launches by name."""
    counted = Launches()
    with (
        mock.patch.dict(OBSTACLES, triton=lambda device: None),
        mock.patch.object(Operator, "load", lambda self, name, *_: self.plain),
        backend("triton"),
        mock.patch.object(tree.forest_draw, "find", lambda *_: counted.draw_forest),
        counted,
    ):
        result = function()
    return result, counted.names


def launches_of_gradient(result: Tensor, *inputs: Tensor) -> Counter[str]:
    """How often the derivative of the sum of a result by the inputs launches what."""
    return launches(lambda: torch.autograd.grad(result.sum(), inputs, retain_graph=True))[1]
