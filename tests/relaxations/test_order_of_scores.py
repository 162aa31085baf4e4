"""Float32 masks to the last bits: the order of neighbouring scores, and sums where k is tiny."""

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


@pytest.mark.parametrize("link", LINKS.values(), ids=LINKS.keys())
@pytest.mark.parametrize("scale", [0.0, 30.0])
def test_sums_of_few(link, scale):
    """All items lie many scales below the threshold, where F magnifies the rounding of z."""
    x = normal(64, 50, dtype=torch.float32, scale=scale) + 3.3
    for k in (1e-9, 1e-6, 1e-3):
        sums = capped_simplex_map(x, k, link=link).double().sum(-1)
        assert ((sums - k).abs() <= 1e-6 * k).all()
