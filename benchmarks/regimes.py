"""How the time of every public map, design and estimator depends on its input: one table for each family.

Run `python benchmarks/regimes.py [maps] [designs] [estimators]` (default: all, up to ten minutes). A call is a map and
its gradient; a new design, a draw, its log_prob where there is one, and the gradient; or a step of an estimator.
`plain ms` is the median time of a call on N(0, 1) scores in float32. The other columns are regimes, and their entries
median times over the plain one, all taken in turns: processor time of one thread, or elapsed time with the `--threads`
asked for. A dash means that an operation refuses the regime, or that there is nothing to differentiate twice.
"""

import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from timing import interleaved, run_parts
from torch import Tensor

import khot
from khot import ConditionalPoisson, Pivotal, Sampford, pathwise

Row = dict[str, object]
Operation = Callable[..., Any]  # of scores and k; maps also of dim
Make = Callable[..., Any]  # a distribution, of logits and k

MAP_SHAPES, STEP_SHAPES = [(128, 1000, 100), (16, 10, 3)], [(128, 100, 10)]
DRAWS, FEATURES = 2, 8
REFUSALS = (TypeError, ValueError, NotImplementedError)
FEW_ROWS = 8  # where a full batch takes long in every regime
ON_FEW_ROWS = {
    "soft_permutation", "sorted_transport_topk", "isotonic_lp", "Brewer", "ParetoSampling exact",
}  # fmt: skip


class Input(NamedTuple):
    """What a call is made of in one regime."""

    x: Tensor
    k: int | Tensor
    options: dict[str, int]
    twice: bool = False


def regimes(batch: int, n: int, k: int) -> dict[str, Input]:
    z = torch.randn(batch, n)
    scores = {
        "plain": z,
        "times 20": 20 * z,  # which is a softness of 1/20
        "finite masks": z.masked_fill(torch.rand(batch, n) < 1 / 3, -1e9),
        "heavy tails": 10 * z**3,
        "ties": z.round(),
        "zeros": torch.zeros(batch, n),  # where a training starts
        "half zeros": z.relu(),
        "two clusters": z + 50 * khot.topk_mask(torch.rand(batch, n), k),
        "float64": z.double(),
        "float16": z.half(),
        "bfloat16": z.bfloat16(),
        "strided": z.repeat_interleave(2, -1)[:, ::2],
    }
    return {name: Input(x, k, {}) for name, x in scores.items()} | {
        "dim 0": Input(z.T.contiguous(), k, {"dim": 0}),
        "tensor k": Input(z, k - torch.arange(batch) % 3, {}),
        "double backward": Input(z, k, {}, twice=True),
    }


def without_k(function: Operation) -> Operation:
    def run(x: Tensor, k: int | Tensor, **options: int) -> Any:
        if isinstance(k, Tensor):
            raise TypeError("there is no `k`")
        return function(x, **options)

    return run


def ones_first(x: Tensor, k: int | Tensor, dim: int = -1) -> Tensor:
    return (torch.arange(x.shape[dim]) < torch.as_tensor(k).unsqueeze(-1)).to(x.dtype)


def projection(x: Tensor, k: int | Tensor, dim: int = -1) -> Tensor:
    return khot.permutahedron_projection(x, ones_first(x, k, dim), dim=dim)


def descending(isotonic: Operation) -> Operation:
    """The isotonic problem of a top-k mask."""
    return lambda x, k: isotonic(x.sort(-1, descending=True).values, ones_first(x, k))


WITH_K = [
    khot.topk_mask, khot.topk_threshold, khot.sigmoid_topk, khot.lapsum_topk, khot.normal_topk, khot.capped_softmax,
    khot.transport_topk, khot.straight_through_topk, khot.log_sigmoid_topk, khot.log_lapsum_topk,
    khot.successive_softmax_topk, khot.sorted_transport_topk,
]  # fmt: skip
SPARSE = [khot.sparse_topk, khot.sparse_topk_signed, khot.sparse_topk_magnitude]
WITHOUT_K = [
    khot.soft_rank, khot.soft_sort, khot.soft_permutation, khot.permutahedron_rank, khot.permutahedron_sort
]  # fmt: skip
LEVELS = torch.tensor([0.1, 0.5, 0.9])
MAPS: dict[str, Operation] = {
    **{function.__name__: function for function in WITH_K},
    **{
        f"{function.__name__} p={p}": partial(function, p=value)
        for function in SPARSE
        for p, value in {"2": 2.0, "4/3": 4 / 3, "1.7": 1.7}.items()
    },
    **{function.__name__: without_k(function) for function in WITHOUT_K},
    "soft_count": without_k(lambda x: khot.soft_count(x, x)),
    "soft_quantile": without_k(lambda x: khot.soft_quantile(x, LEVELS)),
    "permutahedron_projection": projection,
    "isotonic_l2": descending(khot.isotonic_l2),
    "isotonic_lp": descending(partial(khot.isotonic_lp, p=4 / 3, strength=1.0)),
}


def drawn(make: Make, has_log_prob: bool = True) -> Operation:
    """A draw from a new design, and its log_prob beside it."""

    def run(x: Tensor, k: int | Tensor) -> Tensor:
        design = make(logits=x, k=k)
        value = design.rsample() if design.has_rsample else design.sample()
        return torch.cat((value, design.log_prob(value).unsqueeze(-1)), -1) if has_log_prob else value

    return run


def ranked(logits: Tensor, k: int | Tensor) -> Tensor:
    """A ranking of k units that is drawn, and its log_prob."""
    law = khot.PlackettLuce(logits, k)
    return law.log_prob(law.sample()).unsqueeze(-1)


