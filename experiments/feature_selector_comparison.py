"""Which k features should a model get? Compares khot's selector with univariate tests, elimination, L1 and LassoNet.

    python experiments/feature_selector_comparison.py

Every row selects k features of the training rows, and a model of the standardised features that are left is scored on
the test rows:

    KHotSelector           draws of k features and a linear predictor, trained together
    KHotSelector, hidden   the same with a hidden layer
    KHotSelector, learned  the number of features is also learned, at the default price (linear predictor)
    SelectKBest            the largest F statistics of the features one by one
    RFE                    recursive elimination by the weights of a linear model
    L1                     the largest weights of a linear model with an L1 penalty
    LassoNet               the features that leave the path of LassoNet last, where `pip install lassonet` has been done
    STG                    the largest stochastic gates (Yamada et al. 2020), where `pip install stg` has been done
    all                    no selection

on five data sets, of which the last three are generated for each seed:

    breast_cancer  30 features, scored by the accuracy of a logistic regression
    digits         64 pixels, scored likewise
    correlated     100 features, neighbours with correlation 0.9, five of them with coefficients of 1 or -1 and noise of
                   variance 1; 200 rows to train on; scored by R^2 of ridge regression
    wide           1000 independent features, five coefficients, noise of variance 1/4; 100 rows to train on; likewise
    xor            10 features; whether two of them have the same sign; 400 rows to train on; scored by the accuracy of
                   nearest neighbours

Protocol: of breast_cancer and digits one half, the same for every seed, serves for the table alone; each seed trains on
60 % of the rows in the other half, every class in proportion. The settings of KHotSelector were chosen on that half and
on generated data with other seeds. Those of the other selectors are the defaults of their libraries, except as stated
here. Seconds are processor time of one thread.
"""

import collections.abc
import importlib.util
import time
import warnings
from argparse import Namespace
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import sklearn
import torch
from matplotlib.figure import Figure
from sklearn.base import BaseEstimator
from sklearn.datasets import load_breast_cancer, load_digits
from sklearn.dummy import DummyClassifier, DummyRegressor
from sklearn.exceptions import ConvergenceWarning
from sklearn.feature_selection import RFE, SelectFromModel, SelectKBest, SelectorMixin, f_classif, f_regression
from sklearn.linear_model import LassoCV, LogisticRegression, Ridge
from sklearn.model_selection import train_test_split
from sklearn.neighbors import KNeighborsClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from common import Table, each_seed, experiment_parser, parse, save_figure
from khot.sklearn import KHotSelector

LINEAR, HIDDEN, LEARNED = "KHotSelector", "KHotSelector, hidden", "KHotSelector, learned"
ONE_BY_ONE, BY_STEPS, SPARSE, LASSONET, ALL = "SelectKBest", "RFE", "L1", "LassoNet", "all features"
GATES, STG_EPOCHS = "STG", 3000
NAMES_PENALTY = tuple(int(number) for number in sklearn.__version__.split(".")[:2]) < (1, 8)
L1_PENALTY: dict[str, Any] = {"penalty": "l1"} if NAMES_PENALTY else {"l1_ratio": 1.0}
SCORE, RECOVERED, NUMBER, SECONDS = "score, %", "of the true features, %", "features", "seconds to select"


class Problem(NamedTuple):
    """Rows to select by, rows to score on, and which features the target is made of, where that is known."""

    X: np.ndarray
    y: np.ndarray
    test_X: np.ndarray
    test_y: np.ndarray
    truth: np.ndarray | None = None  # bool (features,)


class LassoNetSelector(SelectorMixin, BaseEstimator):
    """The features that are dropped last along the path, which takes steps of 5 % here instead of 2 %, for time."""

    def __init__(self, k: int, classifies: bool, seed: int) -> None:
        self.k, self.classifies, self.seed = k, classifies, seed

    def fit(self, X: np.ndarray, y: np.ndarray) -> "LassoNetSelector":
        from lassonet import LassoNetClassifier, LassoNetRegressor

        make = LassoNetClassifier if self.classifies else LassoNetRegressor
        model = make(verbose=0, path_multiplier=1.05, torch_seed=self.seed, random_state=self.seed)
        model.path(X, y, return_state_dicts=False)
        self.chosen_ = np.argsort(-model.feature_importances_.numpy(), kind="stable")[: self.k]
        self.n_features_in_ = X.shape[-1]
        return self

    def _get_support_mask(self) -> np.ndarray:
        return np.isin(np.arange(self.n_features_in_), self.chosen_)


