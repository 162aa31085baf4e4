"""Every relaxed mask on rows of all kinds, against bisection: values, sums and first derivatives.

``--fuzz-rows N`` replaces the rows of the slow test by about N, half of them float32; ``--fuzz-seed`` draws others.
"""

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import pytest
import torch
from torch import Tensor

from khot import (
    capped_simplex_map,
    capped_softmax,
    lapsum_topk,
    log_lapsum_topk,
    log_sigmoid_topk,
    normal_topk,
    sigmoid_topk,
    sparse_topk,
    transport_topk,
)
from tests.fuzz import reference
from tests.fuzz.reference import Mask, ReferenceLink
from tests.fuzz.rows import Rows, batches
from tests.loops import for_each
from tests.maps import Cauchy, OwnLogistic

KINK = {torch.float32: 1e-6, torch.float64: 1e-12}  # nearer rows are counted, and their derivatives not compared
MOST_AT_KINKS = 0.01
TIER = 64  # eps: values, as in tests/oracles/README.md with A = 1, since t is kept as an offset
SUM = {torch.float32: 1e-6, torch.float64: 1e-12}
GRADIENT = {torch.float32: 1e-4, torch.float64: 1e-10}
LEVERAGE = 1e-3  # of an item far away with next to no derivative, in that of the softness
QUICK_ROWS, SLOW_ROWS = 14, 160  # of a map


@dataclass(frozen=True)
class FuzzCase:
    """A map, its link in the reference, and what its softness is multiplied by to be the link's scale."""

    name: str
    map: Callable[..., Tensor]
    link: ReferenceLink
    factor: float = 1.0
    log: bool = False
    integers: bool = True  # not for a link whose tails leave the last item above t a hair's breadth below its cap


def _sparse(p: float, q: float) -> FuzzCase:
    return FuzzCase(f"sparse_{p:.3g}", lambda x, k, s: sparse_topk(x, k, s, p), reference.clipped_power(q))


CASES = [
    FuzzCase("sigmoid", sigmoid_topk, reference.LOGISTIC),
    FuzzCase("log_sigmoid", log_sigmoid_topk, reference.LOGISTIC, log=True),
    FuzzCase("lapsum", lapsum_topk, reference.LAPLACE),
    FuzzCase("log_lapsum", log_lapsum_topk, reference.LAPLACE, log=True),
    FuzzCase("normal", normal_topk, reference.NORMAL),
    FuzzCase("transport", transport_topk, reference.LOGISTIC, factor=0.5),
    FuzzCase("capped_softmax", capped_softmax, reference.CAPPED_EXPONENTIAL, integers=False),
    FuzzCase("cauchy", partial(capped_simplex_map, link=Cauchy()), reference.CAUCHY),
    FuzzCase("own_logistic", partial(capped_simplex_map, link=OwnLogistic()), replace(reference.LOGISTIC, bare=True)),
    _sparse(2.0, 1.0),
    _sparse(1.7, 1 / 0.7),
    _sparse(4 / 3, 3.0),
]


def describe(case: FuzzCase, rows: Rows, row: int, what: str, got: Tensor, expected: Tensor) -> str:
    """What to call to see it again."""
    x, k, s = rows.x[row].tolist(), rows.k[row].item(), rows.softness[row].item()
    shown = x if len(x) <= 12 else f"{x[:12]}... n={len(x)}"
    return (
        f"{case.name}: {what} of {rows.x.dtype} x={shown}, k={k!r}, softness={s!r}, "
        f"weight={rows.weight[row][:12].tolist()}: got {got[row].tolist()}, expected {expected[row].tolist()}"
    )


