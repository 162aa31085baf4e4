"""A scikit-learn selector of k features, or of as many as are worth their price."""

import copy
import itertools
import math
import warnings
from collections.abc import Callable
from numbers import Integral, Real
from typing import Any

import numpy as np
import torch
from joblib import effective_n_jobs  # which scikit-learn needs
from numpy.typing import ArrayLike, NDArray
from sklearn.base import BaseEstimator
from sklearn.feature_selection import SelectorMixin
from sklearn.model_selection import train_test_split
from sklearn.preprocessing import StandardScaler
from sklearn.utils import check_random_state
from sklearn.utils.validation import check_is_fitted, validate_data
from torch import Tensor
from torch.nn import Linear, Module, ReLU, Sequential
from torch.nn.functional import cross_entropy, mse_loss
from tqdm import tqdm
from typing_extensions import Self

from khot._validation import check_choice, check_flag
from khot.distributions import Pivotal, SamplingDesign
from khot.estimators import ReinMax
from khot.nn import KHotGate

from .training import LOOK_EVERY, Best, Training, threads_of_torch


class KHotSelector(SelectorMixin, BaseEstimator):
    r"""Selects features by training a predictor that sees k of them at a time, drawn anew for each row and step.

    The draws are those of a sampling design. Its logits, one for each feature, learn together with the predictor,
    through the gradient that an estimator gives the draws, until nearly all draws are the same; the features of the k
    largest logits are selected. So features are chosen for what they do together, unlike in univariate tests, and in
    one training, unlike in recursive elimination.

    With ``n_features_to_select="learned"`` the number is learned, too: a feature stays where it lowers the loss by more
    than ``price``, and is selected if it is drawn more often than not. The loss is the cross-entropy in nats, or for
    values the mean squared error as a share of their variance, so that ``price=0.01`` asks a feature to explain one
    percent of it.

    Features are standardised inside; :meth:`transform` returns columns of what it is given. Training is in single
    precision on the CPU, and leaves torch's random numbers as they were.

    Args:
        n_features_to_select: How many features to select, 10 by default: an int; a fraction of them in (0, 1), rounded
            down but at least one; or ``"learned"``. All are kept, with a UserWarning, where there are fewer than that.
        task: ``"classification"``, ``"regression"``, or ``"auto"``: numbers of a floating-point dtype are values,
            everything else is a class.
        predictor: ``"linear"``, ``"hidden"`` for one hidden layer of ``hidden_units`` ReLUs, or a
            :class:`torch.nn.Module` that maps rows ``(rows, n_features)`` to one score for each class, or to one value;
            a copy of it is trained, from its weights on.
        hidden_units: Width of the hidden layer.
        design: Class of sampling designs, called as ``design(logits=..., k=k)``; for a learned number with ``probs``.
        estimator: What gives draws a gradient, called with the design.
        price: What a feature must be worth, where their number is learned.
        learning_rate: Adam's, for the predictor. It has to be smaller, such as 0.01, where hundreds of features are
            selected, since a step changes the weights of all of them.
        mask_learning_rate: Adam's, for the logits of the design. A smaller one takes longer, and tells features that
            are correlated better apart.
        batch_size: Rows of a step; all, where there are fewer.
        max_iter: Largest number of steps.
        tol: Training ends when nearly all draws are the same: each inclusion probability :math:`\pi_i` is within
            ``tol`` of 0 or 1, and :math:`\sum_i \pi_i (1 - \pi_i)` is at most ``tol`` times its value before training.
            Where all features are kept there is nothing to learn, and it ends after ten steps.
        early_stopping: Whether training also ends when the loss on held-out rows has not improved for
            ``n_iter_no_change`` steps. The selection, and the predictor, are then those with the least held-out loss.
        validation_fraction: Fraction of the rows that is held out, if ``early_stopping``.
        n_iter_no_change: How many steps to wait for an improvement, if ``early_stopping``.
        n_jobs: How many threads of torch train; None is 1, also in scikit-learn's meaning of a surrounding
            ``joblib.parallel_config``, and -1 is all processors. One is faster unless rows or features are many
            thousands, and leaves the other processors to others. torch's own number is restored afterwards.
        random_state: Seed of draws, mini-batches and first weights: an int, a ``numpy.random.RandomState`` or None.
        verbose: Whether to show a progress bar.

    Attributes:
        support_: Which features are selected, bool ``(n_features,)``.
        inclusion_probabilities_: Of each feature, in the law that was learned, ``(n_features,)``.
        n_iter_: Number of steps taken.
        loss_curve_: Training loss of each step, without the price.
        predictor_: The trained predictor: of standardised features, 0 where they are not selected.
        n_features_in_: Number of features seen in ``fit``.
        feature_names_in_: Their names, if they have any.

    Raises:
        TypeError: If an argument has the wrong type, by ``fit``.
        ValueError: If an argument is out of range, or training diverges, by ``fit``.

    References:
        [1] "Differentiable top-k: from one-hot to k-hot", feature selection.

    Example:
        >>> from sklearn.datasets import make_regression
        >>> X, y, coef = make_regression(50, 8, n_informative=2, coef=True, random_state=0)
        >>> selector = KHotSelector(2, random_state=0).fit(X, y)
        >>> bool((selector.support_ == (coef != 0)).all())
        True
    """

    def __init__(
        self,
        n_features_to_select: int | float | str = 10,
        *,
        task: str = "auto",
        predictor: str | Module = "linear",
        hidden_units: int = 64,
        design: Callable[..., SamplingDesign] = Pivotal,
        estimator: Callable[[Any], Any] = ReinMax,
        price: float = 0.01,
        learning_rate: float = 0.1,
        mask_learning_rate: float = 0.05,
        batch_size: int = 256,
        max_iter: int = 1000,
        tol: float = 0.05,
        early_stopping: bool = False,
        validation_fraction: float = 0.1,
        n_iter_no_change: int = 100,
        n_jobs: int | None = None,
        random_state: int | np.random.RandomState | None = None,
        verbose: bool = False,
    ) -> None:
        self.n_features_to_select = n_features_to_select
        self.task = task
        self.predictor = predictor
        self.hidden_units = hidden_units
        self.design = design
        self.estimator = estimator
        self.price = price
        self.learning_rate = learning_rate
        self.mask_learning_rate = mask_learning_rate
        self.batch_size = batch_size
        self.max_iter = max_iter
        self.tol = tol
        self.early_stopping = early_stopping
        self.validation_fraction = validation_fraction
        self.n_iter_no_change = n_iter_no_change
        self.n_jobs = n_jobs
        self.random_state = random_state
        self.verbose = verbose

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.required = True
        return tags

    def fit(self, X: ArrayLike, y: ArrayLike) -> Self:
        """Learns which features to select.

        Args:
            X: Rows of features, ``(n_samples, n_features)``.
            y: Classes or values, ``(n_samples,)``.

        Returns:
            The selector itself.
        """
        self._check_parameters()
        features, labels = validate_data(self, X, y, dtype=(np.float64, np.float32), ensure_min_samples=2)
        rows, targets = standardised(features, labels, self.task)
        seed = int(check_random_state(self.random_state).randint(np.iinfo(np.int32).max))
        with threads_of_torch(effective_n_jobs(self.n_jobs)), torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            training = self._training(rows.shape[-1], targets)
            self._train(training, rows, targets, seed)
        self.inclusion_probabilities_ = training.inclusion_probabilities().double().numpy()
        self.support_ = training.selected().numpy()
        self.predictor_ = training.predictor.eval()
        self.loss_curve_ = training.curve
        self.n_iter_ = len(training.curve)
        return self

    def _get_support_mask(self) -> NDArray[np.bool_]:
        check_is_fitted(self)
        return self.support_

    def _check_parameters(self) -> None:
        check_choice("task", self.task, ("auto", "classification", "regression"))
        if not isinstance(self.predictor, Module):
            check_choice("predictor", self.predictor, ("linear", "hidden"))
        for name in ("hidden_units", "batch_size", "max_iter", "n_iter_no_change"):
            check_number(name, getattr(self, name), low=1, whole=True)
        for name in ("learning_rate", "mask_learning_rate"):
            check_number(name, getattr(self, name), low=0, without_low=True)
        check_number("price", self.price, low=0)
        check_number("tol", self.tol, low=0, high=0.5)
        check_number("validation_fraction", self.validation_fraction, low=0, high=1, without_low=True)
        check_flag("early_stopping", self.early_stopping)
        if self.n_jobs is not None:
            check_number("n_jobs", self.n_jobs, low=-math.inf, whole=True)
            if self.n_jobs == 0:
                raise ValueError("`n_jobs` must be None or an int other than 0, but got 0")
        wanted = self.n_features_to_select
        if isinstance(wanted, str):
            if wanted != "learned":
                raise ValueError(f"`n_features_to_select` must be a number or 'learned', but got {wanted!r}")
        elif isinstance(wanted, Integral):
            check_number("n_features_to_select", wanted, low=1, whole=True)
        else:
            check_number("n_features_to_select", wanted, low=0, high=1, without_low=True)

    def _number_of_features(self, n: int) -> int | None:
        """How many of n features to select; None to learn it."""
        wanted = self.n_features_to_select
        if isinstance(wanted, str):
            return None
        if not isinstance(wanted, Integral):
            return max(1, int(wanted * n))
        if wanted > n:
            warnings.warn(
                f"`n_features_to_select`={wanted} is more than the number of features, {n}: all are kept", stacklevel=3
            )
        return min(int(wanted), n)

    def _training(self, n: int, targets: Tensor) -> Training:
        classifies = not targets.is_floating_point()
        gate = KHotGate(n, self._number_of_features(n), self.design, self.estimator)
        predictor = self._untrained_predictor(n, int(targets.max()) + 1 if classifies else 1)
        return Training(gate, predictor, cross_entropy if classifies else mse_loss, float(self.price))

    def _untrained_predictor(self, n: int, outputs: int) -> Module:
        if self.predictor == "linear":
            return Linear(n, outputs)
        if isinstance(self.predictor, str):
            return Sequential(Linear(n, self.hidden_units), ReLU(), Linear(self.hidden_units, outputs))
        predictor = copy.deepcopy(self.predictor).eval()
        shape = tuple(predictor(torch.zeros(2, n)).shape)
        if shape != (2, outputs):
            raise ValueError(f"`predictor` must make (rows, {outputs}) of (rows, {n}), but makes {shape} of (2, {n})")
        return predictor.train()

    def _train(self, training: Training, rows: Tensor, targets: Tensor, seed: int) -> None:
        """Until the law has settled, the held-out loss no longer improves, or there were ``max_iter`` steps."""
        best, held_out = Best((training.gate, training.predictor), self.n_iter_no_change), None
        if self.early_stopping:
            classes = None if targets.is_floating_point() else targets
            split = train_test_split(
                rows, targets, test_size=self.validation_fraction, random_state=seed, stratify=classes
            )
            (rows, targets), held_out = split[::2], split[1::2]
        rates = (self.learning_rate, self.mask_learning_rate)
        steps = training.steps(rows, targets, self.batch_size, rates)
        for step in tqdm(
            itertools.islice(steps, self.max_iter), "KHotSelector", self.max_iter, disable=not self.verbose
        ):
            if step % LOOK_EVERY and step < self.max_iter:
                continue
            if held_out and not best.compare(training.held_out_loss(*held_out), step):
                break
            if training.has_settled(self.tol):
                break
        if held_out:
            best.restore()


