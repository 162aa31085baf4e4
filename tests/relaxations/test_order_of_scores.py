"""Masks keep the order of neighbouring scores, down to the last bit of float32."""

import torch

from khot import capped_simplex_map
from khot.kernels.links.capped_exponential import CAPPED_EXPONENTIAL
from khot.kernels.links.clipped_power import clipped_power
from khot.kernels.links.laplace import LAPLACE
from khot.kernels.links.logistic import LOGISTIC
from khot.kernels.links.normal import NORMAL
from tests.inputs import normal
from tests.loops import for_each

LINKS = {
    "logistic": LOGISTIC,
    "laplace": LAPLACE,
    "normal": NORMAL,
    "capped_exponential": CAPPED_EXPONENTIAL,
    **{f"clipped_power_{q:g}": clipped_power(1 + 1 / q) for q in (1, 1.5, 2, 3, 3.3, 4, 6.6, 10)},
}


@for_each("link", LINKS.values())
def test_neighbours_keep_their_order(link):
    x = normal(20_000, dtype=torch.float32).mul_(3)
    x = torch.cat((x, x.nextafter(torch.tensor(torch.inf)))).sort().values
    assert (capped_simplex_map(x, 12_000, link=link).diff() >= 0).all()
