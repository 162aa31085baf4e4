"""It runs with the smallest settings; its data and its attention are what they claim."""

import pytest
import torch
from torch.testing import assert_close

import topk_attention as experiment
from khot import lapsum_topk, sigmoid_topk, sorted_transport_topk, sparse_topk, topk_mask


@pytest.mark.slow
def test_smoke(tmp_path, capsys):
    table = experiment.main(["--smoke", "--out", str(tmp_path)])
    assert set(table.scores) == set(experiment.ATTENTION)
    assert (tmp_path / "topk_attention.png").stat().st_size > 3_000
    assert "SOFT top-k attention beats full attention" in capsys.readouterr().out


@pytest.mark.slow
def test_smoke_on_text(multi30k, tmp_path, capsys):
    data = ["--data", "multi30k", "--data-dir", str(multi30k), "--seeds", "1", "--processes", "1"]
    table = experiment.main(["--smoke", *data, "--out", str(tmp_path)])
    assert list(table.scores) == [experiment.FULL, experiment.SOFT, experiment.HARD]
    assert (tmp_path / "topk_attention_en-de.json").is_file()
    assert "beats full attention (Xie et al.)" in capsys.readouterr().out


def test_attention_of_the_translator():
    """All words have the attention of torch's function; padding gets none, also among the k best."""
    query, key, value = torch.randn(3, 2, 5, 8, generator=torch.Generator().manual_seed(0))
    padding = torch.zeros(2, 1, 5)
    padding[:, :, 3:] = -torch.inf
    for row, k in ((experiment.FULL, 4), (experiment.SOFT, 4), (experiment.HARD, 4), (experiment.HARD, 1)):
        found = experiment.text_attention(row, query, key, value, padding, k)
        nearest = torch.nn.functional.one_hot((query @ key.mT + padding).argmax(-1), 5).float() @ value
        all_words = torch.nn.functional.scaled_dot_product_attention(query, key, value, padding.expand(2, 5, 5))
        assert_close(found, nearest if k == 1 else all_words)


def test_wrong_length(capsys):
    with pytest.raises(SystemExit):
        experiment.main(["--length", "30", "--k", "4"])
    assert "--length must be a multiple of --k" in capsys.readouterr().err


def test_every_key_stands_k_times_and_sums_are_of_its_values():
    keys, values = experiment.draw_sequences(5, 12, 3)
    assert_close(experiment.same_key(keys).sum(-1), torch.full((5, 12), 3.0))
    sums = experiment.group_sums(keys, values)
    assert sums[2, 7] == values[2][keys[2] == keys[2, 7]].sum()


@pytest.mark.parametrize("row", experiment.ATTENTION)
def test_attention_is_a_softmax_with_the_log_of_the_mask(row):
    query, key = torch.randn(2, 8, 4, generator=torch.Generator().manual_seed(0)).unbind()
    scores = query @ key.T / 2
    masks = {
        experiment.FULL: torch.ones_like(scores),
        experiment.HARD: topk_mask(scores, 2),
        experiment.SOFT: sigmoid_topk(scores, 2, experiment.SOFTNESS),
        "LapSum top-k": lapsum_topk(scores, 2, experiment.SOFTNESS),
        "sparse top-k, p = 2": sparse_topk(scores, 2, experiment.SOFTNESS),
        "sorted SOFT top-k": sorted_transport_topk(scores, 2, experiment.SOFTNESS).sum(-1),
    }
    found = experiment.ATTENTION[row](query, key, torch.eye(8), 2)
    assert_close(found, (scores + masks[row].log()).softmax(-1))