def standardised(X: NDArray[Any], y: NDArray[Any], task: str) -> tuple[Tensor, Tensor]:
    """Features of mean 0 and variance 1 in single precision; numbers of classes ``(rows,)``, or values ``(rows, 1)``.

    Raises:
        ValueError: If there is one class only.
    """
    rows = torch.as_tensor(StandardScaler().fit_transform(X), dtype=torch.float32)
    if task == "regression" or (task == "auto" and np.issubdtype(y.dtype, np.floating)):
        values = StandardScaler().fit_transform(np.asarray(y, dtype=np.float64)[:, None])
        return rows, torch.as_tensor(values, dtype=torch.float32)
    classes, targets = np.unique(y, return_inverse=True)
    if len(classes) < 2:
        raise ValueError(f"`y` must have two or more classes, but got one class, {classes[0]!r}")
    return rows, torch.as_tensor(targets, dtype=torch.long)


def check_number(
    name: str, value: Any, low: float, high: float = math.inf, *, without_low: bool = False, whole: bool = False
) -> None:
    """A number, NumPy's included, in [low, high), or (low, high) ``without_low``."""
    if isinstance(value, bool) or not isinstance(value, Integral if whole else Real):
        raise TypeError(f"`{name}` must be {'an int' if whole else 'a real number'}, but got {value!r}")
    number = float(value)
    if not low <= number < high or (without_low and number == low):
        raise ValueError(f"`{name}` must lie in {'(' if without_low else '['}{low:g}, {high:g}), but got {value}")