def compare(
    case: FuzzCase, rows: Rows, what: str, got: Tensor, expected: Tensor, tolerance: Tensor, used: Tensor
) -> None:
    """All rows that are ``used`` within their tolerance, none with a NaN or an infinity that the truth has not."""
    largest = torch.finfo(rows.x.dtype).max
    got, expected = got.double(), expected.double()
    expected = torch.where(expected.abs() > largest, expected.sign() * torch.inf, expected)
    near = (got - expected).abs() <= tolerance + 16 * torch.finfo(rows.x.dtype).tiny * torch.finfo(rows.x.dtype).eps
    edge = (expected.abs() > largest / 16) & (got.sign() == expected.sign())  # overflows sooner or later
    wrong = ~(near | (got == expected) | edge | expected.isnan()) & used.reshape(-1, *[1] * (got.dim() - 1))
    wrong = wrong | got.isnan()
    if bool(wrong.any()):
        row = int(wrong.nonzero()[0, 0])
        raise AssertionError(
            f"{int(wrong.flatten(1).any(1).sum()) if wrong.dim() > 1 else int(wrong.sum())} rows, "
            + describe(case, rows, row, what, got, expected)
        )


def log_values(at: Mask, dtype: torch.dtype) -> Tensor:
    """log y; -inf where z, of which it is a function, is beyond the dtype."""
    return torch.where(at.z < -torch.finfo(dtype).max, -torch.inf, at.log_y)


def check_values(case: FuzzCase, rows: Rows, y: Tensor, at: Mask) -> None:
    eps, everything = torch.finfo(y.dtype).eps, torch.ones_like(rows.k, dtype=torch.bool)
    log_y = log_values(at, y.dtype)
    assert bool((y.isfinite() | (((rows.x == -torch.inf) | (log_y < -1e37)) & case.log)).all()), case.name
    if case.log:
        compare(case, rows, "log y", y, log_y, TIER * eps * (1 + log_y.abs()), ~at.limit)
    else:
        compare(case, rows, "y", y, at.y, torch.tensor(TIER * eps), everything)
        check_sums(case, rows, y, at)


def check_sums(case: FuzzCase, rows: Rows, y: Tensor, at: Mask) -> None:
    eps, everything = torch.finfo(y.dtype).eps, torch.ones_like(rows.k, dtype=torch.bool)
    sums = torch.where(rows.x == -torch.inf, 0.0, y.double()).sum(-1)
    # What z rounds shows in the sum as much as in the entries; for small k these lie far out in the tail.
    tail = at.z.abs() * (at.z.abs().clamp(min=1) if case.link is reference.NORMAL else 1)
    lever = (at.y * torch.where(at.y > 0, tail.clamp(max=1e4), 0.0)).sum(-1)
    lever = torch.where(at.limit, 0.0, lever.minimum(1500 * rows.k))
    tolerance = SUM[y.dtype] * rows.k + 4 * eps * lever + 1e-30 * y.shape[-1]
    compare(case, rows, "sum", sums, rows.k, tolerance, everything)


def check_derivatives(
    case: FuzzCase, rows: Rows, grads: tuple[Tensor, ...], at: Mask, used: Tensor, cancelling: float
) -> None:
    dtype = rows.x.dtype
    scale = rows.softness * case.factor
    truth = reference.gradients(case.link, at, rows.weight, scale, case.log)
    limits, largest = torch.finfo(dtype), rows.weight.double().abs().amax(-1)
    nearest = torch.where(at.z.isfinite(), at.z.abs(), torch.inf).amin(-1).clamp(max=1e18)
    exponent = nearest * nearest.clamp(min=1) if case.link is reference.NORMAL else nearest
    ratio = (TIER * limits.eps * (1 + exponent)).clamp(max=1)  # of slopes to each other, far out in the tails
    noise = (1 + largest) * (limits.tiny / limits.eps + 1e-30 * at.limit.double()) / scale  # slopes that underflow
    # Relative to the row's largest and, where that cancels, to what cancels there.
    row = truth.x.abs().amax(-1) + noise + (cancelling / GRADIENT[dtype] + (ratio == 1)) * truth.size
    tolerance = (GRADIENT[dtype] + ratio) * row
    compare(case, rows, "dL/dx", grads[0], truth.x, tolerance.unsqueeze(-1), used)
    inner = used & ~at.limit
    if case.link.bare:  # ratios of slopes end where slopes underflow
        inner &= truth.top > math.log(limits.tiny / limits.eps)
    count = rows.x.shape[-1]
    span = truth.k.abs() + largest * (count if case.log else 1)
    compare(case, rows, "dL/dk", grads[1], truth.k, (GRADIENT[dtype] + ratio) * span, inner & (ratio < 1))
    if len(grads) > 2:
        z = at.z.clamp(-1e307, 1e307).abs() + 1
        lever = (torch.where(truth.x == 0, 0.0, truth.x.abs() + row.unsqueeze(-1) * LEVERAGE) * z).sum(-1)
        slack = case.factor * (4 * tolerance * z.amin(-1) + GRADIENT[dtype] * lever)
        compare(case, rows, "dL/dsoftness", grads[2], truth.softness * case.factor, slack, inner)


