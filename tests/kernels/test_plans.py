"""How Triton's kernels go through rows: the tables beside them."""

from tests.backends import skip_without_triton

skip_without_triton()

from khot.kernels.count import FOREST_LEVELS
from khot.kernels.count.triton_forest import forest_plan
from khot.kernels.transport.triton_tile import transport_plan


def test_transport_plans():
    """Powers of 2, an item for each thread."""
    for n, k in ((2, 1), (5, 5), (64, 3), (300, 15), (10**5, 7)):
        for rows in (1, 10**4):
            plan = transport_plan(rows, n, k)
            assert plan.places == min(k + 1, n) <= plan.block_places and plan.block == 32 * plan.warps
            assert plan.block_places & (plan.block_places - 1) == 0


def test_forest_plans_cover_every_tree():
    for units in (2, 32, 33, 256, 257, 2**FOREST_LEVELS):
        for trees in (1, 10**4):
            plan = forest_plan(units, trees)
            assert plan.block % plan.rows == 0 and plan.block & (plan.block - 1) == 0 and plan.programs > 0
