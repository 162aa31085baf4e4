"""NMSparsity at work: a network for digits whose weights are 2:4, beside what magnitude leaves of a trained one."""

import pytest
import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch.nn.functional import cross_entropy
from torch.nn.utils import parametrize

from khot.nn import NMSparsity

STEPS, BATCH = 400, 128


def digits(seed):
    x, y = load_digits(return_X_y=True)
    split = train_test_split(x / 16 - 0.5, y, test_size=0.5, stratify=y, random_state=seed)
    return [torch.tensor(part, dtype=torch.float32 if part.ndim == 2 else torch.long) for part in split]


def network(sparsity=None):
    """A narrow network, so that the missing half of the weights matters."""
    model = torch.nn.Sequential(torch.nn.Linear(64, 16), torch.nn.ReLU(), torch.nn.Linear(16, 10))
    for layer in model[::2] if sparsity else ():
        parametrize.register_parametrization(layer, "weight", sparsity())
    return model


def train(model, x, y, steps=STEPS):
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    for _ in range(steps):
        rows = torch.randint(len(x), (BATCH,))
        optimizer.zero_grad()
        cross_entropy(model(x[rows]), y[rows]).backward()
        optimizer.step()
    return model.eval()


def pruned(model):
    """Keeps the two largest of every four weights, without further training."""
    for layer in model[::2]:
        parametrize.register_parametrization(layer, "weight", NMSparsity())
    return model


def accuracies(seed):
    """Test accuracy in percent: of the dense network, of its largest weights alone, and of networks trained as 2:4."""
    x, test_x, y, test_y = digits(seed)
    found = {}

    def score(name, model):
        weight = model[0].weight.view(-1, 4)
        assert name == "dense" or ((weight != 0).sum(-1) == 2).all()
        found[name] = 100 * (model(test_x).argmax(-1) == test_y).float().mean().item()

    for name, sparsity in {
        "dense": None,
        "hard": NMSparsity,
        "straight-through": lambda: NMSparsity(softness=0.1, straight_through=True),
    }.items():
        torch.manual_seed(seed)
        model = train(network(sparsity), x, y)
        score(name, model)
        if name == "dense":
            score("magnitude", pruned(model))
            score("magnitude, trained on", train(model.train(), x, y, STEPS // 4))
    return found


@pytest.mark.slow
def test_trained_as_two_of_four_beats_pruned_by_magnitude():
    runs = [accuracies(seed) for seed in range(2)]
    mean = {name: sum(run[name] for run in runs) / len(runs) for name in runs[0]}
    assert mean["straight-through"] > mean["magnitude"] + 2 and mean["hard"] > mean["magnitude"] + 2
    assert mean["straight-through"] > mean["dense"] - 3
