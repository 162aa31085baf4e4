"""The sparse maps by absolute value on rows of all kinds, against bisection: values and first derivatives.

Options as of :mod:`tests.fuzz.test_masks`.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from khot import sparse_topk_magnitude, sparse_topk_signed
from tests.fuzz import odd_reference
from tests.fuzz.odd_reference import Odd
from tests.fuzz.rows import Rows, batches, compare
from tests.fuzz.test_masks import GRADIENT, KINK, TIER, check_share

pytestmark = pytest.mark.usefixtures("cpu_backend")

QUICK_ROWS, SLOW_ROWS = 120, 1000


@dataclass(frozen=True)
class OddCase:
    """A map and its reference, at one exponent."""

    name: str
    map: Callable[..., Tensor]
    reference: Callable[..., Odd]
    p: float
    q: float


CASES = [
    OddCase(f"{name}_{p:.3g}", function, getattr(odd_reference, name), p, q)
    for name, function in (("signed", sparse_topk_signed), ("magnitude", sparse_topk_magnitude))
    for p, q in ((2.0, 1.0), (1.7, 1 / 0.7), (4 / 3, 3.0))
]


def run(case: OddCase, rows: Rows, counts: Counter[str]) -> None:
    dtype, limits = rows.x.dtype, torch.finfo(rows.x.dtype)
    inputs = tuple(v.clone().requires_grad_() for v in (rows.x, rows.k, rows.softness))
    y = case.map(*inputs, case.p)
    grads = torch.autograd.grad(y, inputs, rows.weight)
    truth = case.reference(rows.x, rows.k, rows.softness, case.q, rows.weight)
    used = truth.kink > KINK[dtype]
    counts.update(rows=len(used), left_out=int((~used).sum()))
    compare(case.name, rows, "y", y.detach(), truth.y, TIER * limits.eps * truth.value_size + 4 * limits.tiny)
    underflow = limits.tiny / limits.eps / rows.softness if case.reference is odd_reference.signed else 0.0  # of slopes
    tolerance = GRADIENT[dtype] * truth.size + 4 * limits.tiny + underflow
    compare(case.name, rows, "dL/dx", grads[0], truth.grad_x, tolerance.unsqueeze(-1), used)
    compare(case.name, rows, "dL/dk", grads[1], truth.grad_k, GRADIENT[dtype] * truth.size_k + 4 * limits.tiny, used)
    tolerance = GRADIENT[dtype] * truth.size_softness + 4 * limits.tiny + underflow
    compare(case.name, rows, "dL/dstrength", grads[2], truth.grad_softness, tolerance, used)


def check_rows(case: OddCase, dtype: torch.dtype, seed: int, total: int) -> Counter[str]:
    counts: Counter[str] = Counter()
    for rows in batches(seed, total, dtype, masked=False):
        run(case, rows, counts)
    return counts


each_case = pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
each_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])


def test_some_rows():
    few = [case for case in CASES if case.p == 2]  # whose loops other quick tests compile as well
    check_share(sum((check_rows(case, torch.float32, seed=3, total=QUICK_ROWS // len(few)) for case in few), Counter()))


@pytest.mark.slow
@each_case
@each_dtype
def test_many_rows(case, dtype, request, record_property):
    total = request.config.getoption("--fuzz-rows") or SLOW_ROWS
    counts = check_rows(case, dtype, request.config.getoption("--fuzz-seed"), total // (2 * len(CASES)))
    check_share(counts)
    for name, number in counts.items():
        record_property(name, number)