def run(
    case: FuzzCase,
    rows: Rows,
    softness_too: bool,
    counts: Counter[str],
    cancelling: float | None = None,
    device: str = "cpu",
) -> None:
    """Compares one batch; derivatives that cancel may be off by ``cancelling``, usually what two roundings leave."""
    if cancelling is None:
        cancelling = TIER * torch.finfo(rows.x.dtype).eps ** 2
    x, k, s = (v.to(device, copy=True).requires_grad_() for v in rows[:3])
    y = case.map(x, k, s if softness_too else s.detach())
    hidden = rows.x == -torch.inf
    cotangent = rows.weight.masked_fill(hidden, 0) if case.log else rows.weight
    leaves = (x, k, s) if softness_too else (x, k)
    grads = tuple(v.cpu() for v in torch.autograd.grad(y, leaves, cotangent.to(device)))
    at = reference.mask(case.link, rows.x, rows.k, rows.softness * case.factor)
    used = at.kink > KINK[rows.x.dtype]
    counts.update(rows=len(used), left_out=int((~used).sum()))
    if case.log:  # -inf where log y is beyond the dtype, and no derivative to speak of
        log_y = log_values(at, rows.x.dtype)
        used &= torch.where(hidden, 0.0, log_y).amin(-1) > -torch.finfo(rows.x.dtype).max / 16
    check_values(case, rows, y.detach().cpu(), at)
    assert not bool(grads[0][hidden].any())
    check_derivatives(case, rows._replace(weight=cotangent), grads, at, used, cancelling)


def check_rows(case: FuzzCase, dtype: torch.dtype, seed: int, total: int) -> Counter[str]:
    counts: Counter[str] = Counter()
    for i, rows in enumerate(batches(seed, total, dtype, integers=case.integers)):
        run(case, rows, i % 2 == 0, counts)
    return counts


def check_share(counts: Counter[str]) -> None:
    """Few rows were left out, or this would be no test of the others."""
    assert counts["rows"] > 0 and counts["left_out"] <= MOST_AT_KINKS * counts["rows"], counts


pytestmark = pytest.mark.usefixtures("cpu_backend")

each_case = pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
DTYPES = [torch.float32, torch.float64]
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "float64"])


