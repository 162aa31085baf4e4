"""Few rows of what users do are left to the exact path by the loops of a CPU."""

import itertools

import pytest
import torch

from khot.kernels.links.base import Link
from khot.kernels.links.capped_exponential import CAPPED_EXPONENTIAL
from khot.kernels.links.clipped_power import clipped_power
from khot.kernels.links.laplace import LAPLACE
from khot.kernels.links.logistic import LOGISTIC
from khot.kernels.operators.platforms import HAS_NUMBA
from tests.inputs import normal

pytestmark = pytest.mark.skipif(not HAS_NUMBA, reason="numba is not installed")

ROWS, LARGEST_SHARE = 100, 0.01
POWERS = {f"p={p:.2f}": clipped_power(p) for p in (2.0, 1.7, 4 / 3, 1.1)}
LINKS: dict[str, Link] = {
    "logistic": LOGISTIC, "laplace": LAPLACE, "capped exponential": CAPPED_EXPONENTIAL, **POWERS,
}  # fmt: skip
SMOOTH = ("logistic", "laplace")
CASES = [(name, "mask") for name in LINKS] + [(name, "log_mask") for name in SMOOTH]
CASES += [(name, kind) for name in POWERS for kind in ("signed", "magnitude")]
REGIMES = {
    "plain": lambda z: z,
    "finite masks": lambda z: z.masked_fill(normal(*z.shape, seed=1) > 0.43, -1e9),
    "heavy tails": lambda z: 10 * z**3,
    "ties": lambda z: z.round(),
    "zeros": lambda z: 0 * z,
    "half zeros": lambda z: z.relu(),
    "two clusters": lambda z: z + 50 * (normal(*z.shape, seed=1) > 1),
    "far from 0": lambda z: z + 1000,
}


# Steep powers of magnitudes as large as 1e9 have no digits left in single precision.
EXCEPT = ("p=1.10", "magnitude", "finite masks")


@pytest.mark.slow  # which compiles each loop
@pytest.mark.parametrize("regime", REGIMES)
def test_few_rows_leave_the_loop(regime, monkeypatch):
    from khot.kernels.threshold import exact, numba_backend

    left = {"mask": 0, "mask_derivative": 0}

    def count(operation):
        usual = getattr(exact, operation)

        def counted(x, *args):
            left[operation] += x.shape[0]
            return usual(x, *args)

        monkeypatch.setattr(exact, operation, counted)

    for operation in left:
        count(operation)
    cases = [(LINKS[name].key, kind) for name, kind in CASES if (name, kind, regime) != EXCEPT]
    for (key, kind), n in itertools.product(cases, (10, 300)):
        x = REGIMES[regime](normal(ROWS, n, dtype=torch.float32))
        grad = torch.randn_like(x)
        for k, softness in itertools.product({1, n // 10, n // 2, n - 1}, (1e-3, 1e-2, 0.1, 1.0, 10.0, 1e3)):
            left.update(dict.fromkeys(left, 0))
            size, scale = (torch.full((ROWS,), v, dtype=torch.float64) for v in (k, softness))
            _, *at = numba_backend.mask(x, size, scale, *key, kind, "softness", True, True)
            for cotangents in (grad, torch.ones_like(size)) if kind == "mask" else (grad,):
                left["mask_derivative"] = 0
                numba_backend.mask_derivative(x, scale, *at, cotangents, *key, kind, True)
                assert max(left.values()) <= LARGEST_SHARE * ROWS, (key, kind, n, k, softness, left)
