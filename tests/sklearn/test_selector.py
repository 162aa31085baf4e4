"""KHotSelector: scikit-learn's own checks, planted features found, and what it is to Pipeline and GridSearchCV."""

import contextlib
import copy
import subprocess
import sys
import textwrap

import joblib
import numpy as np
import pytest
import torch
from sklearn.datasets import load_breast_cancer
from sklearn.exceptions import NotFittedError
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import parametrize_with_checks

import khot
from khot.nn import KHotGate
from khot.sklearn import KHotSelector
from khot.sklearn.training import Training

ROWS, FEATURES, PLANTED = 200, 50, 5


def planted(seed, n=FEATURES, number=PLANTED, rows=ROWS):
    """Independent normal features, of which some, here five, have coefficients of 1 or -1, and unit noise."""
    generator = np.random.default_rng(seed)
    X = generator.standard_normal((rows, n))
    support = np.zeros(n, dtype=bool)
    support[generator.choice(n, number, replace=False)] = True
    signs = generator.choice([-1.0, 1.0], n)
    return X, X @ (signs * support) + generator.standard_normal(rows), support


@pytest.mark.filterwarnings("ignore:No features were selected:UserWarning")  # some of their data are noise
@parametrize_with_checks([KHotSelector(max_iter=50)])
def test_checks_of_scikit_learn(estimator, check):
    check(estimator)


OTHERS = [
    KHotSelector(2, max_iter=50, early_stopping=True, validation_fraction=0.3),
    KHotSelector(predictor="hidden", max_iter=50),
]


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore:`n_features_to_select`=2 is more than the number of features:UserWarning")
@pytest.mark.filterwarnings("ignore:No features were selected:UserWarning")
@parametrize_with_checks(OTHERS)
def test_checks_of_scikit_learn_where_features_are_left_out(estimator, check):
    check(estimator)


def finds(seed, **settings):
    X, y, support = planted(seed)
    selector = KHotSelector(PLANTED, random_state=seed, **settings).fit(X, y)
    return bool((selector.support_ == support).all())


def test_finds_planted_features():
    assert finds(100)


@pytest.mark.exhaustive
def test_finds_planted_features_in_nearly_all_seeds():
    assert sum(map(finds, range(20))) >= 19


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings", [{"design": khot.ConditionalPoisson}, {"estimator": khot.StraightThrough}], ids=str
)
def test_finds_them_by_other_designs_and_estimators(settings):
    assert finds(0, **settings)


def test_learns_how_many_features_are_worth_their_price():
    X, y, support = planted(0)
    selector = KHotSelector("learned", price=0.03, max_iter=300, random_state=0).fit(X, y)
    assert (selector.support_ == support).all()


def test_no_feature_is_worth_its_price():
    X, y, _ = planted(0)
    selector = KHotSelector("learned", price=2.0, mask_learning_rate=0.5, max_iter=50, random_state=0)
    with pytest.warns(UserWarning, match="No features were selected"):
        assert selector.fit_transform(X, y).shape == (ROWS, 0)


def tanh_network():
    return torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 2))


@pytest.mark.parametrize("predictor", ["hidden", tanh_network()], ids=["hidden", "module"])
def test_finds_what_only_works_together(predictor):
    """The class is whether two features have the same sign, of which each alone says nothing."""
    X = np.random.default_rng(0).standard_normal((400, 6))
    before = copy.deepcopy(predictor.state_dict()) if isinstance(predictor, torch.nn.Module) else {}
    selector = KHotSelector(2, predictor=predictor, random_state=0).fit(X, X[:, 1] * X[:, 4] > 0)
    assert selector.get_support(indices=True).tolist() == [1, 4]
    assert all(torch.equal(value, predictor.state_dict()[name]) for name, value in before.items())


def test_what_a_fit_reports(capsys):
    X, y, _ = planted(0)
    state = torch.get_rng_state()
    selector = KHotSelector(3, max_iter=25, random_state=np.random.RandomState(0), verbose=True).fit(X, y)
    assert torch.equal(torch.get_rng_state(), state)
    assert selector.n_iter_ == len(selector.loss_curve_) == 25
    assert selector.inclusion_probabilities_.sum() == pytest.approx(3)
    assert selector.support_.sum() == 3 and selector.support_.dtype == bool
    assert (
        selector.inclusion_probabilities_[selector.support_].min()
        >= selector.inclusion_probabilities_[~selector.support_]
    ).all()
    assert "KHotSelector" in capsys.readouterr().err
    predicted = selector.predictor_(torch.zeros(1, FEATURES))
    assert predicted.shape == (1, 1) and not selector.predictor_.training


