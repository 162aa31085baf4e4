"""Which k features should a classifier get? Compares khot's selector with three selectors of scikit-learn.

    python experiments/feature_selector_comparison.py

Every row selects k features of the training rows, and a logistic regression on the standardised features that are left
is scored on the others:

    KHotSelector          draws of k features and a linear predictor, trained together
    KHotSelector, hidden  the same with a hidden layer
    SelectKBest           the largest F statistics of the features one by one
    RFE                   recursive elimination, one feature at a time, by the weights of a logistic regression
    L1                    the largest weights of a logistic regression with an L1 penalty
    all                   no selection

on breast_cancer (30 features) and digits (64 pixels). A seed is a split: one half of the rows to select and train on,
the other to test, every class in proportion. All settings are the libraries' defaults, but for what is written here.
"""

import time
import warnings
from argparse import Namespace
from collections.abc import Callable

import numpy as np
from matplotlib.figure import Figure
from sklearn.base import BaseEstimator
from sklearn.datasets import load_breast_cancer, load_digits
from sklearn.exceptions import ConvergenceWarning
from sklearn.feature_selection import RFE, SelectFromModel, SelectKBest
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import log_loss
from sklearn.model_selection import train_test_split
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from common import Table, each_seed, experiment_parser, parse, save_figure
from khot.sklearn import KHotSelector

DATA = {"breast_cancer": (load_breast_cancer, 5), "digits": (load_digits, 10)}  # and the default k
LINEAR, HIDDEN, ONE_BY_ONE, BY_STEPS, SPARSE = "KHotSelector", "KHotSelector, hidden", "SelectKBest", "RFE", "L1"
ALL = "all features"
ACCURACY, LOSS, SECONDS = "accuracy, %", "log loss", "seconds to select"


def lasso(k: int) -> BaseEstimator:
    """The k largest weights, summed over the classes, where they are not zero."""
    model = LogisticRegression(l1_ratio=1.0, C=0.1, solver="saga", max_iter=500)
    return SelectFromModel(model, max_features=k, threshold=-np.inf)


SELECTORS: dict[str, Callable[[int, int], BaseEstimator | str]] = {
    LINEAR: lambda k, seed: KHotSelector(k, random_state=seed),
    HIDDEN: lambda k, seed: KHotSelector(k, predictor="hidden", random_state=seed),
    ONE_BY_ONE: lambda k, seed: SelectKBest(k=k),
    BY_STEPS: lambda k, seed: RFE(LogisticRegression(max_iter=1000), n_features_to_select=k),
    SPARSE: lambda k, seed: lasso(k),
    ALL: lambda k, seed: "passthrough",
}


def score(selector: BaseEstimator | str, X: np.ndarray, y: np.ndarray, seed: int) -> dict[str, float]:
    train_X, test_X, train_y, test_y = train_test_split(X, y, test_size=0.5, stratify=y, random_state=seed)
    selection = make_pipeline(StandardScaler(), selector)
    start = time.perf_counter()
    selected = selection.fit_transform(train_X, train_y)
    seconds = time.perf_counter() - start
    classifier = make_pipeline(StandardScaler(), LogisticRegression(max_iter=1000)).fit(selected, train_y)
    probabilities = classifier.predict_proba(selection.transform(test_X))
    right = classifier.classes_[probabilities.argmax(-1)] == test_y
    return {ACCURACY: 100 * right.mean(), LOSS: log_loss(test_y, probabilities), SECONDS: seconds}


def compare(name: str, k: int, args: Namespace) -> Table:
    X, y = DATA[name][0](return_X_y=True)
    columns = {ACCURACY: ".1f", LOSS: ".3f", SECONDS: ".2f"}
    table = Table(f"{name}: {k} of {X.shape[-1]} features", columns, LINEAR)
    for seed, progress in each_seed(args, steps=len(SELECTORS)):
        for row, make in SELECTORS.items():
            with warnings.catch_warnings(), np.errstate(invalid="ignore"):
                warnings.simplefilter("ignore", ConvergenceWarning)  # L1's: its largest weights are found earlier
                warnings.filterwarnings(
                    "ignore", "Features .* are constant", UserWarning
                )  # pixels that are always white
                table.add(row, score(make(k, seed), X, y, seed))
            progress.update()
    for row in (ONE_BY_ONE, BY_STEPS, SPARSE):
        table.find(f"KHotSelector beats {row}", LINEAR, row)
    table.find("a hidden layer helps, though the features go to a linear classifier", HIDDEN, LINEAR)
    return table


def draw_figure(tables: dict[str, Table]) -> Figure:
    """Accuracy of each split, and the means."""
    figure = Figure(figsize=(10, 3.2), layout="constrained")
    panels = figure.subplots(1, len(tables), squeeze=False)
    for axes, (name, table) in zip(panels[0], tables.items(), strict=True):
        for place, row in enumerate(table.scores):
            values = table.values(row, ACCURACY)
            axes.plot(values, [place] * len(values), "o", color="0.6", markersize=4)
            axes.plot(values.mean(), place, "D", color="tab:red" if "KHot" in row else "tab:blue")
        axes.set(title=name, xlabel=ACCURACY, yticks=range(len(table.scores)), yticklabels=list(table.scores))
        axes.invert_yaxis()
    return figure


def main(arguments: list[str] | None = None) -> dict[str, Table]:
    parser = experiment_parser(__doc__)
    parser.add_argument("--data", nargs="+", choices=DATA, default=list(DATA), help="data sets (default: all)")
    parser.add_argument("--k", type=int, help="number of features (default: 5 of breast_cancer, 10 of digits)")
    args = parse(parser, arguments, smoke={"seeds": 2, "data": ["breast_cancer"]})
    tables = {}
    for name in args.data:
        tables[name] = compare(name, args.k or DATA[name][1], args)
        tables[name].save(args, f"feature_selector_comparison_{name}")
    save_figure(draw_figure(tables), args, "feature_selector_comparison")
    return tables


if __name__ == "__main__":
    main()