@each_case
@for_each("dtype", DTYPES)
def test_values_at_integer_sums(case, dtype):
    """Also of the link that gets none in the other tests, because its derivatives there are at a kink."""
    for rows in batches(2, QUICK_ROWS // 2, dtype):
        rows = rows._replace(k=rows.k.round())
        at = reference.mask(case.link, rows.x, rows.k, rows.softness * case.factor)
        check_values(case, rows, case.map(rows.x, rows.k, rows.softness), at)


FOUND = {  # rows that a long run has found, by what was wrong with them
    "root_hit_where_slopes_vanish": (
        *("normal", torch.float32, 2.0, 1.4431273345452588e-10),
        *([5747811328.0, 5747808768.0, 5747809280.0], [-1.0, 2.0, 0.5]),
    ),
    "a_bracket_of_a_rough_inverse": (
        *("cauchy", torch.float64, 1.076221010847252e-08, 0.025403056757367988),
        *([torch.finfo(torch.float64).max] * 3, [0.3, -0.6, 0.4]),
    ),
    "pulls_that_cancel": (
        *("log_sigmoid", torch.float32, 0.00017677720676727884, 2.0015106697458157e-26),
        *([3.2749505013467907e-26, 5.42115198088711e-26], [-0.4419327676296234, -1.2906222343444824]),
    ),
    "tails_of_few_digits": (
        *("normal", torch.float64, 1.0, 4.659990582886786e-10),
        *([-0.17071578654600839, -0.17071582240141933], [1.63137873048079, -0.45299048978152134]),
    ),
    "a_large_score_that_took_the_softness_to_zero": (
        *("sigmoid", torch.float64, 3.999999675392476, 2.1239564698573179e-305),
        *([1.9571326896719014e302, 3.0620341728807785e304, 1.7976931348623157e308, 2.176e306], [0.3, -0.6, 0.4, 0.1]),
    ),
    "small_scores_beside_the_largest": (
        *("sigmoid", torch.float64, 2.3, 2.3e-308),
        *([1.7e308, 6.9e-309, -3.91e-308, 2.07e-308, 5.06e-308], [0.3, -0.6, 0.4, 0.1, 0.7]),
    ),
    "a_threshold_beyond_the_largest_number": (
        *("sigmoid", torch.float64, 0.01, 1e308),
        *([0.0, 1.0, 2.0, 3.0], [0.3, -0.6, 0.4, 0.1]),
    ),
    "an_offset_from_another_item": (
        *("sparse_2", torch.float64, 3.0524791932659157, 0.012511047118927223),
        [
            -2.126962488591392e22,
            -2.1269624885913953e22,
            -2.1269624885913965e22,
            -2.126962472736083e22,
            -2.126962472736e22,
        ],
        [1.1232203632951496, -0.2716788701223058, -0.7968243898432776, 1.203994675375336, -0.7014500489163058],
    ),
    "an_item_far_beyond_the_next": (
        *("capped_softmax", torch.float64, 1.6977988983821706, 5.798731222287034e-307),
        [-9.635362048761462e22, -3.1381491723153e35, -9.635362048761454e22, -3.138149172e35, -9.635362048761464e22],
        [0.07719647309686009, -0.11352883401210369, -1.2653602315988846, 0.7772220190548221, -0.45920455031894475],
    ),
    "a_gap_whose_ends_are_infinitely_many_scales_away": (
        *("sigmoid", torch.float32, 2.0, 0.02239181015316536),
        *([1.304937720298767, 1.304937720298767, torch.finfo(torch.float32).min], [-0.9626, 1.2240, 0.6146]),
    ),
    "a_gap_with_an_end_infinitely_many_scales_away": (
        *("normal", torch.float64, 3.0, 3.7858587729121645e-28),
        [
            torch.finfo(torch.float64).min,
            3.4828795258089184e-33,
            1.21517756387711e-28,
            1.8556722880235644e-27,
            -torch.inf,
        ],
        [-2.47, -1.25, -0.54, 0.27, 1.09],
    ),
    "a_derivative_among_the_subnormal_numbers": (
        *("normal", torch.float64, 3.0, 1.3232524298264273e23),
        *([-3.4021153717343166e38, *[-3.40211537173422e38] * 2, -torch.inf, -3.4021153717344133e38],),
        [-0.8130054273413189, 0.4975124451054264, -1.052510784963279, -1.5504008730160759, -1.1797550862314965],
    ),
    "a_logarithm_without_a_gap": (
        *("log_sigmoid", torch.float32, 2.0, 1.3232524298264273e23),
        *([-3.402115407466025e38, -3.402115407466025e38, -torch.inf, -3.402115407466025e38], [-0.81, 0.49, 0.0, -1.05]),
    ),
    "an_item_whose_distance_overflows": (
        *("log_sigmoid", torch.float32, 0.46236783608544796, 23885516.119090915),
        *([-3.4028218437925203e38, 3.4028234663852886e38], [-0.37, 1.12]),
    ),
    "a_residual_that_is_all_of_its_terms": (
        *("sigmoid", torch.float32, 4.499854814598433, 0.005200181676105185),
        [-3.1410880088806152, 3.1410880088806152, -1.5705440044403076, 7.852720260620117, 0.0],
        [0.8740321397781372, -0.70290207862854, -0.37439221143722534, -0.8214675784111023, -0.8837589621543884],
    ),
}


def member(name: str) -> FuzzCase:
    return next(case for case in CASES if case.name == name)


def check_row_that_was_wrong(name: str, cancelling: float | None = None, device: str = "cpu") -> None:
    case, dtype, k, softness, x, weight = FOUND[name]
    for rows in (1, 16):  # 16 of them go side by side through a loop of their own on a CPU
        numbers = (torch.full((rows,), v, dtype=torch.float64) for v in (k, softness))
        scores, cotangents = (torch.tensor([v] * rows, dtype=dtype) for v in (x, weight))
        run(member(case), Rows(scores, *numbers, cotangents), True, Counter(), cancelling, device)


@for_each("name", FOUND)
def test_rows_that_were_wrong(name):
    check_row_that_was_wrong(name)


@for_each("name", ["sigmoid", "transport", "cauchy", "sparse_2", "sparse_1.33"])
def test_nearly_equal_cotangents(name):
    noise = torch.Generator().manual_seed(0)
    x, weight = torch.randn(2, 256, 3, generator=noise)
    ones = torch.ones(256, dtype=torch.float64)
    run(member(name), Rows(x, 1.2 * ones, 2.0 * ones, 1 + 1e-4 * weight), True, Counter())


@each_case
@for_each("dtype", DTYPES)
def test_one_score_beyond_all_others(case, dtype):
    """In scales, the gap beside it is wider than the largest number of the dtype."""
    generator, largest = torch.Generator().manual_seed(0), torch.finfo(dtype).max
    x, weight = torch.randn(2, 6, 64, 5, generator=generator, dtype=torch.float64)
    size, k, softness = torch.linspace(0.3, 1, 64).double() * largest, torch.tensor([1.0, 4.0]), [1e-8, 0.01, 1.0]
    x[..., 3] = torch.stack([size, -size]).repeat_interleave(3, 0)
    k, softness = (v.repeat_interleave(64).double() for v in torch.cartesian_prod(k, torch.tensor(softness)).T)
    run(case, Rows(x.flatten(0, 1).to(dtype), k, softness, weight.flatten(0, 1).to(dtype)), True, Counter())


def test_small_sums_far_from_0():
    x = 437740 + 2e-5 * torch.rand(256, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    ones = torch.ones(256, dtype=torch.float64)
    run(member("sparse_1.7"), Rows(x, 1e-9 * ones, 2.0 * ones, torch.ones_like(x)), False, Counter())


@for_each("name, dtype", [("log_sigmoid", torch.float32), ("sparse_2", torch.float32), ("normal", torch.float64)])
def test_some_rows(name, dtype):
    counts = check_rows(member(name), dtype, seed=1, total=QUICK_ROWS)
    assert counts["left_out"] <= 2  # too few rows for a share


@pytest.mark.slow
@each_case
@each_dtype
def test_many_rows(case, dtype, request, record_property):
    total = request.config.getoption("--fuzz-rows") // (2 * len(CASES)) or SLOW_ROWS
    counts = check_rows(case, dtype, request.config.getoption("--fuzz-seed"), total)
    check_share(counts)
    for name, number in counts.items():
        record_property(name, number)
