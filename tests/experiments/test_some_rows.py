"""Experiments take any of their rows, whether or not these make a row of the table."""

import importlib

import pytest

from tests.experiments.saved import read_table

ROWS = [
    ("feature_selection_methods", ["SIMPLE"]),
    ("permutation", ["soft permutation, learned scale, n = 7"]),
    ("pruning", ["dense"]),
    ("pruning", ["hard, 98 % pruned", "hard, 90 % pruned"]),
    ("simple_slopes", ["Gumbel draws, 0.001"]),
]


@pytest.mark.slow
@pytest.mark.parametrize("name, rows", ROWS, ids=lambda value: value if isinstance(value, str) else "+".join(value))
def test_runs(name, rows, tmp_path):
    arguments = ["--smoke", "--seeds", "1", "--processes", "1", "--out", str(tmp_path), "--rows", *rows]
    importlib.import_module(name).main(arguments)
    text = read_table(tmp_path / f"{name}.json")
    is_complete = name in ("feature_selection_methods", "simple_slopes") or rows == ["dense"] or len(rows) > 1
    assert is_complete != ("No row is complete." in text)