class STGSelector(SelectorMixin, BaseEstimator):
    """The features with the largest gates, whose price alone says how many open: the settings of STG's own examples."""

    def __init__(self, k: int, classifies: bool, seed: int) -> None:
        self.k, self.classifies, self.seed = k, classifies, seed

    def fit(self, X: np.ndarray, y: np.ndarray) -> "STGSelector":
        for name in ("Mapping", "Sequence", "Set"):  # the only release, 0.1.2, has them from before Python 3.10
            setattr(collections, name, getattr(collections.abc, name))
        from stg import STG

        torch.manual_seed(self.seed)
        shape = {"hidden_dims": [60, 20]} if self.classifies else {"hidden_dims": [500, 50, 10]}
        model = STG(
            task_type="classification" if self.classifies else "regression",
            device="cpu",
            input_dim=X.shape[-1],
            output_dim=len(np.unique(y)) if self.classifies else 1,
            activation="tanh",
            optimizer="SGD",
            learning_rate=0.1,
            batch_size=len(X),
            sigma=0.5,
            lam=0.5 if self.classifies else 0.1,
            **shape,
        )
        model.fit(X, y if self.classifies else y[:, None], nr_epochs=STG_EPOCHS, verbose=False)
        self.chosen_ = np.argsort(-model.get_gates("raw"), kind="stable")[: self.k]
        self.n_features_in_ = X.shape[-1]
        return self

    def _get_support_mask(self) -> np.ndarray:
        return np.isin(np.arange(self.n_features_in_), self.chosen_)


def shipped(load: Callable[..., tuple[np.ndarray, np.ndarray]], seed: int) -> Problem:
    X, y = load(return_X_y=True)
    X, test_X, y, test_y = train_test_split(X, y, test_size=0.5, stratify=y, random_state=0)
    X, _, y, _ = train_test_split(X, y, test_size=0.4, stratify=y, random_state=seed)
    return Problem(X, y, test_X, test_y)


