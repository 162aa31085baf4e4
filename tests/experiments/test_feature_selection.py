"""Both designs learn a mask of the right size, and every row is scored on its own pixels."""

import pytest
from tqdm import tqdm

import feature_selection
from common import Table


@pytest.mark.slow
@pytest.mark.parametrize("design", ["conditional_poisson", "pivotal"])
def test_rows(design):
    parser = feature_selection.experiment_parser("")
    parser.set_defaults(k=5, design=design, epochs=1)
    table = Table("", {feature_selection.ACCURACY: ".1f", feature_selection.LOSS: ".3f"})
    run = feature_selection.run_seed(0, parser.parse_args([]), table, tqdm(disable=True))
    sizes = {"learned mask": 5, "random pixels": 5, "mutual information": 5, "all 64 pixels": 64}
    assert {row: int(mask.sum()) for row, mask in run.masks.items()} == sizes and table.scores.keys() == sizes.keys()
    assert run.probabilities.sum(-1).tolist() == pytest.approx([5.0, 5.0])
    assert not run.probabilities[0].equal(run.probabilities[1])
