"""The experiment runs; the module trains as torch.topk does, and its threshold keeps k units of images like these."""

import json

import pytest
import torch

import batch_topk as experiment
from khot.nn import BatchTopK
from tests.experiments.saved import read_table


@pytest.mark.slow
def test_runs(tmp_path, capsys):
    tables = experiment.main(["--smoke", "--seeds", "1", "--out", str(tmp_path)])
    assert (tmp_path / "batch_topk.png").stat().st_size > 3_000
    printed = capsys.readouterr().out
    for kind, table in tables.items():
        document = json.loads((tmp_path / f"batch_topk_{kind}.json").read_text())
        assert list(document["rows"]) == [experiment.BY_HAND, experiment.MODULE, experiment.CALIBRATED]
        assert read_table(tmp_path / f"batch_topk_{kind}.json") in printed
        losses = [table.values(row, experiment.LOSS).item() for row in table.scores]
        assert losses == pytest.approx([losses[0]] * 3, rel=1e-5)
        assert all((table.values(row, experiment.ACTIVE) == experiment.K).all() for row in table.scores)


@pytest.fixture
def images():
    """Rows with an intrinsic dimension of six, for training and for tests."""
    generator = torch.Generator().manual_seed(0)
    parts = torch.randn(6, 20, generator=generator)
    return [torch.randn(count, 6, generator=generator) @ parts for count in (4000, 2000)]


def test_trains_as_topk_does_and_keeps_k_units_of_new_images(images):
    train, test = images
    module, fits = BatchTopK(experiment.K), []
    for activation in (experiment.kept_by_hand, module):
        torch.manual_seed(1)
        fits.append(experiment.fit(activation, train, 300, lambda: None))
    by_hand, fitted = fits
    assert fitted.loss == pytest.approx(by_hand.loss, rel=1e-5)
    assert fitted.active == experiment.K
    exact = by_hand.model.exact_threshold(train)
    for threshold in (exact, module.threshold):
        assert experiment.evaluate(fitted, threshold, test)[experiment.OFF] < 3


def test_calibration_moves_the_threshold_alone(images):
    train, other = images[0], 3 * images[1]  # whose activations are about three times as large
    module = BatchTopK(experiment.K)
    torch.manual_seed(1)
    fitted = experiment.fit(module, train, 50, lambda: None)
    before = module.threshold.clone(), fitted.model.encoder.weight.clone()
    calibrated = experiment.calibrate(module, fitted.model, other)
    assert experiment.evaluate(fitted, module.threshold, other)[experiment.OFF] > 10
    assert experiment.evaluate(fitted, calibrated.threshold, other)[experiment.OFF] < 3
    assert torch.equal(module.threshold, before[0]) and torch.equal(fitted.model.encoder.weight, before[1])


def test_moved_images():
    image = torch.zeros(1, 1, 3, 3)
    image[..., 1, 1] = 1
    moved = experiment.moves(image, experiment.MOVED)
    assert moved.shape == (9, 1, 9) and torch.equal(moved[:, 0].sum(0), torch.ones(9))  # once in each place
    assert torch.equal(experiment.moves(image, experiment.FIXED)[0], image.flatten(1))
