"""The largest entropy of designs with given inclusion probabilities, which is that of conditional Poisson sampling."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from khot.kernels.operators.autograd import move_batch_first, with_forward_mode

from .conditional_poisson import entropy
from .once import Once


class _LargestEntropy(Function):
    """The entropy as a function of ``probs``; their logits are given, and its value is a constant."""

    @staticmethod
    def forward(probs: Tensor, logits: Tensor, value: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(inputs[1])  # the logits, a function of probs, which receives second derivatives
        ctx.save_for_forward(inputs[1])

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None, None]:
        (logits,) = ctx.saved_tensors
        return -grad_output[..., None] * logits.masked_fill(logits.isinf(), 0.0), None, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Tensor, int]:
        return _apply_entropy(*move_batch_first(info.batch_size, in_dims, args)), 0


def _entropy_jvp(ctx: Any, saved: list[Tensor], dprobs: Tensor, *_: Any) -> Tensor:
    (logits,) = saved
    return -(logits.masked_fill(logits.isinf(), 0.0) * dprobs).sum(-1)


_apply_entropy = with_forward_mode(_LargestEntropy, _entropy_jvp)


def largest_entropy(probs: Tensor, logits: Tensor, k: int | Tensor, kept: Once | None = None) -> Tensor:
    r"""Entropy ``(*batch,)`` of a conditional Poisson design with logits of :func:`khot.laws.inverse.solve_logits`.

    No design with these inclusion probabilities has a larger one. With H = log Z - <theta, pi>, its derivative is that
    of a Legendre transform, :math:`\nabla_\pi H = -\theta`, which needs no linear system.
    """
    with torch.no_grad():
        value = entropy(logits.detach(), k, kept)
    return _apply_entropy(probs.double(), logits.double(), value)
