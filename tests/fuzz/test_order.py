"""The order maps on rows of all kinds, against sums over all pairs and bisection: values and first derivatives.

Options as of :mod:`tests.fuzz.test_masks`.
"""

import pytest
import torch

from khot import soft_permutation, soft_rank, soft_sort
from tests.fuzz import order_batch
from tests.fuzz.rows import Rows, batches, compare

MAPS = [soft_rank, soft_sort, soft_permutation]
LONGEST = {soft_rank: 300, soft_sort: 64, soft_permutation: 64}  # of which the definitions are quick enough
TIER = 64
GRADIENT = {torch.float32: 1e-4, torch.float64: 1e-10}
QUICK_ROWS, SLOW_ROWS = 450, 2000


def run(order_map, rows: Rows, descending: bool) -> None:
    dtype, limits, name = rows.x.dtype, torch.finfo(rows.x.dtype), order_map.__name__
    x, scale = rows.x.clone().requires_grad_(), rows.softness.clone().requires_grad_()
    y = order_map(x, scale, descending)
    weight = rows.weight
    if y.dim() == 3:
        weight = torch.cos(torch.arange(y.shape[-1]) + weight.unsqueeze(-1)).to(dtype)
    grads = torch.autograd.grad(y, (x, scale), weight)
    sign = -1.0 if descending else 1.0
    flip = sign if order_map is soft_sort else 1.0  # descending maps are those of -x
    truth = getattr(order_batch, name)(sign * rows.x.double(), rows.softness, flip * weight.double())
    floor = 4 * limits.tiny
    underflow = limits.tiny / limits.eps / rows.softness  # of densities
    compare(name, rows, "y", y.detach(), flip * truth.value, TIER * limits.eps * truth.value_size + floor)
    tolerance = GRADIENT[dtype] * truth.size + floor + underflow
    compare(name, rows, "dL/dx", grads[0], sign * truth.grad_x, tolerance.unsqueeze(-1))
    lever = rows.x.shape[-1] * (1 + 2 * torch.log(torch.tensor(rows.x.shape[-1] + 1.0)))
    tolerance = (GRADIENT[dtype] * truth.size + underflow) * lever + floor
    compare(name, rows, "dL/dscale", grads[1], truth.grad_scale, tolerance)


def check_rows(order_map, dtype: torch.dtype, seed: int, total: int) -> int:
    count = 0
    for i, rows in enumerate(batches(seed, total, dtype, masked=False)):
        n = rows.x.shape[-1]
        if n <= LONGEST[order_map]:
            step = max(1, 2**20 // n**2)
            for part in range(0, len(rows.x), step):
                run(order_map, Rows(*(v[part : part + step] for v in rows)), i % 2 == 1)
            count += len(rows.x)
    return count


every_map = pytest.mark.parametrize("order_map", MAPS, ids=lambda order_map: order_map.__name__)
each_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])


@each_dtype
def test_some_rows(dtype):
    assert sum(check_rows(order_map, dtype, seed=4, total=QUICK_ROWS // len(MAPS)) for order_map in MAPS) > 300


@pytest.mark.slow
@every_map
@each_dtype
def test_many_rows(order_map, dtype, request, record_property):
    total = request.config.getoption("--fuzz-rows") or SLOW_ROWS
    seed = request.config.getoption("--fuzz-seed")
    count = check_rows(order_map, dtype, seed, total // (2 * len(MAPS)))
    assert count > 0
    record_property("rows", count)
