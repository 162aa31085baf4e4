"""Sample weights, several outputs, and features to reconstruct."""

import itertools

import numpy as np
import pytest
import torch

from khot.sklearn import KHotSelector
from khot.sklearn.data import prepared

ROWS, FEATURES = 60, 8
X = np.random.default_rng(0).standard_normal((ROWS, FEATURES))
NOISE = np.random.default_rng(1).standard_normal((ROWS, 2))
VALUES = X[:, 1] - X[:, 5] + NOISE[:, 0]
WEIGHTS = np.random.default_rng(2).integers(0, 4, ROWS)
TARGETS = {
    "values": VALUES,
    "classes": np.where(VALUES > 0, "yes", "no"),
    "several values": X[:, [1, 5]] + NOISE,
    "several classes": (X[:, [1, 5]] + NOISE > 0).astype(int),
    "no y": None,
}


def rows(y, chosen):
    return None if y is None else y[chosen]


@pytest.mark.parametrize("i, y", list(enumerate(TARGETS.values())), ids=TARGETS)
def test_weights_count_rows_as_copies_do(i, y):
    settings = {"early_stopping": True, "validation_fraction": 0.3} if i % 3 else {}
    selector = KHotSelector((2, "learned")[i % 2], max_iter=20, random_state=0, **settings)
    weighted = selector.fit(X, y, sample_weight=WEIGHTS).inclusion_probabilities_
    copies = np.random.default_rng(3).permutation(np.repeat(np.arange(ROWS), WEIGHTS))
    repeated = selector.fit(X[copies], rows(y, copies)).inclusion_probabilities_
    assert (weighted == repeated).all()
    unweighted = selector.fit(X, y).inclusion_probabilities_
    assert (weighted != unweighted).any()


def test_only_the_ratio_of_weights_matters():
    selector = KHotSelector(2, max_iter=30, random_state=0)
    fitted = [selector.fit(X, VALUES, sample_weight=factor * WEIGHTS).inclusion_probabilities_ for factor in (1, 0.25)]
    np.testing.assert_allclose(*fitted, rtol=1e-6)


@pytest.mark.parametrize("y", [TARGETS["values"], TARGETS["no y"]], ids=["values", "no y"])
def test_units_of_features_targets_and_weights_do_not_matter(y):
    """Powers of two change no digit, while squares of columns and sums of weights leave the range of float64."""
    selector = KHotSelector(2, max_iter=10, random_state=0)
    expected = selector.fit(X, y, sample_weight=WEIGHTS).inclusion_probabilities_
    for units, which in itertools.product(np.ldexp(1.0, [-990, 530, 1000]), range(3 if y is not None else 2)):
        given = [X, WEIGHTS, y]
        given[which] = given[which] * units
        found = selector.fit(given[0], given[2], sample_weight=given[1]).inclusion_probabilities_
        np.testing.assert_allclose(found, expected, rtol=0, atol=0)


def test_many_integers_are_perhaps_values():
    with pytest.warns(UserWarning, match="`y` has 60 different integers.*task='regression'") as record:
        KHotSelector(2, max_iter=2).fit(X, np.arange(ROWS))
    assert record[0].filename == __file__
    for y, task in (
        (np.arange(ROWS), "classification"),
        (np.arange(ROWS), "regression"),
        (np.arange(ROWS) % 50, "auto"),
    ):
        KHotSelector(2, max_iter=2, task=task).fit(X, y)


def test_weights_choose_what_is_learned():
    """Half of the rows are about one feature, half about another."""
    y = np.where(np.arange(ROWS) < ROWS // 2, X[:, 2], X[:, 6])
    for first, feature in ((1, 2), (0, 6)):
        weights = np.where(np.arange(ROWS) < ROWS // 2, first, 1 - first)
        selector = KHotSelector(1, random_state=0).fit(X, y, sample_weight=weights)
        assert selector.get_support(indices=True).tolist() == [feature]


def test_the_loss_is_a_mean_over_rows_with_their_weights():
    data = prepared(X, TARGETS["several classes"], WEIGHTS.astype(float), "auto")
    assert data.classes == (2, 2) and data.outputs == 4 and len(data) == (WEIGHTS > 0).sum()
    scores = torch.randn(len(data), 4, generator=torch.Generator().manual_seed(0))
    losses = [-scores[:, 2 * j : 2 * j + 2].log_softmax(-1).gather(1, data.y[:, [j]]) for j in range(2)]
    expected = ((losses[0] + losses[1])[:, 0] / 2 * data.weights).sum() / data.weights.sum()
    torch.testing.assert_close(data.loss(scores), expected)
    torch.testing.assert_close((data.x * data.weights[:, None]).mean(0), torch.zeros(FEATURES), atol=1e-6, rtol=0)
    codes = data.codes() * data.weights[:, None].sqrt()
    torch.testing.assert_close(codes.square().mean(0), torch.ones(4, dtype=torch.float64), atol=1e-6, rtol=0)


@pytest.mark.parametrize("y", [TARGETS["several values"], TARGETS["several classes"]], ids=["values", "classes"])
def test_several_outputs(y):
    selector = KHotSelector(2, random_state=0).fit(X, y)
    assert selector.get_support(indices=True).tolist() == [1, 5]
    assert selector.predictor_(torch.zeros(1, FEATURES)).shape == (1, 2 if y.dtype == float else 4)


def test_parts_that_are_held_out_have_weights_of_their_own():
    """Nearly all of the weight is held out or nearly none, whichever of the parts has the first row."""
    weights = np.where(np.arange(ROWS) == 0, 1000.0, 1.0)
    for part in prepared(X, TARGETS["classes"], weights, "auto").split(0.3, seed=0):
        assert part.weights.mean() == pytest.approx(1) and part.codes().isfinite().all()
        np.testing.assert_allclose((part.codes() * part.weights[:, None]).mean(0), 0, atol=1e-6)


def test_an_output_of_one_class_among_others():
    y = np.stack([TARGETS["classes"] == "yes", np.zeros(ROWS, dtype=bool)], -1)
    assert KHotSelector(2, max_iter=10).fit(X, y).predictor_(torch.zeros(1, FEATURES)).shape == (1, 3)


@pytest.mark.parametrize(("wanted", "price"), [(4, None), ("learned", 0.1)])
def test_without_y_features_are_selected_that_tell_the_others(wanted, price):
    """Four groups of three noisy copies each; the second of a group is nearest to the other two."""
    generator = np.random.default_rng(0)
    sources = generator.standard_normal((200, 4))
    features = np.repeat(sources, 3, -1)
    features[:, [i for i in range(12) if i % 3 != 1]] += 0.3 * generator.standard_normal((200, 8))
    selector = KHotSelector(wanted, price=price, random_state=0).fit(features)
    assert selector.get_support(indices=True).tolist() == [1, 4, 7, 10]
    assert selector.predictor_(torch.zeros(1, 12)).shape == (1, 12)


@pytest.mark.parametrize(
    ("y", "weights", "task", "message"),
    [
        (VALUES, -WEIGHTS, "auto", "`sample_weight` must not be negative, but got -3"),
        (VALUES, np.arange(ROWS) == 7, "auto", "two or more rows must have a positive `sample_weight`, but got 1"),
        (TARGETS["classes"], TARGETS["classes"] == "no", "auto", "two or more classes, but got one class, 'no'"),
        (None, None, "classification", "`task` is 'classification', which needs `y`"),
    ],
)
def test_bad_data(y, weights, task, message):
    with pytest.raises(ValueError, match=message):
        KHotSelector(2, task=task).fit(X, y, sample_weight=weights)
