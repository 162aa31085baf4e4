"""Float32 masks with a tiny k sum to it, though far out in a tail z is a rounded number that F magnifies."""

import torch

from khot import capped_simplex_map
from khot.kernels import backend
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
    **{f"clipped_power_{q:g}": clipped_power(1 + 1 / q) for q in (1, 3, 3.3, 20)},
}


@for_each("link", LINKS.values())
@for_each("scale", [0.0, 1.0, 30.0])
def test_sums_and_values(link, scale):
    x = normal(64, 50, dtype=torch.float32, scale=scale) + 3.3
    for k in (1e-9, 1e-6, 1e-3, 0.1):
        y = capped_simplex_map(x, k, link=link)
        with backend("torch"):
            exact = capped_simplex_map(x.double(), k, link=link)
        assert ((y.double().sum(-1) - k).abs() <= 1e-6 * k).all()
        assert ((y - exact).abs() <= 1e-5 * k).all()
        rest = capped_simplex_map(x, 50 - k, link=link).double().sum(-1)
        assert ((rest - (50 - k)).abs() <= 1e-6 * 50).all()
