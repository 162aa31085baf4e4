"""The experiment runs with the smallest settings; its experts choose in groups, and balance their loads."""

import json

import pytest
import torch
from torch.testing import assert_close

import vit_experts as experiment
from image_data import Labelled
from khot.nn import ExpertChoice


@pytest.fixture
def images():
    return torch.rand(50, 1, 8, 8, generator=torch.Generator().manual_seed(0))


def make(row, images):
    torch.manual_seed(0)
    choice = experiment.ROUTERS[row]() if row in experiment.ROUTERS else None
    return experiment.VisionTransformer(experiment.PATCHES["digits"], images, choice)


@pytest.mark.slow
def test_smoke(tmp_path, capsys):
    table = experiment.main(["--smoke", "--seeds", "1", "--out", str(tmp_path)])
    assert list(table.scores) == list(experiment.ROWS)
    assert (tmp_path / "vit_experts.png").stat().st_size > 3_000
    document = json.loads((tmp_path / "vit_experts.json").read_text())
    assert document["rows"][experiment.HARD][experiment.RUN]["mean"] == pytest.approx(32 * 28 / 400)
    assert "sparse top-k, p = 2, beats hard top-k (Sander et al.)" in capsys.readouterr().out


@pytest.mark.parametrize("row", experiment.ROUTERS)
def test_every_expert_takes_28_of_the_400_tokens_of_a_group_or_every_token_two_and_every_weight_learns(row, images):
    model = make(row, images)
    tokens = model.grouped(model.to_mixture(images))
    assert tokens.shape == (2, 400, experiment.WIDTH)
    if isinstance(model.mixture.choice, ExpertChoice):
        mask = model.mixture.choice.mask(model.mixture.router(tokens))
        assert_close(mask.sum(-2), torch.full((2, experiment.EXPERTS), 28.0))
    else:
        weights = model.mixture.weights(tokens)
        assert ((weights > 0).sum(-1) == 2).all()
        assert_close(weights.sum(-1), torch.ones(2, 400))
    model(images).square().sum().backward()
    assert all(weight.grad.isfinite().all() and weight.grad.any() for weight in model.parameters())


def test_groups_do_not_change_each_other(images):
    model = make(experiment.SPARSE, images)
    assert_close(model(images)[:25], model(images[:25]))


def test_patches_are_squares_in_reading_order(images):
    model = make(experiment.NONE, images)
    with torch.no_grad():
        model.embed.weight.zero_()[:4, :4] = torch.eye(4)
        model.embed.bias.zero_()
        model.places.zero_()
    model.first = model.second = torch.nn.Identity()
    model.perceptron = torch.nn.Linear(experiment.WIDTH, experiment.WIDTH, bias=False)
    torch.nn.init.zeros_(model.perceptron.weight)
    tokens = model.to_mixture(images)
    assert_close(tokens[3, 1, :4], images[3, 0, :2, 2:4].flatten())
    assert_close(tokens[3, 4, :4], images[3, 0, 2:4, :2].flatten())


def test_scores_of_hard_masks_are_those_of_the_hard_router(images):
    data = Labelled(images, torch.arange(50) % 10)
    relaxed, hard = make(experiment.LAPSUM, images), make(experiment.HARD, images)
    of_relaxed, of_hard = experiment.score(relaxed, data), experiment.score(hard, data)
    assert of_relaxed[experiment.HARD_ACCURACY] == of_hard[experiment.ACCURACY] == of_hard[experiment.HARD_ACCURACY]
    assert of_relaxed[experiment.RUN] == 32 and of_relaxed[experiment.DROPPED] == 0
    assert relaxed.mixture.choice.softness is not None and 1 <= of_hard[experiment.LARGEST] <= 32
    assert isinstance(relaxed.mixture.choice, ExpertChoice)
