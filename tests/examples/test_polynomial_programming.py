"""The second order shows."""

import pytest

import polynomial_programming as example


@pytest.mark.slow
def test_second_order_converges_where_straight_through_does_not(tmp_path):
    settings = ["--seeds", "2", "--n", "20", "--k", "10", "--problems", "4", "--samples", "64", "--steps", "60"]
    table = example.main([*settings, "--out", str(tmp_path)])
    first, second = (table.values(row, example.FOUND) for row in (example.FIRST, example.SECOND))
    assert second.min() > 90 > 70 > first.max()
    assert table.values(example.SECOND, example.GAP).max() < 20
