"""Masks keep the order of neighbouring scores, down to the last bit of float32."""

from functools import partial

import pytest
import torch

from khot import StudentT, capped_simplex_map, log_lapsum_topk, log_sigmoid_topk
from khot.kernels.links.capped_exponential import CAPPED_EXPONENTIAL
from khot.kernels.links.clipped_power import clipped_power
from khot.kernels.links.laplace import LAPLACE
from khot.kernels.links.logistic import LOGISTIC
from khot.kernels.links.normal import NORMAL
from tests.inputs import normal

pytestmark = [pytest.mark.loops, pytest.mark.one_of(2), pytest.mark.usefixtures("cpu_backend")]

LINKS = {
    "logistic": LOGISTIC,
    "laplace": LAPLACE,
    "normal": NORMAL,
    "capped_exponential": CAPPED_EXPONENTIAL,
    **{f"student_t_{df}": StudentT(df) for df in (1, 2, 4)},
    **{f"clipped_power_{q:g}": clipped_power(1 + 1 / q) for q in (1, 1.5, 2, 3, 3.3, 4, 20)},
}
MAPS = {name: partial(capped_simplex_map, link=link) for name, link in LINKS.items()}
MAPS |= {"log_sigmoid": log_sigmoid_topk, "log_lapsum": log_lapsum_topk}


@pytest.mark.parametrize("relaxation", MAPS.values(), ids=MAPS.keys())
def test_neighbours_keep_their_order(relaxation):
    x = normal(1_000_000, dtype=torch.float32).mul_(3).sort().values
    assert (relaxation(x, 300_000).diff() >= 0).all()
