"""It runs with the smallest settings; its data and its two forms of masked attention are what they claim."""

import pytest
import torch
from torch.testing import assert_close

import topk_attention as experiment
from khot import log_sigmoid_topk, sigmoid_topk, topk_mask


@pytest.mark.slow
def test_smoke(tmp_path, capsys):
    table = experiment.main(["--smoke", "--out", str(tmp_path)])
    assert set(table.scores) == set(experiment.ATTENTION)
    assert (tmp_path / "topk_attention.png").stat().st_size > 3_000
    assert "SOFT top-k attention beats full attention" in capsys.readouterr().out


def test_wrong_length(capsys):
    with pytest.raises(SystemExit):
        experiment.main(["--length", "30", "--k", "4"])
    assert "--length must be a multiple of --k" in capsys.readouterr().err


def test_every_key_stands_k_times_and_sums_are_of_its_values():
    keys, values = experiment.draw_sequences(5, 12, 3)
    assert_close(experiment.same_key(keys).sum(-1), torch.full((5, 12), 3.0))
    sums = experiment.group_sums(keys, values)
    assert sums[2, 7] == values[2][keys[2] == keys[2, 7]].sum()


def test_log_mask_added_is_mask_multiplied():
    scores = torch.randn(3, 8, generator=torch.Generator().manual_seed(0))
    added = experiment.add_log(scores, 2, log_sigmoid_topk)
    assert_close(added, experiment.multiply(scores, 2, sigmoid_topk))
    assert_close(added.sum(-1), torch.ones(3))


def test_hard_attention_is_a_softmax_over_the_k_largest():
    scores = torch.randn(3, 8, generator=torch.Generator().manual_seed(0))
    masked = scores.masked_fill(topk_mask(scores, 2) == 0, -torch.inf)
    assert_close(experiment.ATTENTION[experiment.HARD](scores, 2), masked.softmax(-1))
