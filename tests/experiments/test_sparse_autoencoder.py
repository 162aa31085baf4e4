"""It runs with the smallest settings; its masks have the sizes they say and gradients that reach the sizes."""

import pytest
import torch
from torch.testing import assert_close

import sparse_autoencoder as experiment


@pytest.mark.slow
def test_smoke(tmp_path, capsys):
    table = experiment.main(["--smoke", "--out", str(tmp_path)])
    assert len(table.scores) == len(experiment.SWEEP) + 2 * len(experiment.STARTS) + 1
    assert table.values("k = 6", experiment.SIZE).tolist() == [6.0, 6.0]
    assert (tmp_path / "sparse_autoencoder.png").stat().st_size > 3_000
    assert "than the best of the sweep: **" in capsys.readouterr().out


@pytest.mark.parametrize("make", [experiment.Learned, experiment.LearnedPerImage])
def test_learned_sizes_start_where_they_should_and_get_a_gradient(make):
    mask, scores = make(16), torch.zeros(5, experiment.UNITS)
    assert_close(mask.size(scores), torch.full((5,), 16.0))
    values = torch.rand(experiment.UNITS, generator=torch.Generator().manual_seed(0))
    (mask(scores) @ values).sum().backward()
    (parameter,) = mask.parameters()
    assert parameter.grad > 0  # more units, more of the values


def test_masks_are_hard_and_of_their_size():
    scores = torch.randn(5, experiment.UNITS, generator=torch.Generator().manual_seed(0))
    for mask in (experiment.Fixed(3), experiment.Learned(3)):
        assert_close(mask(scores).detach(), experiment.topk_mask(scores, 3))
    drawn = experiment.LearnedPerImage(16)
    size = drawn.size(scores).detach()
    assert ((drawn(scores).detach().sum(-1) - size).abs() < 1).all()
    assert_close(drawn.eval()(scores).sum(-1), size.round())
