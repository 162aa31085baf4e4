"""The modules of khot.nn under test, with the traits that their contract reads: a new member joins by one entry."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from khot import Pivotal, ReinMax, capped_softmax, sparse_topk, sparse_topk_magnitude
from khot.nn import (
    BatchTopK,
    ExpertChoice,
    FenchelYoungTopKLoss,
    JumpReLU,
    KHotGate,
    MagnitudeSparsity,
    NMSparsity,
    TokenChoice,
    TopK,
    TopKCrossEntropyLoss,
    TopKMask,
    TopKMetricLoss,
)
from tests.inputs import normal
from tests.maps import behind

N = 8


@dataclass(frozen=True)
class ModuleCase:
    """A module under test, of scores (..., 8).

    Attributes:
        name: Identifier of the test.
        make: Called without arguments.
        expected: What it makes of scores (6, 8) in training, by another way; None where a draw decides.
        random: Whether training draws.
        gradient: Whether the result has a gradient in the scores.
        target: What it is called with besides scores, if anything.
    """

    name: str
    make: Callable[[], Module]
    expected: Callable[[Tensor], Tensor] | None
    random: bool = False
    gradient: bool = True
    target: Tensor | None = None

    @property
    def public(self) -> Any:
        return behind(self.make)

    def call(self, module: Module, x: Tensor) -> Tensor:
        if self.target is None:
            return module(x)
        return module(x, self.target.to(x.dtype) if self.target.is_floating_point() else self.target)


def one_of_two_tiles(x: Tensor) -> Tensor:
    """In every 2 x 2 tile, the heavier one of the two diagonals."""
    tiles = x.unflatten(-1, (-1, 2)).unflatten(0, (-1, 2)).movedim(1, -2)  # (rows, columns, 2, 2)
    is_main = (tiles.abs() * torch.eye(2)).sum((-1, -2)) > (tiles.abs() * (1 - torch.eye(2))).sum((-1, -2))
    mask = torch.where(is_main[..., None, None], torch.eye(2), 1 - torch.eye(2))
    return x * mask.movedim(-2, 1).reshape(x.shape)


def largest(x: Tensor, k: int, axis: int = -1) -> Tensor:
    """The mask by sorting and comparing; x without ties."""
    return (x >= x.sort(axis, descending=True).values.narrow(axis, k - 1, 1)).to(x.dtype)


def sigmoid_mask(x: Tensor, k: float, temperature: float) -> Tensor:
    """By bisection of the last axis."""
    low, high = x.amin(-1, keepdim=True) - 50, x.amax(-1, keepdim=True) + 50
    for _ in range(100):
        middle = (low + high) / 2
        above = torch.sigmoid((x - middle) / temperature).sum(-1, keepdim=True) > k
        low, high = torch.where(above, middle, low), torch.where(above, high, middle)
    return torch.sigmoid((x - low) / temperature)


def of_all(mask: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda x: x * mask(x.flatten()).view_as(x)


def weights_of(mask: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """The softmax of each row, times a mask, over their sum."""

    def weights(x: Tensor) -> Tensor:
        kept = x.softmax(-1) * mask(x)
        return kept / kept.sum(-1, keepdim=True).clamp(min=1e-30)

    return weights


def share_of(weights: Tensor) -> Tensor:
    return weights / weights.sum(-1, keepdim=True)


def in_two_pairs(s: Tensor) -> Tensor:
    """The scores in the two of four pairs of experts that have the largest sums, and zeros."""
    pairs = s.view(-1, 4, 2)
    return (pairs * largest(pairs.sum(-1), 2).unsqueeze(-1)).view_as(s)


def within_capacity(x: Tensor) -> Tensor:
    """Two experts for a token, and of the tokens of an expert the three with the largest probabilities."""
    mask, p = largest(x, 2), x.softmax(-1)
    for expert in range(x.shape[-1]):
        by_probability = sorted(range(len(x)), key=lambda token: -p[token, expert] * mask[token, expert])
        mask[by_probability[3:], expert] = 0
    return mask


def at_most_two(x: Tensor) -> Tensor:
    """The nine largest of what is among the two of its row."""
    return largest((x - 100 * (1 - largest(x, 2))).flatten(), 9).view_as(x) * x


def two_of_four(x: Tensor) -> Tensor:
    return (x.view(-1, 4) * largest(x.abs().view(-1, 4), 2)).view_as(x)


def one_of_two_rows(x: Tensor) -> Tensor:
    pairs = x.view(-1, 2, x.shape[-1])
    return (pairs * (pairs.abs() == pairs.abs().amax(1, keepdim=True))).view_as(x)


TARGET = largest(normal(6, N, seed=9), 2)
MODULES = [
    ModuleCase("topk", partial(TopK, 3), lambda x: x * largest(x, 3)),
    ModuleCase("topk_relaxed", partial(TopK, 2.5, softness=0.5, n=N), lambda x: x * sigmoid_mask(x, 2.5, 0.5)),
    ModuleCase(
        "topk_learned", partial(TopK, 2, softness=0.5, learn_softness=True), lambda x: x * sigmoid_mask(x, 2, 0.5)
    ),
    ModuleCase(
        "topk_straight_through", partial(TopK, 2, softness=0.5, straight_through=True), lambda x: x * largest(x, 2)
    ),
    ModuleCase("topk_joint", partial(TopK, 9, dim=(-2, -1)), of_all(lambda x: largest(x, 9))),
    ModuleCase("topk_magnitude", partial(TopK, 3, by="magnitude", n=N), lambda x: x * largest(x.abs(), 3)),
    ModuleCase("mask", partial(TopKMask, 3, n=N), lambda x: largest(x, 3), gradient=False),
    ModuleCase(
        "mask_relaxed", partial(TopKMask, 3, softness=1.0, learn_softness=True), lambda x: sigmoid_mask(x, 3, 1.0)
    ),
    ModuleCase("batch_topk", partial(BatchTopK, 2), of_all(lambda x: largest(x, 12))),
    ModuleCase("batch_topk_units", partial(BatchTopK, 1.4, n=N), of_all(lambda x: largest(x, 8))),
    ModuleCase(
        "batch_topk_relaxed",
        partial(BatchTopK, 1.4, softness=0.5, learn_softness=True),
        of_all(lambda x: sigmoid_mask(x, 8.4, 0.5)),
    ),
    ModuleCase(
        "batch_topk_magnitude",
        partial(BatchTopK, 2, softness=0.5, straight_through=True, by="magnitude"),
        of_all(lambda x: largest(x.abs(), 12)),
    ),
    ModuleCase("batch_topk_cap", partial(BatchTopK, 1.5, cap=2, n=N), at_most_two),
    ModuleCase("jump_relu", partial(JumpReLU, 0.3), lambda x: x * (x > 0.3)),
    ModuleCase(
        "jump_relu_learned",
        partial(JumpReLU, torch.full((N,), 0.3), learn_threshold=True, bandwidth=2.0),
        lambda x: x * (x > 0.3),
    ),
    ModuleCase("two_of_four", NMSparsity, two_of_four),
    ModuleCase("two_of_four_straight", partial(NMSparsity, softness=0.5, straight_through=True), two_of_four),
    ModuleCase(
        "one_of_eight_scores",
        partial(NMSparsity, 1, 8, softness=0.5, learn_softness=True, scores=normal(6, N, seed=4).float()),
        lambda x: x * sigmoid_mask(normal(6, N, seed=4), 1, 0.5),
    ),
    ModuleCase("one_of_two_rows", partial(NMSparsity, 1, 2, dim=0), one_of_two_rows),
    ModuleCase("one_of_two_tiles", partial(NMSparsity, 1, 2, transposable=True), one_of_two_tiles),
    ModuleCase("magnitude_rows", partial(MagnitudeSparsity, 0.3, dim=1), lambda x: x * largest(x.abs(), 2)),
    ModuleCase("magnitude", partial(MagnitudeSparsity, 0.3), of_all(lambda x: largest(x.abs(), 14))),
    ModuleCase(
        "magnitude_relaxed",
        partial(MagnitudeSparsity, 0.25, strength=0.5),
        lambda x: sparse_topk_magnitude(x.flatten(), 12, 0.5).view_as(x),
    ),
    ModuleCase("expert_choice", partial(ExpertChoice, 2), lambda x: x * largest(x, 2, 0)),
    ModuleCase(
        "expert_choice_sparse",
        partial(ExpertChoice, 2, softness=0.7, relaxation=sparse_topk),
        lambda x: x * sparse_topk(x.T.contiguous(), 2, 0.7).T,
    ),
    ModuleCase(
        "expert_choice_softmax",
        partial(ExpertChoice, 1, softness=0.7, relaxation=capped_softmax, learn_softness=True),
        lambda x: x * (x / 0.7).softmax(0),
    ),
    ModuleCase("token_choice", partial(TokenChoice, 3), weights_of(lambda x: largest(x, 3))),
    ModuleCase(
        "token_choice_relaxed",
        partial(TokenChoice, 2.5, softness=0.5, learn_softness=True),
        weights_of(lambda x: sigmoid_mask(x, 2.5, 0.5)),
    ),
    ModuleCase(
        "token_choice_capacity",
        partial(TokenChoice, 2, softness=0.5, straight_through=True, capacity=3),
        weights_of(within_capacity),
    ),
    ModuleCase(
        "token_choice_bias",
        partial(TokenChoice, 2, scores="sigmoid", groups=(4, 2), eps=1e-20, scale=2.5, bias=N),
        lambda x: 2.5 * share_of(x.sigmoid() * largest(in_two_pairs(x.sigmoid()), 2)),
    ),
    ModuleCase(
        "token_choice_scores",
        partial(TokenChoice, 3, scores="sqrtsoftplus", renormalize=None),
        lambda x: x.exp().log1p().sqrt() * largest(x, 3),
    ),
    ModuleCase("gate", partial(KHotGate, N, 3), None, random=True),
    ModuleCase("gate_pivotal", partial(KHotGate, N, 3, design=Pivotal), None, random=True),
    ModuleCase("gate_reinmax", partial(KHotGate, N, 3, estimator=ReinMax), None, random=True),
    ModuleCase("gate_learned", partial(KHotGate, N), None, random=True),
    ModuleCase("gate_learned_reinmax", partial(KHotGate, N, design=Pivotal, estimator=ReinMax), None, random=True),
    ModuleCase("fenchel_young", partial(FenchelYoungTopKLoss, 2), None, target=TARGET),
    ModuleCase(
        "cross_entropy",
        partial(TopKCrossEntropyLoss, [1.0]),
        None,
        target=torch.tensor([0, 1, 2, 3, 4, 5]),
    ),
    ModuleCase("rank_metric", partial(TopKMetricLoss, 3), None, target=TARGET),
]
