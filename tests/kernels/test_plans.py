"""How Triton's kernels go through rows: the tables beside them."""

from tests.backends import skip_without_triton

skip_without_triton()

from khot.kernels.count import FOREST_LEVELS
from khot.kernels.count.triton_forest import forest_plan


def test_forest_plans_cover_every_tree():
    for units in (2, 32, 33, 256, 257, 2**FOREST_LEVELS):
        for trees in (1, 10**4):
            plan = forest_plan(units, trees)
            assert plan.block % plan.rows == 0 and plan.block & (plan.block - 1) == 0 and plan.programs > 0
