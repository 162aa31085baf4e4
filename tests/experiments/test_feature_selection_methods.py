"""Both comparisons run from end to end; every method draws k-hot masks with a gradient; NCPSS's sampler samples."""

import json
from argparse import Namespace

import pyro
import pytest
import torch

import feature_selection_methods as methods
import learned_k
from image_data import Labelled, Split
from runs import Run
from tests.experiments.saved import read_table
from tests.experiments.test_image_data import write_mnist


@pytest.mark.slow
@pytest.mark.parametrize("experiment", [methods, learned_k], ids=lambda module: module.__name__)
def test_runs(experiment, tmp_path, capsys):
    table = experiment.main(["--smoke", "--out", str(tmp_path)])
    name = experiment.__name__
    assert (tmp_path / f"{name}.png").stat().st_size > 3_000
    document = json.loads((tmp_path / f"{name}.json").read_text())
    assert document["rows"].keys() == table.scores.keys() and document["findings"]
    assert all(0 <= scores[methods.ACCURACY] <= 100 for row in table.scores.values() for scores in row)
    assert read_table(tmp_path / f"{name}.json") in capsys.readouterr().out


@pytest.mark.parametrize("row", methods.METHODS)
def test_masks_are_k_hot_and_carry_a_gradient(row):
    pyro.set_rng_seed(0)
    logits = torch.linspace(-1, 1, 7).requires_grad_()
    masks = methods.METHODS[row](logits, 3, 50, 0.5)
    assert masks.shape == (50, 7) and masks.detach().round().sum(-1).eq(3).all()
    assert (masks - masks.round()).abs().max() < 1e-6
    gradient = torch.autograd.grad(masks[..., -1].mean(), logits)[0]
    assert gradient.isfinite().all() and gradient[-1] > 0 > gradient[:-1].sum()


@pytest.mark.parametrize("k", [0, 1, 4, 8])
def test_iterated_poisson_has_k_ones_and_keeps_exact_probabilities(k):
    pyro.set_rng_seed(0)
    probs = torch.full((1000, 8), k / 8)
    value = methods.iterated_poisson(probs, k)
    assert value.sum(-1).eq(k).all() and ((value == 0) | (value == 1)).all()
    if k == 4:
        assert value.mean(0).sub(0.5).abs().max() < 5 * (0.25 / 1000) ** 0.5  # by symmetry; false alarm below 1e-5
        certain = torch.tensor([1.0, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0])
        assert methods.iterated_poisson(certain.expand(10, 8), 4).equal(certain.expand(10, 8))


def test_the_informative_pixels_are_found_and_priced():
    pyro.set_rng_seed(0)
    images = torch.randn(2560, 6)
    data = Labelled(images, (images[:, 2] > 0).long() + 2 * (images[:, 4] > 0).long())

    def mask(logits, draws):
        return methods.METHODS[methods.FIRST](logits, 2, draws, 1.0)

    args = Namespace(data="digits", epochs=8, patience=8)
    run = Run(methods.FIRST, 0, {})
    selection, fitted = methods.train(run, args, Split(data, data, data), torch.zeros(6), mask)
    assert selection.logits.topk(2).indices.sort().values.tolist() == [2, 4]
    assert fitted.losses[-1] < fitted.losses[0]
    scores = learned_k.scores(selection, 2, 0.5, data)
    assert scores[methods.ACCURACY] > 90
    expected = methods.largest_scores(selection, 2, data)[methods.LARGEST] + 1
    assert scores[learned_k.OBJECTIVE] == pytest.approx(expected)
    assert abs(methods.sampled_score(selection, mask, data) - fitted.losses[fitted.best]) < 0.05


def test_best_of_the_sweep():
    objectives = {"fixed, 3": (1.0, 4.0), "fixed, 6": (2.0, 2.0), "learned, from 3": (0.0, 0.0)}
    results = {row: [{"validation": value} for value in values] for row, values in objectives.items()}
    assert learned_k.best_fixed(results) == "fixed, 6"


def test_mnist_has_the_settings_of_the_paper_and_a_smoke_test_few_images(tmp_path, capsys):
    write_mnist(tmp_path, 1000, sides=(28, 28))
    words = "--data", "mnist", "--data-dir", str(tmp_path), "--smoke", "--seeds", "1", "--out", str(tmp_path)
    table = methods.main(list(words))
    assert table.paper and "with 50 pixels" in table.title
    assert len(methods.Selection(torch.zeros(784), methods.settings_of("mnist").hidden).classifier) == 5
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(",")[0] for line in lines if " epoch 1, " in line] == ["seed 0"] * len(methods.METHODS)
