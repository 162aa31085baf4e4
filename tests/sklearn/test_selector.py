"""KHotSelector: scikit-learn's own checks, planted features found, and what it is to Pipeline and GridSearchCV."""

import subprocess
import sys
import textwrap

import numpy as np
import pytest
import torch
from sklearn.base import clone
from sklearn.datasets import load_breast_cancer, make_classification
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import parametrize_with_checks

import khot
from khot.sklearn import KHotSelector

ROWS, FEATURES, PLANTED = 200, 50, 5


def planted(seed):
    """Independent normal features, of which five have coefficients of 1 or -1, and unit noise."""
    generator = np.random.default_rng(seed)
    X = generator.standard_normal((ROWS, FEATURES))
    support = np.zeros(FEATURES, dtype=bool)
    support[generator.choice(FEATURES, PLANTED, replace=False)] = True
    signs = generator.choice([-1.0, 1.0], FEATURES)
    return X, X @ (signs * support) + generator.standard_normal(ROWS), support


# Their data have one to three features, all of which the default selector keeps, and says so.
@pytest.mark.filterwarnings("ignore:`n_features_to_select`=10 is more than the number of features:UserWarning")
@parametrize_with_checks([KHotSelector()])
def test_checks_of_scikit_learn(estimator, check):
    check(estimator)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`n_features_to_select`=2 is more than the number of features:UserWarning")
@pytest.mark.filterwarnings("ignore:No features were selected:UserWarning")
@parametrize_with_checks([KHotSelector(2), KHotSelector("learned"), KHotSelector(0.5, early_stopping=True)])
def test_checks_of_scikit_learn_where_features_are_left_out(estimator, check):
    check(estimator)


def found(seed, **settings):
    X, y, support = planted(seed)
    selector = KHotSelector(PLANTED, random_state=seed, **settings).fit(X, y)
    return bool((selector.support_ == support).all())


def test_finds_planted_features():
    assert all(found(seed) for seed in range(5))


@pytest.mark.slow
def test_finds_planted_features_in_nearly_all_seeds():
    assert sum(found(seed) for seed in range(100)) >= 95


def test_finds_how_many_features_are_worth_their_price():
    X, y, support = planted(0)
    selector = KHotSelector("learned", price=0.03, random_state=0).fit(X, y)
    assert (selector.support_ == support).all()
    assert selector.inclusion_probabilities_[support].min() > 0.9
    dear = KHotSelector("learned", price=1.0, random_state=0).fit(X, y)
    assert not dear.support_.any()
    with pytest.warns(UserWarning, match="No features were selected"):
        assert dear.transform(X).shape == (ROWS, 0)


@pytest.mark.parametrize(
    "predictor", ["hidden", torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 2))]
)
def test_finds_what_only_works_together(predictor):
    """The label is whether two features have the same sign, of which each alone says nothing."""
    X = np.random.default_rng(0).standard_normal((400, 6))
    y = (X[:, 1] * X[:, 4] > 0).astype(int)
    before = None if isinstance(predictor, str) else [weight.clone() for weight in predictor.parameters()]
    selector = KHotSelector(2, predictor=predictor, random_state=0).fit(X, y)
    assert selector.get_support(indices=True).tolist() == [1, 4]
    if before:
        assert all(map(torch.equal, before, predictor.parameters()))