def test_training_ends_when_nearly_all_draws_are_the_same():
    X, y, _ = planted(0)
    selector = KHotSelector(PLANTED, tol=0.2, random_state=0).fit(X, y)
    assert selector.n_iter_ < 1000
    assert np.minimum(selector.inclusion_probabilities_, 1 - selector.inclusion_probabilities_).max() <= 0.2


def training_of(logits, k):
    """A training whose gate has moved from equal logits to these."""
    training = Training(KHotGate(len(logits), k), torch.nn.Linear(len(logits), 1), 0.0)
    training.gate.logits.data.copy_(torch.as_tensor(logits))
    return training


@pytest.mark.parametrize(("n", "k"), [(1000, 1), (1000, 10), (200, 5), (50, 25), (200, 195), (1000, 999), (100, None)])
def test_a_mask_that_has_hardly_moved_has_not_settled(n, k):
    size = n // 2 if k is None else k
    noise = 0.1 * np.random.default_rng(0).standard_normal(n)
    chosen = np.where(np.arange(n) < size, 12.0, -12.0)
    undecided = np.where(np.isin(np.arange(n), (0, n - 1)), 0.0, chosen)  # one unit in and one out
    assert not training_of(noise, k).has_settled(0.05)
    assert not training_of(undecided, k).has_settled(0.05)
    assert training_of(chosen, k).has_settled(0.05)


SMALL_AND_LARGE_SHARES = {  # features, how many of them have a coefficient, rows, how many are asked for
    "2_of_100": (100, 2, 300, 2),
    "97_of_100": (100, 97, 500, 97),
    "10_of_1000": (1000, 5, 500, 10),
    "1_of_1000": (1000, 1, 500, 1),
    "197_of_200": (200, 197, 800, 197),
    "497_of_500": (500, 497, 1500, 497),
    "1_of_30": (30, 1, 100, 1),
    "learned_of_300": (300, 3, 400, "learned"),
}


@pytest.mark.parametrize(
    ("case", "classifies", "seed", "settings"),
    [
        pytest.param("2_of_100", True, 0, {"max_iter": 200, "batch_size": 64}, id="small"),
        pytest.param("97_of_100", False, 0, {"max_iter": 100}, id="large"),
        *(
            pytest.param(
                case,
                classifies,
                1 + classifies,
                {"learning_rate": 0.01} if number > 200 else {},
                marks=pytest.mark.exhaustive,
            )
            for case, (n, number, _, _) in SMALL_AND_LARGE_SHARES.items()
            for classifies in ((False, True) if number < n / 2 else (False,))  # a class says little of each of many
        ),
        pytest.param("10_of_1000", False, 3, {"early_stopping": True}, id="held_out", marks=pytest.mark.exhaustive),
        pytest.param(
            "2_of_100",
            False,
            3,
            {"design": khot.ConditionalPoisson, "estimator": khot.StraightThrough},
            id="another_design",
            marks=pytest.mark.exhaustive,
        ),
    ],
)
def test_finds_small_and_large_shares_of_the_features(case, classifies, seed, settings):
    """All inclusion probabilities are near 0, or near 1, before anything is learned."""
    n, number, rows, wanted = SMALL_AND_LARGE_SHARES[case]
    X, y, support = planted(seed, n, number, rows)
    selector = KHotSelector(wanted, random_state=seed, **settings).fit(X, y > 0 if classifies else y)
    assert selector.n_iter_ > 10
    assert selector.support_[support].all()
    if wanted != "learned":
        assert selector.support_.sum() == wanted