def linear(X: np.ndarray, number: int, noise: float, generator: np.random.Generator) -> Problem:
    """Coefficients of 1 or -1, one in each fifth of the features if they are five; half of the rows are to test."""
    rows, n = X.shape
    places = np.arange(number) * (n // number) + generator.integers(n // number, size=number)
    y = X[:, places] @ generator.choice([-1.0, 1.0], number) + noise * generator.standard_normal(rows)
    half = rows // 2
    return Problem(X[:half], y[:half], X[half:], y[half:], np.isin(np.arange(n), places))


def correlated(seed: int, rows: int = 400, n: int = 100, correlation: float = 0.9) -> Problem:
    generator = np.random.default_rng(seed)
    X = generator.standard_normal((rows, n))
    for i in range(1, n):
        X[:, i] = correlation * X[:, i - 1] + np.sqrt(1 - correlation**2) * X[:, i]
    return linear(X, 5, 1.0, generator)


def wide(seed: int, rows: int = 200, n: int = 1000) -> Problem:
    generator = np.random.default_rng(seed)
    return linear(generator.standard_normal((rows, n)), 5, 0.5, generator)


def xor(seed: int, rows: int = 800, n: int = 10) -> Problem:
    generator = np.random.default_rng(seed)
    X, half = generator.standard_normal((rows, n)), rows // 2
    places = generator.choice(n, 2, replace=False)
    y = (X[:, places].prod(-1) > 0).astype(int)
    return Problem(X[:half], y[:half], X[half:], y[half:], np.isin(np.arange(n), places))


DATA: dict[str, tuple[Callable[[int], Problem], int]] = {  # and the default k
    "breast_cancer": (lambda seed: shipped(load_breast_cancer, seed), 5),
    "digits": (lambda seed: shipped(load_digits, seed), 10),
    "correlated": (correlated, 5),
    "wide": (wide, 5),
    "xor": (xor, 2),
}


def selectors(k: int, seed: int, classifies: bool, n: int) -> dict[str, BaseEstimator]:
    step = 1 if n <= 100 else 0.1  # a tenth of those that are left, where there are many
    if classifies:
        # saga does not converge in 500 steps; the largest weights are found earlier.
        dense, sparse = (
            LogisticRegression(max_iter=1000),
            LogisticRegression(**L1_PENALTY, C=0.1, solver="saga", max_iter=500),
        )
    else:
        dense, sparse = Ridge(), LassoCV(cv=3)
    rows = {
        LINEAR: KHotSelector(k, random_state=seed),
        HIDDEN: KHotSelector(k, predictor="hidden", random_state=seed),
        LEARNED: KHotSelector(random_state=seed),
        ONE_BY_ONE: SelectKBest(f_classif if classifies else f_regression, k=k),
        BY_STEPS: RFE(dense, n_features_to_select=k, step=step),
        SPARSE: SelectFromModel(sparse, max_features=k, threshold=-np.inf),
    }
    if importlib.util.find_spec("lassonet"):
        rows[LASSONET] = LassoNetSelector(k, classifies, seed)
    if importlib.util.find_spec("stg"):
        rows[GATES] = STGSelector(k, classifies, seed)
    return rows | {ALL: SelectKBest(lambda X, y: np.ones(X.shape[-1]), k="all")}


def score(selector: BaseEstimator, name: str, problem: Problem) -> dict[str, float]:
    selection = make_pipeline(StandardScaler(), selector)
    start = time.process_time()
    selected = selection.fit_transform(problem.X, problem.y)
    seconds = time.process_time() - start
    kept = selector.get_support()
    if kept.any():
        last = {"xor": KNeighborsClassifier(15), "correlated": Ridge(), "wide": Ridge()}
        model = make_pipeline(StandardScaler(), last.get(name, LogisticRegression(max_iter=1000)))
        right = model.fit(selected, problem.y).score(selection.transform(problem.test_X), problem.test_y)
    else:  # what can be said without features
        model = DummyRegressor() if problem.y.dtype == float else DummyClassifier()
        right = model.fit(problem.X, problem.y).score(problem.test_X, problem.test_y)
    scores = {SCORE: 100 * right, NUMBER: kept.sum(), SECONDS: seconds}
    if problem.truth is not None:
        scores[RECOVERED] = 100 * (kept & problem.truth).sum() / problem.truth.sum()
    return scores


def compare(name: str, k: int, args: Namespace) -> Table:
    make = DATA[name][0]
    shown = make(args.seed)
    columns = {SCORE: ".1f", NUMBER: ".1f", SECONDS: ".2f"}
    if shown.truth is not None:
        columns = {SCORE: ".1f", RECOVERED: ".0f", NUMBER: ".1f", SECONDS: ".2f"}
    n, classifies = shown.X.shape[-1], shown.y.dtype != float
    best = HIDDEN if name == "xor" else LINEAR
    table = Table(f"{name}: {k} of {n} features", columns, best)
    for seed, progress in each_seed(args, steps=len(selectors(k, 0, classifies, n))):
        problem = make(seed)
        for row, selector in selectors(k, seed, classifies, n).items():
            with warnings.catch_warnings(), np.errstate(invalid="ignore"):
                warnings.simplefilter("ignore", ConvergenceWarning)
                # Some pixels are always white.
                warnings.filterwarnings("ignore", "Features .* are constant", UserWarning)
                warnings.filterwarnings("ignore", "No features were selected", UserWarning)
                table.add(row, score(selector, name, problem))
            progress.update()
    for row in (ONE_BY_ONE, BY_STEPS, SPARSE, LASSONET, GATES):
        if row in table.scores:
            table.find(f"{best} beats {row}", best, row)
    return table


def draw_figure(tables: dict[str, Table]) -> Figure:
    """Score of each seed, and the means."""
    figure = Figure(figsize=(4 * len(tables), 3.2), layout="constrained")
    panels = figure.subplots(1, len(tables), squeeze=False, sharey=True)
    for axes, (name, table) in zip(panels[0], tables.items(), strict=True):
        for place, row in enumerate(table.scores):
            values = table.values(row, SCORE)
            axes.plot(values, [place] * len(values), "o", color="0.6", markersize=4)
            axes.plot(values.mean(), place, "D", color="tab:red" if "KHot" in row else "tab:blue")
        axes.set(title=name, xlabel=SCORE, yticks=range(len(table.scores)), yticklabels=list(table.scores))
    panels[0][0].invert_yaxis()
    return figure


def main(arguments: list[str] | None = None) -> dict[str, Table]:
    parser = experiment_parser(__doc__)
    parser.add_argument("--data", nargs="+", choices=DATA, default=list(DATA), help="data sets (default: all)")
    parser.add_argument("--k", type=int, help="number of features (default: 5, but 10 of digits and 2 of xor)")
    args = parse(parser, arguments, smoke={"seeds": 2, "data": ["breast_cancer"]})
    KHotSelector(1, max_iter=1).fit(np.eye(20), np.arange(20.0))  # loads the compiled loops, so that no row pays for it
    tables = {}
    for name in args.data:
        tables[name] = compare(name, args.k or DATA[name][1], args)
        tables[name].save(args, f"feature_selector_comparison_{name}")
    save_figure(draw_figure(tables), args, "feature_selector_comparison")
    return tables


if __name__ == "__main__":
    main()
