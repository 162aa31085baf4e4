"""What modules cost beside the same written with torch.topk and scatter: a step of training, forward and backward.

batch_topk    BatchTopK of 256 rows with 4096 units, 32 kept a row, hard and relaxed
two_of_four   NMSparsity of a 2048 x 2048 weight
"""

from collections.abc import Callable

import torch
from timing import interleaved, run_parts
from torch import Tensor

from khot.nn import BatchTopK, NMSparsity

ROWS, UNITS, KEPT, WIDTH = 256, 4096, 32, 2048
Step = Callable[[], object]


def step_of(module: Callable[[Tensor], Tensor], x: Tensor) -> Step:
    """Forward and backward through scores that need a gradient."""
    x = x.clone().requires_grad_()
    cotangent = torch.randn_like(x)
    return lambda: torch.autograd.grad(module(x), x, cotangent)


def kept_by_hand(x: Tensor, k: int) -> Tensor:
    values, indices = x.topk(k, -1, sorted=False)
    return torch.zeros_like(x).scatter(-1, indices, values)


def batch_by_hand(x: Tensor) -> Tensor:
    return kept_by_hand(x.flatten(), KEPT * len(x)).view_as(x)


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


def batch_topk(seconds: float) -> list[dict[str, object]]:
    x = torch.randn(ROWS, UNITS).relu()
    calls = {
        "torch.topk + scatter": step_of(batch_by_hand, x),
        "BatchTopK": step_of(BatchTopK(KEPT), x),
        "BatchTopK, with idle units": step_of(BatchTopK(KEPT, n=UNITS), x),
        "BatchTopK, relaxed": step_of(BatchTopK(KEPT, 0.1), x),
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
    run_parts(__doc__, "modules", {"batch_topk": batch_topk, "two_of_four": two_of_four})


if __name__ == "__main__":
    main()