def test_early_stopping_keeps_the_best_of_the_held_out_rows():
    X, y, support = planted(1)
    settings = {"early_stopping": True, "n_iter_no_change": 40, "random_state": 0, "tol": 0.0}
    selector = KHotSelector(PLANTED, **settings).fit(X, y)
    assert selector.n_iter_ < 1000 and (selector.support_ == support).all()
    noise = KHotSelector(PLANTED, **settings).fit(X, np.random.default_rng(0).standard_normal(ROWS))
    assert noise.n_iter_ < 200


@pytest.mark.parametrize(("wanted", "number"), [(7, 7), (np.int64(7), 7), (0.1, 3), (0.01, 1)])
def test_size(wanted, number):
    X, y = load_breast_cancer(return_X_y=True)
    assert KHotSelector(wanted, max_iter=1).fit(X, y).support_.sum() == number


def test_more_features_than_there_are():
    X, y, _ = planted(0)
    with pytest.warns(UserWarning, match="`n_features_to_select`=51 is more than the number of features, 50: all are"):
        assert KHotSelector(51).fit(X, y).support_.all()


@pytest.mark.parametrize(
    ("y", "task", "outputs"),
    [
        ([0, 1, 2] * 6, "auto", 3),
        (["a", "b", "c"] * 6, "auto", 3),
        ([True, False, False] * 6, "auto", 2),
        ([0.0, 1.0, 2.0] * 6, "auto", 1),
        ([0.0, 1.0, 2.0] * 6, "classification", 3),
        ([0, 1, 2] * 6, "regression", 1),
    ],
)
def test_task(y, task, outputs):
    X = np.random.default_rng(0).standard_normal((18, 4))
    selector = KHotSelector(2, task=task, max_iter=1).fit(X, y)
    assert selector.predictor_(torch.zeros(1, 4)).shape == (1, outputs)


def test_in_a_pipeline_and_a_grid_search():
    X, y = load_breast_cancer(return_X_y=True, as_frame=False)
    model = make_pipeline(StandardScaler(), KHotSelector(random_state=0, max_iter=50), LogisticRegression())
    grid = {"khotselector__n_features_to_select": [1, 4], "khotselector__predictor": ["linear"]}
    search = GridSearchCV(model, grid, cv=2).fit(X, y)
    assert search.best_params_["khotselector__n_features_to_select"] == 4 and search.best_score_ > 0.9
    names = search.best_estimator_[:-1].get_feature_names_out(load_breast_cancer().feature_names)
    assert len(names) == 4 and set(names) < set(load_breast_cancer().feature_names)


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"n_features_to_select": 0}, ValueError, "an int of at least 1, or a fraction .* but got 0"),
        ({"n_features_to_select": 1.0}, ValueError, r"or a fraction in \(0, 1\), but got 1.0"),
        ({"n_features_to_select": "all"}, ValueError, "`n_features_to_select` must be 'learned', an int"),
        ({"n_features_to_select": True}, TypeError, "`n_features_to_select` must be .*, but got True"),
        ({"task": "ranking"}, ValueError, "`task` must be 'auto', 'classification' or 'regression'"),
        ({"predictor": "deep"}, ValueError, "`predictor` must be 'linear' or 'hidden'"),
        ({"predictor": torch.nn.Linear(4, 3)}, ValueError, r"`predictor` must map \(rows, 4\) to \(rows, 2\)"),
        ({"hidden_units": 1.5}, TypeError, "`hidden_units` must be an int"),
        ({"design": "pivotal"}, TypeError, "`design` must be a function"),
        ({"n_features_to_select": "learned", "price": -1}, ValueError, "`price` must lie in"),
        (
            {"price": 0.1},
            ValueError,
            "`price` must be None if the number .*n_features_to_select=2",
        ),
        ({"n_features_to_select": 0.5, "price": 0.01}, ValueError, "leave out the price, or the number to learn it"),
        ({"learning_rate": 0}, ValueError, "`learning_rate` must lie in"),
        ({"tol": 0.5}, ValueError, "`tol` must lie in"),
        ({"validation_fraction": np.nan}, ValueError, "`validation_fraction` must lie in"),
        ({"early_stopping": "yes"}, TypeError, "`early_stopping` must be True or False"),
        ({"n_jobs": 0}, ValueError, "`n_jobs` must be None or an int other than 0, but got 0"),
        ({"n_jobs": 1.5}, TypeError, "`n_jobs` must be an int, but got 1.5"),
    ],
)
def test_bad_arguments(settings, error, message):
    X = np.random.default_rng(0).standard_normal((18, 4))
    with pytest.raises(error, match=message):
        KHotSelector(**{"n_features_to_select": 2, **settings}).fit(X, [0, 1] * 9)


