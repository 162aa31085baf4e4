"""What modules cost, against the same written with torch.topk and scatter: a training step, forward and backward.

topk          TopK of 256 rows with 16384 units, 64 kept
batch_topk    BatchTopK of 256 rows with 4096 units, 32 kept a row, hard, straight-through and relaxed
experts       TokenChoice and ExpertChoice of 8192 tokens and 64 experts, 8 for a token
two_of_four   NMSparsity of a 2048 x 2048 weight
attention     topk_attention of 8 sequences, 12 heads, 512 tokens of 64 features, 32 keys for a query
"""

from collections.abc import Callable

import torch
from timing import interleaved, run_parts
from torch import Tensor

from khot.nn import BatchTopK, ExpertChoice, NMSparsity, TokenChoice, TopK, topk_attention

ROWS, UNITS, KEPT, WIDTH = 256, 4096, 32, 2048
TOKENS, EXPERTS, CHOSEN = 8192, 64, 8
CAPACITY = TOKENS * CHOSEN // EXPERTS
Step = Callable[[], object]


def step_of(module: Callable[..., Tensor], *inputs: Tensor) -> Step:
    """Forward and backward through inputs that need a gradient."""
    leaves = [x.clone().requires_grad_() for x in inputs]
    cotangent = torch.randn_like(leaves[0])
    return lambda: torch.autograd.grad(module(*leaves), leaves, cotangent)


def kept_by_hand(x: Tensor, k: int) -> Tensor:
    values, indices = x.topk(k, -1, sorted=False)
    return torch.zeros_like(x).scatter(-1, indices, values)


def batch_by_hand(x: Tensor) -> Tensor:
    return kept_by_hand(x.flatten(), KEPT * len(x)).view_as(x)


def tokens_by_hand(logits: Tensor) -> Tensor:
    values, indices = logits.topk(CHOSEN, -1)
    return torch.zeros_like(logits).scatter(-1, indices, values.softmax(-1))


def experts_by_hand(gates: Tensor) -> Tensor:
    values, indices = gates.topk(CAPACITY, 0, sorted=False)
    return torch.zeros_like(gates).scatter(0, indices, values)


def attention_by_hand(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    scores = query @ key.mT / query.shape[-1] ** 0.5
    indices = scores.detach().topk(KEPT, -1, sorted=False).indices
    return (scores + torch.full_like(scores, -torch.inf).scatter(-1, indices, 0.0)).softmax(-1) @ value


def two_of_four_by_hand(weight: Tensor) -> Tensor:
    groups = weight.view(-1, 4)
    mask = torch.zeros_like(groups).scatter(-1, groups.abs().topk(2, -1, sorted=False).indices, 1.0)
    return weight * mask.view_as(weight)


def compared(baseline: str, calls: dict[str, Step], seconds: float) -> list[dict[str, object]]:
    timings = interleaved(calls, seconds)
    rows: list[dict[str, object]] = []
    for name, timing in timings.items():
        ratio = timing.median / timings[baseline].median
        rows.append(
            {"step": name, "milliseconds": f"{1e3 * timing.median:.3f}", "low": f"{1e3 * timing.low:.3f}"}
            | {"high": f"{1e3 * timing.high:.3f}", "over torch.topk + scatter": f"{ratio:.2f}"}
        )
        print(f"{name:32} {1e3 * timing.median:9.3f} ms   {ratio:5.2f} x", flush=True)
    return rows


def topk(seconds: float) -> list[dict[str, object]]:
    x = torch.randn(ROWS, 4 * UNITS)
    calls = {
        "torch.topk + scatter": step_of(lambda x: kept_by_hand(x, 2 * KEPT), x),
        "TopK": step_of(TopK(2 * KEPT), x),
        "TopK by magnitude": step_of(TopK(2 * KEPT, by="magnitude"), x),
    }
    return compared("torch.topk + scatter", calls, seconds)


def experts(seconds: float) -> list[dict[str, object]]:
    x = torch.randn(TOKENS, EXPERTS)
    rows = compared(
        "tokens: torch.topk + scatter",
        {"tokens: torch.topk + scatter": step_of(tokens_by_hand, x), "TokenChoice": step_of(TokenChoice(CHOSEN), x)},
        seconds,
    )
    calls = {
        "experts: torch.topk + scatter": step_of(experts_by_hand, x),
        "ExpertChoice": step_of(ExpertChoice(CAPACITY), x),
    }
    return rows + compared("experts: torch.topk + scatter", calls, seconds)


def attention(seconds: float) -> list[dict[str, object]]:
    inputs = torch.randn(3, 8, 12, 512, 64).unbind()
    calls = {
        "torch.topk + scatter": step_of(attention_by_hand, *inputs),
        "topk_attention": step_of(lambda *x: topk_attention(*x, KEPT), *inputs),
        "topk_attention, relaxed": step_of(lambda *x: topk_attention(*x, KEPT, softness=0.1), *inputs),
    }
    return compared("torch.topk + scatter", calls, seconds)


def batch_topk(seconds: float) -> list[dict[str, object]]:
    x = torch.randn(ROWS, UNITS).relu()
    calls = {
        "torch.topk + scatter": step_of(batch_by_hand, x),
        "BatchTopK": step_of(BatchTopK(KEPT), x),
        "BatchTopK, with idle units": step_of(BatchTopK(KEPT, n=UNITS), x),
        "BatchTopK, straight-through": step_of(BatchTopK(KEPT, softness=0.1, straight_through=True), x),
        "BatchTopK, relaxed": step_of(BatchTopK(KEPT, softness=0.1), x),
    }
    return compared("torch.topk + scatter", calls, seconds)


def two_of_four(seconds: float) -> list[dict[str, object]]:
    weight = torch.randn(WIDTH, WIDTH)
    calls = {
        "torch.topk + scatter": step_of(two_of_four_by_hand, weight),
        "NMSparsity": step_of(NMSparsity(), weight),
        "NMSparsity, straight-through": step_of(NMSparsity(softness=0.5, straight_through=True), weight),
        "NMSparsity, relaxed": step_of(NMSparsity(softness=0.5), weight),
    }
    return compared("torch.topk + scatter", calls, seconds)


def main() -> None:
    parts = {"topk": topk, "batch_topk": batch_topk, "experts": experts, "two_of_four": two_of_four}
    run_parts(__doc__, "modules", parts | {"attention": attention})


if __name__ == "__main__":
    main()
