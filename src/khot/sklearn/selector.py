"""A scikit-learn selector of k features, or of all features that are worth their price."""

import copy
import itertools
import math
import warnings
from collections.abc import Callable
from numbers import Integral, Real
from typing import Any

import numpy as np
import torch
from joblib import effective_n_jobs  # a dependency of scikit-learn
from numpy.typing import ArrayLike, NDArray
from sklearn.base import BaseEstimator
from sklearn.feature_selection import SelectorMixin
from sklearn.utils import check_random_state
from sklearn.utils.validation import _check_sample_weight, check_is_fitted, validate_data
from torch.nn import Linear, Module, ReLU, Sequential
from tqdm import tqdm
from typing_extensions import Self

from khot._validation import check_choice, check_flag
from khot.distributions import Pivotal, SamplingDesign
from khot.estimators import ReinMax
from khot.nn import KHotGate

from .data import Data, prepared
from .start import least_squares_start
from .training import HURRY_AFTER, LOOK_EVERY, TURN, Best, Training, threads_of_torch, training_mode

PRICE = 0.01  # default price of a feature


class KHotSelector(SelectorMixin, BaseEstimator):
    r"""Selects features by training a predictor that sees k of them at a time, with a new draw for each row and step.

    The draws come from a sampling design. Its logits, one for each feature, are trained together with the predictor,
    through the gradient that an estimator gives the draws, until nearly all draws are the same. The features with the k
    largest logits are then selected. So features are chosen for their joint effect, unlike in univariate tests, and in
    one training, unlike in recursive elimination.

    With ``n_features_to_select="learned"`` the number of features is also learned: a feature is kept if it lowers the
    loss by more than ``price``, and is selected if it is drawn more often than not. The loss is the cross-entropy in
    nats or, for values, the mean squared error as a share of their variance. So with ``price=0.01`` a feature has to
    explain one percent of the variance. For several outputs it is the mean of their losses. Without ``y``, the values
    are the features themselves, as in a concrete autoencoder: the selected features predict the others.

    With a linear predictor, training does not start from equal logits but from a least-squares solution, which needs no
    draws; see ``khot.sklearn.start``. After 100 steps it then forces a decision between features that are alike.
    Training takes a fraction of a second for dozens or hundreds of features; with a hidden layer, which starts from
    equal logits, it takes seconds.

    The selector is worth its time if features matter only in combination, such as through their product: with
    ``predictor="hidden"`` it finds them, while univariate tests and linear models do not. The guide to feature
    selection compares it with other methods.

    A row with a ``sample_weight`` counts as that many copies: integer weights and repeated rows select the same
    features with the same ``random_state``, to the last bit, and the order of the rows does not matter. Equal rows are
    merged into one row with one draw per step.

    Features are standardised internally; :meth:`transform` returns columns of its input. Training runs in single
    precision on the CPU, regardless of torch's default dtype and device and of modes such as autocast. It does not
    change the state of torch's random number generator. Fits in several threads of Python take turns.

    Args:
        n_features_to_select: How many features to select: ``"learned"``, the default, for those that are worth their
            ``price``; an int; or a fraction of them in (0, 1), rounded down but at least one. If there are fewer than
            an int asks for, all are kept, with a UserWarning.
        task: ``"classification"``, ``"regression"``, or ``"auto"``: numbers of a floating-point dtype are values,
            everything else is a class, with a UserWarning if there are more than 50 different integers. Without ``y``
            it is a regression.
        predictor: ``"linear"``, ``"hidden"`` for one hidden layer of ``hidden_units`` ReLUs, or a
            :class:`torch.nn.Module` that maps rows ``(rows, n_features)`` to one score for each class, or to one value,
            for each output in turn. A copy of the module in single precision is trained, starting from its weights.
        hidden_units: Width of the hidden layer.
        design: Class of sampling designs, called as ``design(logits=..., k=k)``; with ``probs`` if the number is
            learned.
        estimator: The estimator that gives draws a gradient, called with the design.
        price: By how much a feature must lower the loss to be selected, if the number of features is learned. None
            means 0.01 nats, or one percent of the variance. A higher price selects fewer features. Without ``y`` it
            must be higher than 1 / n_features, since each feature predicts at least itself; at a lower price all are
            selected.
        learning_rate: Adam's learning rate for the predictor. It has to be smaller, such as 0.01, if hundreds of
            features are selected, since a step changes the weights of all of them.
        mask_learning_rate: Adam's learning rate for the logits of the design. A smaller one takes longer, and separates
            correlated features better.
        batch_size: Number of distinct rows in a step; all rows, if there are fewer.
        max_iter: Largest number of steps.
        tol: Training ends when nearly all draws are the same: each inclusion probability :math:`\pi_i` is within
            ``tol`` of 0 or 1, and :math:`\sum_i \pi_i (1 - \pi_i)` is at most ``tol`` times its value before training.
            If all features are kept there is nothing to learn, and training ends after ten steps.
        early_stopping: Whether training also ends when the loss on held-out rows has not improved for
            ``n_iter_no_change`` steps. The selection and the predictor are then those with the lowest held-out loss.
        validation_fraction: Fraction of the rows that is held out, if ``early_stopping``.
        n_iter_no_change: How many steps to wait for an improvement, if ``early_stopping``.
        n_jobs: Number of torch threads for training. None means 1, or the value of a surrounding
            ``joblib.parallel_config`` as in scikit-learn; -1 means all processors. One thread is fastest, and leaves
            the other processors free, unless there are many thousands of rows or features. The previous setting of
            torch is restored afterwards.
        random_state: Seed of draws, mini-batches and initial weights: an int, a ``numpy.random.RandomState`` or None.
        verbose: Whether to show a progress bar.

    Attributes:
        support_: Which features are selected, bool ``(n_features,)``.
        inclusion_probabilities_: Inclusion probability of each feature in the learned design, ``(n_features,)``.
        n_iter_: Number of steps taken.
        loss_curve_: Training loss of each step, without the price.
        predictor_: The trained predictor, a function of standardised features, 0 where they are not selected.
        n_features_in_: Number of features seen in ``fit``.
        feature_names_in_: Their names, if they have any.

    Raises:
        TypeError: In ``fit``, if an argument has the wrong type.
        ValueError: In ``fit``, if an argument is out of range, or training diverges.

    References:
        [1] "Differentiable top-k: from one-hot to k-hot", feature selection.
        [2] Balin, Abid, Zou (2019), "Concrete autoencoders: differentiable feature selection and reconstruction",
            for ``y=None``.

    Example:
        >>> from sklearn.datasets import make_regression
        >>> X, y, coef = make_regression(50, 8, n_informative=2, coef=True, random_state=0)
        >>> selector = KHotSelector(2, random_state=0).fit(X, y)
        >>> bool((selector.support_ == (coef != 0)).all())
        True
    """

    def __init__(
        self,
        n_features_to_select: int | float | str = "learned",
        *,
        task: str = "auto",
        predictor: str | Module = "linear",
        hidden_units: int = 64,
        design: Callable[..., SamplingDesign] = Pivotal,
        estimator: Callable[[Any], Any] = ReinMax,
        price: float | None = None,
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
        tags.target_tags.multi_output = True
        return tags

    def fit(self, X: ArrayLike, y: ArrayLike | None = None, sample_weight: ArrayLike | None = None) -> Self:
        """Learns which features to select.

        Args:
            X: Rows of features, ``(n_samples, n_features)``.
            y: Classes or values, ``(n_samples,)`` or, for several outputs, ``(n_samples, n_outputs)``; None to
                reconstruct all features of X from the selected ones.
            sample_weight: Weight of each row, ``(n_samples,)``: an integer counts as that many copies of the row, and
                0 leaves it out.

        Returns:
            The selector itself.
        """
        self._check_parameters()
        with TURN, training_mode(), threads_of_torch(effective_n_jobs(self.n_jobs)), torch.random.fork_rng(devices=[]):
            data = self._data(X, y, sample_weight)
            seed = int(check_random_state(self.random_state).randint(np.iinfo(np.int32).max))
            torch.default_generator.manual_seed(seed)
            training = self._train(data, seed)
            self.inclusion_probabilities_ = training.inclusion_probabilities().double().numpy()
            self.support_ = training.selected().numpy()
        self.predictor_ = training.predictor.eval()
        self.loss_curve_ = training.curve
        self.n_iter_ = len(training.curve)
        return self

    def _data(self, X: ArrayLike, y: ArrayLike | None, sample_weight: ArrayLike | None) -> Data:
        dtypes = (np.float64, np.float32)
        if y is None:
            if self.task == "classification":
                raise ValueError("`task` is 'classification', which needs `y`, but `y` is None")
            features, targets = validate_data(self, X, dtype=dtypes, ensure_min_samples=2), None
        else:
            features, targets = validate_data(self, X, y, dtype=dtypes, ensure_min_samples=2, multi_output=True)
        weights = _check_sample_weight(sample_weight, features, dtype=np.float64)
        if (weights < 0).any():
            raise ValueError(f"`sample_weight` must not be negative, but got {weights.min():g}")
        return prepared(features, targets, weights, self.task)

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
        if self.price is not None:
            check_number("price", self.price, low=0)
        check_number("tol", self.tol, low=0, high=0.5)
        check_number("validation_fraction", self.validation_fraction, low=0, high=1, without_low=True)
        check_flag("early_stopping", self.early_stopping)
        if self.n_jobs is not None:
            check_number("n_jobs", self.n_jobs, low=-math.inf, whole=True)
            if self.n_jobs == 0:
                raise ValueError("`n_jobs` must be None or an int other than 0, but got 0")
        wanted = self.n_features_to_select
        expected = "`n_features_to_select` must be 'learned', an int of at least 1, or a fraction in (0, 1)"
        if isinstance(wanted, bool) or not isinstance(wanted, (str, Real)):
            raise TypeError(f"{expected}, but got {wanted!r}")
        if isinstance(wanted, str):
            is_legal = wanted == "learned"
        else:
            is_legal = wanted >= 1 if isinstance(wanted, Integral) else 0 < wanted < 1
        if not is_legal:
            raise ValueError(f"{expected}, but got {wanted!r}")
        if self.price is not None and wanted != "learned":
            raise ValueError(
                f"`price` must be None if the number of features is given, but got price={self.price} with "
                f"n_features_to_select={wanted}: leave out the price, or the number to learn it"
            )

    def _number_of_features(self, n: int) -> int | None:
        """How many of n features to select; None if the number is learned."""
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

    def _training(self, data: Data) -> Training:
        """A gate of equal logits and an untrained predictor; if this is linear, both start from least squares."""
        n, price = data.x.shape[-1], PRICE if self.price is None else float(self.price)
        gate = KHotGate(n, self._number_of_features(n), design=self.design, estimator=self.estimator).float()
        training = Training(gate, self._untrained_predictor(n, data.outputs), price)
        if self.predictor == "linear":
            logits, weights = least_squares_start(data, gate.k, price)
            training.start_at(logits, weights)
        return training

    def _untrained_predictor(self, n: int, outputs: int) -> Module:
        dtype = torch.float32  # rather than the default, which may be another one
        if self.predictor == "linear":
            return Linear(n, outputs, dtype=dtype)
        if isinstance(self.predictor, str):
            hidden = self.hidden_units
            return Sequential(Linear(n, hidden, dtype=dtype), ReLU(), Linear(hidden, outputs, dtype=dtype))
        predictor = copy.deepcopy(self.predictor).to("cpu", dtype).eval()
        shape = tuple(predictor(torch.zeros(2, n, dtype=dtype)).shape)
        if shape != (2, outputs):
            raise ValueError(f"`predictor` must map (rows, {n}) to (rows, {outputs}), but maps (2, {n}) to {shape}")
        return predictor.train()

    def _train(self, data: Data, seed: int) -> Training:
        """Trains until draws have settled, the held-out loss no longer improves, or ``max_iter`` steps were made."""
        held_out = None
        if self.early_stopping:
            data, held_out = data.split(self.validation_fraction, seed)
        training = self._training(data)
        best = Best((training.gate, training.predictor), self.n_iter_no_change)
        steps = training.steps(data, self.batch_size, (self.learning_rate, self.mask_learning_rate))
        for step in tqdm(
            itertools.islice(steps, self.max_iter), "KHotSelector", self.max_iter, disable=not self.verbose
        ):
            if step % LOOK_EVERY and step < self.max_iter:
                continue
            if held_out and not best.compare(training.held_out_loss(held_out), step):
                break
            if training.has_settled(self.tol):
                break
            if step >= HURRY_AFTER and self.predictor == "linear":
                training.hurry()
        if held_out:
            best.restore()
        return training


def check_number(
    name: str, value: Any, low: float, high: float = math.inf, *, without_low: bool = False, whole: bool = False
) -> None:
    """Checks for a number, NumPy's included, in [low, high), or in (low, high) if ``without_low``."""
    if isinstance(value, bool) or not isinstance(value, Integral if whole else Real):
        raise TypeError(f"`{name}` must be {'an int' if whole else 'a real number'}, but got {value!r}")
    number = float(value)
    if not low <= number < high or (without_low and number == low):
        raise ValueError(f"`{name}` must lie in {'(' if without_low else '['}{low:g}, {high:g}), but got {value}")