@pytest.mark.parametrize(("n_jobs", "surrounding", "threads"), [(None, None, 1), (3, None, 3), (None, 2, 2)])
def test_threads_of_a_fit(n_jobs, surrounding, threads):
    class Watched(torch.nn.Linear):
        seen = set()

        def forward(self, x):
            self.seen.add(torch.get_num_threads())
            return super().forward(x)

    X, y, _ = planted(0)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(4)
        with contextlib.ExitStack() as stack:
            if surrounding is not None:
                stack.enter_context(joblib.parallel_config("threading", n_jobs=surrounding))
            KHotSelector(2, predictor=Watched(X.shape[-1], 1), n_jobs=n_jobs, max_iter=2, task="regression").fit(X, y)
        assert Watched.seen == {threads} and torch.get_num_threads() == 4
    finally:
        torch.set_num_threads(before)


def test_fits_in_several_threads_of_python():
    """Each learns what it learns alone, and torch's random state and number of threads are those from before."""
    X, y, _ = planted(0)

    def curve(seed):
        return KHotSelector(2, max_iter=30, random_state=seed).fit(X, y).loss_curve_

    expected, before = [curve(seed) for seed in range(4)], torch.get_num_threads()
    try:
        torch.set_num_threads(4)
        state = torch.get_rng_state()
        assert joblib.Parallel(4, "threading")(joblib.delayed(curve)(seed) for seed in range(4)) == expected
        assert torch.equal(torch.get_rng_state(), state) and torch.get_num_threads() == 4
    finally:
        torch.set_num_threads(before)


@contextlib.contextmanager
def default_dtype(dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


MODES = {
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "meta": lambda: torch.device("meta"),
    "bfloat16": lambda: default_dtype(torch.bfloat16),
    "float64": lambda: default_dtype(torch.float64),
}


@pytest.mark.parametrize(
    "settings",
    [
        {"early_stopping": True},
        {"n_features_to_select": 3, "predictor": "hidden"},
        {"n_features_to_select": 3, "predictor": torch.nn.Linear(10, 1, dtype=torch.float64)},
    ],
    ids=["linear", "hidden", "double"],
)
def test_modes_and_defaults_of_torch_change_nothing(settings):
    X, y, _ = planted(0, 10, 3)
    expected = KHotSelector(**settings, max_iter=20, random_state=0).fit(X, y)
    for name, mode in MODES.items():
        with mode():
            found = KHotSelector(**settings, max_iter=20, random_state=0).fit(X, y)
        assert found.loss_curve_ == expected.loss_curve_, name
        assert (found.inclusion_probabilities_ == expected.inclusion_probabilities_).all(), name
        assert all(p.dtype == torch.float32 and p.requires_grad for p in found.predictor_.parameters()), name


def test_bad_data():
    X = np.random.default_rng(0).standard_normal((18, 4))
    with pytest.raises(ValueError, match="two or more classes, but got one class, 1$"):
        KHotSelector(2).fit(X, np.ones(18, dtype=int))
    with pytest.raises(NotFittedError):
        KHotSelector(2).transform(X)


def test_training_that_diverges():
    X, y, _ = planted(0)
    with pytest.raises(ValueError, match="`learning_rate` is 1e\\+30, and a smaller one may help"):
        KHotSelector(2, learning_rate=1e30, random_state=0).fit(X, y)


@pytest.mark.slow
def test_is_imported_by_its_name_alone():
    code = """
        import sys

        class Absent:
            def find_spec(self, name, path=None, target=None):
                if name == "sklearn":
                    raise ModuleNotFoundError("No module named 'sklearn'", name=name)

        import khot, khot.nn
        assert "khot.sklearn" not in sys.modules and "sklearn" not in sys.modules
        sys.meta_path.insert(0, Absent())
        try:
            khot.sklearn
        except ModuleNotFoundError as error:
            assert "pip install scikit-learn" in str(error)
        else:
            raise AssertionError
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True)
