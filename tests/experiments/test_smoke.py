"""Every experiment runs from end to end with the smallest settings, and its parts do what its text says."""

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.nn.functional import cross_entropy

import knn
import knn_as_published
import permutation
import pruning
import topk_loss
from image_data import Labelled, Split
from runs import Run
from tests.experiments.saved import read_table

EXPERIMENTS = Path(__file__).parents[2] / "experiments"
PERCENT = (  # scores in [0, 100]
    "custom_loop",
    "feature_selection",
    "indexer",
    "knn",
    "knn_as_published",
    "permutation",
    "pruning",
    "recommender",
    "topk_loss",
)
NAMES = (*PERCENT, "horvitz_thompson", "polynomial_programming")
LONG = ("indexer", "knn", "permutation", "pruning", "recommender")  # of which one seed is enough


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_runs(name, tmp_path, capsys):
    seeds = ["--seeds", "1"] if name in LONG else []
    table = importlib.import_module(name).main(["--smoke", *seeds, "--out", str(tmp_path)])
    assert (tmp_path / f"{name}.png").stat().st_size > 3_000
    document = json.loads((tmp_path / f"{name}.json").read_text())
    assert document["rows"].keys() == table.scores.keys() and document["findings"]
    assert name not in PERCENT or all(
        0 <= score <= 100 for row in table.scores.values() for scores in row for score in scores.values()
    )
    assert read_table(tmp_path / f"{name}.json") in capsys.readouterr().out


@pytest.mark.slow
def test_scripts_find_what_lies_beside_them():
    subprocess.run([sys.executable, str(EXPERIMENTS / "knn.py"), "--help"], capture_output=True, check=True)


@pytest.mark.parametrize("relaxation", knn.MAPS.values(), ids=knn.MAPS)
def test_neighbours_of_the_same_label_cost_nothing(relaxation):
    labels = torch.arange(knn.QUERIES + knn.CANDIDATES) % knn.CLASSES
    apart = 10 * torch.eye(knn.CLASSES)
    assert knn.neighbour_loss(apart[labels], labels, 9, relaxation) < 1e-3
    others = torch.cat([(labels[: knn.QUERIES] + 1) % knn.CLASSES, labels[knn.QUERIES :]])
    assert knn.neighbour_loss(apart[labels], others, 9, relaxation) > 1


@pytest.mark.parametrize("loss", permutation.ROWS.values(), ids=permutation.ROWS)
def test_losses_of_sorting_are_least_for_the_true_order(loss):
    scores, scorer = 5 * torch.tensor([[2.0, 0.0, 3.0, 1.0]]), permutation.Scorer(permutation.windows(8, 8))
    right, reverse = scores.argsort(-1), scores.argsort(-1, descending=True)
    assert loss(scorer, scores, right) < 0.1 < 1 < loss(scorer, scores, reverse)


@pytest.mark.parametrize("row", knn_as_published.MASKS)
def test_the_linear_loss_counts_true_labels(row):
    if row == knn_as_published.NEURAL:
        pytest.importorskip("difftopk")
    labels = torch.arange(200) % 10
    apart = 100 * torch.eye(10)
    assert knn_as_published.linear_loss(apart[labels], labels, 9, row).item() == pytest.approx(-9, abs=0.1)
    others = torch.cat([(labels[:100] + 1) % 10, labels[100:]])
    assert knn_as_published.linear_loss(apart[labels], others, 9, row).item() == pytest.approx(0, abs=0.1)


def test_evaluation_of_sorting():
    numbers = torch.tensor([[30, 10, 20], [1, 3, 2]])
    scores = torch.tensor([[3.0, 1.0, 2.0], [3.0, 1.0, 2.0]])  # all right; right at the end alone
    test = permutation.Sequences(torch.zeros(2, 3, 1, 8, 32), numbers)
    assert permutation.evaluate(lambda images: scores, test) == (50.0, pytest.approx(100 * 4 / 6))


@pytest.mark.parametrize("method", pruning.methods_of((0.3, 0.1)).values(), ids=pruning.ROWS)
def test_networks_are_tested_with_exactly_k_weights(method):
    data = Labelled(torch.rand(128, 1, 8, 8), torch.arange(128) % 10)
    _, parameters, _ = pruning.train(Run("a", 0, {}), Split(data, data, data), method, 0.95, pruning.DIGITS, 4)
    for weights in parameters.values():
        if weights.dim() == 2:
            assert int((weights != 0).sum()) == round(0.05 * weights.numel())


