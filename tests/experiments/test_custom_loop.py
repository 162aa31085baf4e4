"""The experiment learns to cover more than a random choice does; what it compares with is right."""

import pytest
import torch

import custom_loop


@pytest.mark.slow
def test_learns(tmp_path):
    arguments = ["--seeds", "1", "--steps", "100", "--out", str(tmp_path)]
    table = custom_loop.main(arguments)
    learned, greedy, random = (float(table.values(row, custom_loop.COVERED)[0]) for row in table.scores)
    assert learned > 0.95 * greedy > 1.1 * random


def test_greedy_takes_what_covers_most_of_the_rest():
    reach = torch.zeros(custom_loop.SITES, custom_loop.CUSTOMERS)
    reach[3, :500], reach[7, 100:550], reach[9, 900:990] = 1, 1, 1
    chosen = custom_loop.greedy(reach, 2)
    assert chosen.nonzero().flatten().tolist() == [3, 9]  # of site 7, all but 50 customers have a station
    assert custom_loop.covered(chosen, reach).item() == pytest.approx(0.59)
