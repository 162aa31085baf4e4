"""How Triton's kernels go through rows: the tables beside them."""

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

from khot.kernels.count import FOREST_LEVELS
from khot.kernels.count.triton_forest import forest_plan
from khot.kernels.transport.triton_tile import transport_plan


def test_transport_plans():
    """Powers of 2, an item for each thread."""
    for n, k in ((2, 1), (5, 5), (64, 3), (300, 15), (10**5, 7)):
        plan = transport_plan(n, k)
        assert plan.places == min(k + 1, n) <= plan.block_places and plan.block == 32 * plan.warps
        assert plan.block_places & (plan.block_places - 1) == 0


def test_forest_plans_cover_every_tree():
    for units in (2, 32, 33, 256, 257, 2**FOREST_LEVELS):
        plan = forest_plan(units)
        assert plan.block % plan.rows == 0 and plan.block & (plan.block - 1) == 0 and plan.programs > 0
