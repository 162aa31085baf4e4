"""The example runs with the smallest settings; its data and its two forms of masked attention are what they claim."""

import pytest
import torch
from torch.testing import assert_close

import topk_attention as example
from khot import log_sigmoid_topk, sigmoid_topk, topk_mask


@pytest.mark.slow
def test_smoke(tmp_path, capsys):
    table = example.main(["--smoke", "--out", str(tmp_path)])
    assert set(table.scores) == set(example.ATTENTION)
    assert (tmp_path / "topk_attention.png").stat().st_size > 3_000
    assert "SOFT top-k attention beats full attention" in capsys.readouterr().out


def test_wrong_length(capsys):
    with pytest.raises(SystemExit):
        example.main(["--length", "30", "--k", "4"])
    assert "--length must be a multiple of --k" in capsys.readouterr().err


def test_every_key_stands_k_times_and_sums_are_of_its_values():
    keys, values = example.draw_sequences(5, 12, 3)
    assert_close(example.same_key(keys).sum(-1), torch.full((5, 12), 3.0))
    sums = example.group_sums(keys, values)
    assert sums[2, 7] == values[2][keys[2] == keys[2, 7]].sum()


def test_log_mask_added_is_mask_multiplied():
    scores = torch.randn(3, 8, generator=torch.Generator().manual_seed(0))
    added = example.add_log(scores, 2, log_sigmoid_topk)
    assert_close(added, example.multiply(scores, 2, sigmoid_topk))
    assert_close(added.sum(-1), torch.ones(3))


def test_hard_attention_is_a_softmax_over_the_k_largest():
    scores = torch.randn(3, 8, generator=torch.Generator().manual_seed(0))
    masked = scores.masked_fill(topk_mask(scores, 2) == 0, -torch.inf)
    assert_close(example.ATTENTION[example.HARD](scores, 2), masked.softmax(-1))
