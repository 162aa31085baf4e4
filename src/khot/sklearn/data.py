r"""The data from which a selector learns: rows of features, targets, and the weight of each row.

Rows with equal features and targets are merged into one row with the sum of their weights. Rows of weight 0 are left
out, and the others are put into an order that does not depend on the original one. So integer weights and repeated rows
give the same training to the last bit, including random draws.

The loss of a row is a mean over outputs: the squared error of standardised values, which is a share of their variance,
or the cross-entropy of classes in nats. The loss of rows with weights :math:`w` is
:math:`\sum_i w_i \ell_i / \sum_i w_i`.
"""

import math
import warnings
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.model_selection import train_test_split
from sklearn.preprocessing import StandardScaler
from torch import Tensor
from torch.nn.functional import cross_entropy, one_hot

MANY_CLASSES = 50  # more different integers than these are probably values


@dataclass
class Data:
    """The rows to learn from.

    Attributes:
        x: Standardised features ``(rows, n)``, float32.
        y: Standardised values ``(rows, m)``, float32, or class numbers ``(rows, m)``, long.
        weights: Weights of the rows, with mean 1, ``(rows,)``.
        classes: Number of classes of each column of ``y``; empty for values.
    """

    x: Tensor
    y: Tensor
    weights: Tensor
    classes: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.x)

    @property
    def outputs(self) -> int:
        """Number of scores that a predictor has for each row: one for each class of each output, or for each value."""
        return sum(self.classes) or self.y.shape[-1]

    def rows(self, chosen: Tensor | NDArray[Any]) -> "Data":
        return replace(self, x=self.x[chosen], y=self.y[chosen], weights=self.weights[chosen])

    def loss(self, predictions: Tensor) -> Tensor:
        """The weighted mean loss of predictions ``(rows, outputs)``, a scalar; over all data, weights have mean 1."""
        if self.classes:
            scores = predictions.split(self.classes, -1)
            losses = [
                cross_entropy(score, y, reduction="none") for score, y in zip(scores, self.y.unbind(-1), strict=True)
            ]
            each = torch.stack(losses).mean(0) if len(losses) > 1 else losses[0]
        else:
            each = (predictions - self.y).square().mean(-1)
        return (each * self.weights).mean()

    def codes(self) -> Tensor:
        """The values, or class indicators with mean 0 and variance 1, ``(rows, outputs)``, float64."""
        if not self.classes:
            return self.y.double()
        columns = [one_hot(y, number) for y, number in zip(self.y.unbind(-1), self.classes, strict=True)]
        indicators = torch.cat(columns, -1).double()
        shares = (indicators * self.weights[:, None]).sum(0) / self.weights.sum()
        return (indicators - shares) / (shares * (1 - shares)).sqrt().clamp(min=1e-6)

    def split(self, fraction: float, seed: int) -> tuple["Data", "Data"]:
        """Rows to train on, and a held-out fraction.

        With one output, every class is held out in proportion, unless a class has a single row or there are more
        classes than rows on one side.
        """
        labels = self.y if len(self.classes) == 1 and self._can_be_stratified(fraction) else None
        parts = train_test_split(np.arange(len(self)), test_size=fraction, random_state=seed, stratify=labels)
        train, held_out = map(self.rows, parts)
        return train.normalised(), held_out.normalised()

    def _can_be_stratified(self, fraction: float) -> bool:
        held_out = math.ceil(fraction * len(self))
        counts = torch.bincount(self.y.flatten())
        return min(held_out, len(self) - held_out) >= len(counts) and int(counts[counts > 0].min()) > 1

    def normalised(self) -> "Data":
        """The data with weights of mean 1."""
        return replace(self, weights=self.weights / self.weights.mean())


def prepared(X: NDArray[Any], y: NDArray[Any] | None, weights: NDArray[Any], task: str) -> Data:
    """Merges equal rows and standardises.

    Args:
        X: Features ``(rows, n)``.
        y: Classes or values, ``(rows,)`` or ``(rows, m)``; None for the features themselves.
        weights: Nonnegative weights of the rows, ``(rows,)``.
        task: ``"classification"``, ``"regression"``, or ``"auto"``.

    Raises:
        ValueError: If no output has more than one class, or fewer than two rows have a positive weight.
    """
    counted = weights > 0
    if counted.sum() < 2:
        raise ValueError(f"two or more rows must have a positive `sample_weight`, but got {counted.sum()}")
    X, weights = X[counted], near_one(weights[counted])
    if y is None:
        X, _, weights = merged(X, np.empty((len(X), 0)), weights)
        features = standardised(X, weights)
        return Data(features, features, mean_one(weights), ())
    y = y[counted].reshape(len(X), -1)
    if task == "regression" or (task == "auto" and np.issubdtype(y.dtype, np.floating)):
        X, values, weights = merged(X, y.astype(np.float64), weights)
        return Data(standardised(X, weights), standardised(values, weights), mean_one(weights), ())
    names, numbers = zip(*(np.unique(column, return_inverse=True) for column in y.T), strict=True)
    if task == "auto" and np.issubdtype(y.dtype, np.integer) and max(map(len, names)) > MANY_CLASSES:
        warnings.warn(
            f"`y` has {max(map(len, names))} different integers, each of which is taken as a class: pass "
            "task='regression' if they are values, or task='classification' if they are not",
            stacklevel=4,  # at the line that calls fit
        )
    if max(map(len, names)) < 2:
        raise ValueError(f"`y` must have two or more classes, but got one class, {names[0].tolist()[0]!r}")
    X, classes, weights = merged(X, np.stack(numbers, -1), weights)
    return Data(standardised(X, weights), torch.as_tensor(classes), mean_one(weights), tuple(map(len, names)))


def merged(X: NDArray[Any], y: NDArray[Any], weights: NDArray[Any]) -> tuple[NDArray[Any], ...]:
    """Each distinct row once, in the order of its bytes, with the sum of the weights of its copies."""
    table = np.ascontiguousarray(np.concatenate([X, y], -1, dtype=np.float64)) + 0.0  # so that -0.0 becomes 0.0
    as_bytes = table.view(np.dtype((np.void, table.itemsize * table.shape[-1]))).ravel()
    _, first, group = np.unique(as_bytes, return_index=True, return_inverse=True)
    return X[first], y[first], np.bincount(group.ravel(), weights)


def standardised(values: NDArray[Any], weights: NDArray[Any]) -> Tensor:
    """The values with mean 0 and variance 1, and constant columns 0; float32."""
    values = near_one(values)
    scaler = StandardScaler().fit(values, sample_weight=weights)
    return torch.as_tensor(scaler.transform(values), dtype=torch.float32)


def near_one(values: NDArray[Any]) -> NDArray[Any]:
    """Each column, or the only one, divided by a power of two near its largest size, so that squares stay in range."""
    _, exponent = np.frexp(np.abs(values).max(0).astype(np.float64))
    scaled: NDArray[Any] = np.ldexp(values.astype(np.float64), -exponent)
    return scaled


def mean_one(weights: NDArray[Any]) -> Tensor:
    """The weights divided by their mean, float32."""
    return torch.as_tensor(weights / weights.mean(), dtype=torch.float32)
