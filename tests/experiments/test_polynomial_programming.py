"""The second order shows."""

import pytest

import polynomial_programming as experiment


@pytest.mark.slow
def test_second_order_converges_where_straight_through_does_not(tmp_path):
    settings = ["--seeds", "2", "--n", "20", "--k", "10", "--problems", "4", "--samples", "64", "--steps", "60"]
    table = experiment.main([*settings, "--out", str(tmp_path)])
    first, second = (table.values(row, experiment.FOUND) for row in (experiment.FIRST, experiment.SECOND))
    assert second.min() > 90 > 70 > first.max()
    assert table.values(experiment.SECOND, experiment.GAP).max() < 20