def phantom_unit(logits: Tensor, k: int | Tensor) -> khot.PhantomUnit:
    return without_k(lambda x: khot.PhantomUnit(ConditionalPoisson, logits=x))(logits, k)


DESIGNS: dict[str, Operation] = {
    "ConditionalPoisson": drawn(ConditionalPoisson),
    "PhantomUnit": drawn(phantom_unit),
    "Sampford": drawn(Sampford),
    "Brewer": drawn(khot.Brewer),
    "Systematic fixed": drawn(khot.Systematic),
    "Systematic random": drawn(partial(khot.Systematic, order="random"), has_log_prob=False),
    "Pivotal": drawn(Pivotal, has_log_prob=False),
    "ParetoSampling": drawn(khot.ParetoSampling),
    "ParetoSampling exact": drawn(partial(khot.ParetoSampling, adjust="exact")),
    "GumbelTopK": drawn(khot.GumbelTopK),
    "PlackettLuce": ranked,
    "RelaxedKHot": drawn(partial(khot.RelaxedKHot, 0.5)),
    "RelaxedKHotStraightThrough": drawn(partial(khot.RelaxedKHotStraightThrough, 0.5)),
}


def loss(value: Tensor) -> Tensor:
    """|W x|² with W of a few rows."""
    weight = torch.arange(value.shape[-1] * FEATURES, dtype=torch.float64).sin().view(-1, FEATURES)
    return (value @ weight.to(value.dtype)).square().sum(-1)


def step(estimator: Operation, make: Make, **settings: Any) -> Operation:
    return lambda x, k: estimator(make(logits=x, k=k), loss, DRAWS, **settings)


def few_units(logits: Tensor, k: int | Tensor) -> ConditionalPoisson:
    """A design whose k-hot vectors can be listed."""
    return ConditionalPoisson(logits=logits[..., :12], k=k // 3)


def surrogate(design: Any, f: Callable[[Tensor], Tensor], num_samples: int) -> Tensor:
    value = design.sample((num_samples,))
    return khot.score_function_surrogate(design, value, f(value))


ESTIMATORS: dict[str, Operation] = {
    "straight_through Pivotal": step(khot.straight_through, Pivotal),
    "straight_through ConditionalPoisson": step(khot.straight_through, ConditionalPoisson),
    "reinmax Pivotal": step(khot.reinmax, Pivotal),
    "reinmax ConditionalPoisson": step(khot.reinmax, ConditionalPoisson),
    "pathwise StraightThrough Sampford": step(pathwise, lambda **given: khot.StraightThrough(Sampford(**given))),
    "pathwise ReinMax Sampford": step(pathwise, lambda **given: khot.ReinMax(Sampford(**given))),
    "RelaxedKHotStraightThrough": step(pathwise, partial(khot.RelaxedKHotStraightThrough, 0.5)),
    "IMLE": step(pathwise, khot.IMLE),
    "IMLE sum_of_gamma": step(pathwise, partial(khot.IMLE, noise="sum_of_gamma")),
    "PerturbedTopK": step(pathwise, khot.PerturbedTopK),
    "perturbed_topk": khot.perturbed_topk,
    "score_function": step(khot.score_function, ConditionalPoisson),
    "score_function leave_one_out": step(khot.score_function, ConditionalPoisson, baseline="leave_one_out"),
    "score_function_surrogate Sampford": step(surrogate, Sampford),
    "unordered_set": step(khot.unordered_set, few_units),
    "enumerated": step(khot.enumerated, few_units),
}


def call_of(operation: Operation, given: Input) -> Callable[[], object] | None:
    """What is timed, or None where the operation refuses the regime."""
    x = given.x.requires_grad_()
    direction = torch.randn_like(x)
    try:
        cotangent = torch.randn_like(operation(x, given.k, **given.options))
    except REFUSALS:
        return None

    def once() -> Tensor:
        y = operation(x, given.k, **given.options)
        return torch.autograd.grad(y, x, cotangent, create_graph=given.twice)[0] if y.requires_grad else y

    if not given.twice:
        return once
    return (lambda: torch.autograd.grad(once(), x, direction)) if once().requires_grad else None


def table(operations: dict[str, Operation], shapes: list[tuple[int, int, int]], seconds: float) -> list[Row]:
    rows: list[Row] = []
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    for full, n, k in shapes:
        for name, operation in operations.items():
            batch = FEW_ROWS if name in ON_FEW_ROWS else full
            calls = {regime: call_of(operation, given) for regime, given in regimes(batch, n, k).items()}
            possible = {regime: call for regime, call in calls.items() if call}
            timings = interleaved(possible, seconds, rounds=7, clock=clock)
            plain = timings["plain"].median
            ratios = {regime: f"{timing.median / plain:.2f}" for regime, timing in timings.items()}
            row: Row = {"batch": batch, "n": n, "k": k, "operation": name, "plain ms": f"{1e3 * plain:.3f}"}
            rows.append(row | {regime: ratios.get(regime, "-") for regime in calls if regime != "plain"})
            if len(rows) == 1:
                print_row(dict(zip(rows[0], rows[0], strict=True)))
            print_row(rows[-1])
    return rows


def print_row(row: Row) -> None:
    """In columns as wide as their names, but for that of the operations."""
    print(
        "  ".join(f"{cell:>{35 if key == 'operation' else max(len(key), 6)}}" for key, cell in row.items()), flush=True
    )


def main() -> None:
    families = {"maps": (MAPS, MAP_SHAPES), "designs": (DESIGNS, STEP_SHAPES), "estimators": (ESTIMATORS, STEP_SHAPES)}
    parts = {name: partial(table, *family) for name, family in families.items()}
    run_parts(__doc__, "regimes", parts, seconds=0.25, threads=1)


if __name__ == "__main__":
    main()
