"""The start of a linear predictor: its derivatives, both forms of its linear systems, and the features it finds."""

import numpy as np
import pytest
import torch

from khot.sklearn import KHotSelector
from khot.sklearn.data import prepared
from khot.sklearn.start import Systems, least_squares_start


def data_of(rows, n, seed=0):
    generator = np.random.default_rng(seed)
    X = generator.standard_normal((rows, n))
    y = X[:, :2] @ np.ones(2) + 0.1 * generator.standard_normal(rows)
    return prepared(X, y, generator.uniform(0.5, 2, rows), "auto")


def test_weights_are_the_best_behind_random_gates():
    """By enumeration of all gates: the weights are stationary, and the probabilities have the right gradient."""
    data = data_of(30, 4)
    x, y, rows = data.x.double(), data.y.double(), data.weights.double() / data.weights.double().sum()
    masks = torch.cartesian_prod(*[torch.tensor([0.0, 1.0], dtype=torch.float64)] * 4)
    probs = torch.tensor([0.2, 0.5, 0.6, 0.9], dtype=torch.float64, requires_grad=True)
    weights = Systems(data).weights(probs.detach()).requires_grad_()
    chances = torch.where(masks > 0, probs, 1 - probs).prod(-1)
    errors = ((x * masks[:, None]) @ weights - y).square()[..., 0]
    slopes = torch.autograd.grad(chances @ (errors @ rows), (weights, probs))
    torch.testing.assert_close(slopes[0], torch.zeros(4, 1, dtype=torch.float64), atol=1e-6, rtol=0)
    torch.testing.assert_close(slopes[1], -weights.detach().square()[:, 0], atol=1e-6, rtol=1e-5)


def test_systems_by_rows_and_by_features_agree():
    systems = Systems(data_of(20, 30))
    assert systems.by_rows
    probs = torch.linspace(0.01, 0.99, 30, dtype=torch.float64)
    by_rows = systems.weights(probs)
    systems.correlations = systems.x.T @ systems.x
    torch.testing.assert_close(by_rows, systems.weights(probs))


@pytest.mark.parametrize("k", [2, None])
def test_of_more_features_than_a_system_takes_some_rows_do(k):
    data = data_of(1000, 600)
    assert len(Systems(data).x) == 500
    logits, weights = least_squares_start(data, k, price=0.01)
    assert logits.topk(2).indices.sort().values.tolist() == [0, 1] and weights.shape == (1, 600)


def test_nothing_to_learn():
    data = prepared(np.zeros((5, 3)), np.arange(5.0), np.ones(5), "auto")
    assert not least_squares_start(data, 1, price=0.01)[0].any()


@pytest.mark.parametrize("wanted", [5, "learned"])
def test_finds_features_among_others_that_are_correlated_with_them(wanted):
    """Neighbours have correlation 0.9, and the signs of coefficients alternate."""
    generator = np.random.default_rng(1)
    X = generator.standard_normal((200, 100))
    for i in range(1, 100):
        X[:, i] = 0.9 * X[:, i - 1] + np.sqrt(1 - 0.9**2) * X[:, i]
    chosen = np.arange(10, 100, 20)
    y = X[:, chosen] @ np.array([1.0, -1, 1, -1, 1]) + generator.standard_normal(200)
    selector = KHotSelector(wanted, random_state=0).fit(X, y)
    assert selector.get_support(indices=True).tolist() == chosen.tolist()
    assert selector.n_iter_ <= 250
