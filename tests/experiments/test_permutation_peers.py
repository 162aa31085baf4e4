"""Relaxed permutations of several packages: those that are installed are compared, and read in the same way."""

import importlib.util

import pytest
import torch

import permutation_peers


@pytest.mark.slow
def test_relaxed_permutations_are_compared_with_those_that_are_installed(tmp_path):
    table = permutation_peers.main(["--smoke", "--out", str(tmp_path)])
    installed = {row for row, package in permutation_peers.PACKAGES.items() if importlib.util.find_spec(package)}
    assert permutation_peers.LAPSUM in table.scores and table.scores.keys() == installed
    assert len(table.notes) == (1 if installed == permutation_peers.PACKAGES.keys() else 2)


@pytest.mark.parametrize("row, package", permutation_peers.PACKAGES.items())
def test_relaxed_permutations_have_items_as_rows_and_positions_as_columns(row, package):
    pytest.importorskip(package)
    scores = 50 * torch.tensor([[2.0, 3.0, 0.0, 1.0]])
    permutations = permutation_peers.permute(row, scores, torch.tensor(1.0))
    assert permutations.argmax(-1).tolist() == [[2, 3, 0, 1]]
