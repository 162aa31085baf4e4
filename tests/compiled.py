"""Counts of compiled graphs, without torch's own counter: its module takes seconds to import in every process."""

from collections.abc import Callable
from typing import Any

from torch.fx import GraphModule


class CompileCounter:
    """A backend of ``torch.compile`` that runs graphs as they are, and counts them."""

    def __init__(self) -> None:
        self.frame_count = 0

    def __call__(self, graph: GraphModule, example_inputs: Any) -> Callable[..., Any]:
        self.frame_count += 1
        return graph.forward
