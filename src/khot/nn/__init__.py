"""Top-k as modules: activations, gates, sparse weights, routers and losses, with their state.

The modules take scores of any batch shape and return them multiplied by a mask (:class:`TopKMask` returns the mask
itself). Without a softness the mask is hard, and gradients reach the entries that are kept. With one it is relaxed, or
hard with the gradient of the relaxed one (``straight_through=True``). The package needs torch only, except for
:class:`KHotGate`, which needs Pyro. Its names are not re-exported by ``khot``: ``from khot.nn import TopK``.
An argument of a wrong type raises TypeError, and one of a wrong shape or out of range ValueError.

In evaluation mode, all modules can be exported by ``torch.export`` and by ``torch.onnx.export(..., dynamo=True)``. In
an ONNX program a relaxed mask takes a fixed number of plain operations. Links with power-law tails and
:func:`~khot.sparse_topk_signed` raise NotImplementedError in an export to ONNX. Of modules
that draw, the exporter takes those with :class:`~khot.PlackettLuce`, :class:`~khot.Brewer`, :class:`~khot.Systematic`
and :class:`~khot.RelaxedKHot`, and refuses those with other designs. It also takes ``torch.multinomial`` without
replacement, but the ONNX program then draws with replacement.

Under ``DistributedDataParallel`` each process selects from its own rows; processes with equal seeds draw equal masks.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .anneal import Anneal
from .attention import topk_attention
from .batch_topk import BatchTopK
from .expert_choice import ExpertChoice
from .jump_relu import JumpReLU
from .loss_modules import FenchelYoungTopKLoss, TopKCrossEntropyLoss, TopKMetricLoss
from .routing import route
from .sparsity import MagnitudeSparsity, NMSparsity
from .token_choice import TokenChoice
from .topk import GatherTopK, Selection, TopK, TopKMask

if TYPE_CHECKING:
    from .khot_gate import KHotGate

__all__ = [
    "Anneal",
    "BatchTopK",
    "ExpertChoice",
    "FenchelYoungTopKLoss",
    "GatherTopK",
    "JumpReLU",
    "KHotGate",
    "MagnitudeSparsity",
    "NMSparsity",
    "Selection",
    "TokenChoice",
    "TopK",
    "TopKCrossEntropyLoss",
    "TopKMask",
    "TopKMetricLoss",
    "route",
    "topk_attention",
]


if not TYPE_CHECKING:  # otherwise a type checker would accept any name

    def __getattr__(name: str) -> Any:
        if name != "KHotGate":
            raise AttributeError(f"module 'khot.nn' has no attribute {name!r}")
        try:
            return import_module("khot.nn.khot_gate").KHotGate
        except ModuleNotFoundError as error:
            if error.name != "pyro":
                raise
            message = "khot.nn.KHotGate needs Pyro, as designs and estimators do: pip install pyro-ppl"
            raise ModuleNotFoundError(message, name="pyro") from error


def __dir__() -> list[str]:
    return __all__