def test_straight_through_gives_all_weights_a_gradient():
    weights = torch.tensor([3.0, -1.0, 2.0], requires_grad=True)
    for prune, gradient in ((pruning.hard, [1.0, 0.0, 1.0]), (pruning.straight_through, [1.0, 1.0, 1.0])):
        pruned = prune(weights, 2 / 3)
        assert pruned.tolist() == [3.0, 0.0, 2.0]
        assert torch.autograd.grad(pruned.sum(), weights)[0].tolist() == gradient


@pytest.mark.parametrize("loss", topk_loss.LOSSES.values(), ids=topk_loss.LOSSES)
def test_top_k_losses_prefer_the_label(loss):
    labels = torch.tensor([7, 42])
    scores = torch.zeros(2, topk_loss.CLASSES, requires_grad=True)
    gradient = torch.autograd.grad(loss(scores, labels), scores)[0]
    assert gradient.argmin(-1).tolist() == labels.tolist() and bool((gradient.amin(-1) < 0).all())


@pytest.mark.slow
def test_fine_tuning_runs(tmp_path):
    table = topk_loss.main(["--smoke", "--pretrain", "--out", str(tmp_path)])
    assert list(table.scores) == [topk_loss.BEFORE, *topk_loss.FINE_TUNED]
    assert (tmp_path / "topk_loss_pretrain.png").stat().st_size > 3_000
    assert json.loads((tmp_path / "topk_loss_pretrain.json").read_text())["findings"]


@pytest.mark.parametrize("data", ["digits", "mnist"])
@pytest.mark.parametrize("row", topk_loss.FINE_TUNED)
def test_losses_of_fine_tuning_prefer_the_label(row, data):
    labels, scores = torch.tensor([7, 42]), torch.zeros(2, topk_loss.CLASSES, requires_grad=True)
    tuning = topk_loss.FINE_TUNED[row]
    loss = tuning.loss(scores, labels, strength=getattr(tuning, data).strength)
    gradient = torch.autograd.grad(loss, scores)[0]
    assert gradient.argmin(-1).tolist() == labels.tolist() and bool((gradient.amin(-1) < 0).all())


def test_fine_tuning_starts_from_the_network_and_leaves_it():
    network = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(4, topk_loss.CLASSES))
    before = [weight.clone() for weight in network.parameters()]
    data = Labelled(torch.rand(64, 1, 2, 2), torch.arange(64))
    same = topk_loss.fine_tune(network, data, cross_entropy, 0.1, 0)
    tuned = topk_loss.fine_tune(network, data, cross_entropy, 0.1, 3)
    assert all(map(torch.equal, network.parameters(), before)) and all(map(torch.equal, same.parameters(), before))
    assert not any(map(torch.equal, tuned.parameters(), before))


def test_learning_rate_rises_and_falls():
    factors = [topk_loss.warm_cosine(step, 100) for step in range(101)]
    assert factors[0] == 0.1 and factors[9] == factors[10] == 1 and factors[55] == pytest.approx(0.5)
    assert factors[100] == pytest.approx(0) and factors == sorted(factors[:10]) + sorted(factors[10:], reverse=True)


def test_ranks_of_labels():
    scores = torch.tensor([[0.1, 0.9, 0.5], [0.3, 0.2, 0.1]])
    assert topk_loss.within(scores, torch.tensor([2, 0]), (1, 2)) == {"top 1, %": 50.0, "top 2, %": 100.0}


def test_sparsity_rises_with_the_steps_of_all_epochs(monkeypatch):
    data = Labelled(torch.rand(256, 1, 8, 8), torch.arange(256) % 10)
    kept = []

    def note(weights, density):
        kept.append(density)
        return pruning.hard(weights, density)

    pruning.train(Run("a", 0, {}), Split(data, data, data), pruning.Method(note, ramp=0.5), 0.9, pruning.DIGITS, 4)
    first_matrix = kept[::3]  # of three; each epoch prunes twice in training and, at the end, once in validation
    assert first_matrix[:-1] == pytest.approx([1, 0.4797, 0.1, 0.2125, 0.1141, 0.1] + [0.1] * 6, abs=1e-3)


def test_rows_with_several_trainings_are_put_together():
    results = {name: [{"accuracy": 100 * sparsity}] for name, (_, sparsity) in pruning.trainings("digits").items()}
    table = pruning.Table("Toy", {"a": ".1f", "b": ".1f"})
    pruning.fill(table, results, (0.9, 0.98))
    assert table.scores[pruning.DENSE] == [{"a": 0, "b": 0}] and table.scores[pruning.HARD] == [{"a": 90, "b": 98}]
    assert list(table.scores) == [pruning.DENSE, *pruning.ROWS]
