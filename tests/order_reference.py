"""The order maps of one row by their definitions, in 80-bit arithmetic: sums over all pairs, and bisection.

Every distance is that of two entries, or of an entry and an offset from one, so that no entry far away costs digits.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.longdouble]
FAR = np.longdouble(12000.0)  # scales; exp of minus that is 0 in 80 bits, and of minus half of it in 64


class OrderReference(NamedTuple):
    """A map, its derivatives contracted with g, and how large the terms were of which each derivative is a sum."""

    value: Array
    grad_x: Array
    grad_scale: np.longdouble
    size: np.longdouble


def _distances(x: Array, scale: np.longdouble) -> Array:
    """(x_i - x_k) / scale; 80-bit numbers overflow nowhere near the largest double."""
    return np.clip((x[:, None] - x[None, :]) / scale, -FAR, FAR)


def _count(u: Array) -> Array:
    """Sum of Laplace distribution functions over the first axis."""
    below, above = np.minimum(u, 0), np.maximum(u, 0)
    return np.where(u < 0, np.exp(below) / 2, 1 - np.exp(-above) / 2).sum(0)


def soft_rank(x: Array, scale: float, g: Array) -> OrderReference:
    """1/2 + sum of Lap((x_i - x_k) / scale) over k."""
    x, g, s = x.astype(np.longdouble), g.astype(np.longdouble), np.longdouble(scale)
    d = _distances(x, s)
    density = np.exp(-np.abs(d)) / 2
    flow = density * (g[:, None] - g[None, :])
    terms = density * (np.abs(g)[:, None] + np.abs(g)[None, :])
    return OrderReference(
        np.longdouble(0.5) + _count(d.T), flow.sum(1) / s, -(flow * d).sum() / (2 * s), terms.sum(1).max() / s
    )


class _Points(NamedTuple):
    """Where the count passes the targets.

    Attributes:
        item: The number of the entry that each is near to.
        offset: From there, in scales.
        distance: From all entries (n, points).
        share: d point / d entry (n, points).
    """

    item: NDArray[np.int64]
    offset: Array
    distance: Array
    share: Array


def _points(x: Array, scale: np.longdouble, targets: Array) -> _Points:
    n, d = len(x), _distances(x, scale)  # d[i, k] = z_i - z_k
    order = np.argsort(x, kind="stable")
    at_items = _count(d.T)[order]
    item, offset = np.zeros(len(targets), np.int64), np.zeros(len(targets), np.longdouble)
    for j, target in enumerate(targets):
        below = int((at_items < target).sum())  # the point lies between the sorted entries below - 1 and below
        found = []
        for near, sign in ((below - 1, 1), (below, -1)):
            if not 0 <= near < n:
                continue
            other = near + sign
            high = d[order[other], order[near]] * sign if 0 <= other < n else np.longdouble(100 + 2 * np.log(n + 1))
            low = np.longdouble(0)
            for _ in range(100):
                middle = (low + high) / 2
                above = _count((d[order[near], :] + sign * middle)[:, None])[0] > target
                low, high = (low, middle) if above == (sign > 0) else (middle, high)
            found.append((low, sign, order[near]))
        balanced = below == target and 0 < below < n  # only the tails fix it, which may all underflow
        if balanced:
            left, right = order[below - 1], order[below]
            log_a = np.log(np.exp(-np.abs(d[left, order[:below]])).sum())
            log_b = np.log(np.exp(-np.abs(d[right, order[below:]])).sum())
            found = [((d[right, left] + log_a - log_b) / 2, 1, left)]
        size, sign, item[j] = min(found, key=lambda f: f[0])
        offset[j] = sign * size
    distance = offset[None, :] + d[item, :].T
    weight = np.exp(np.abs(distance).min(0)[None, :] - np.abs(distance))
    return _Points(item, offset, distance, weight / weight.sum(0))


def soft_sort(x: Array, scale: float, g: Array) -> OrderReference:
    """The quantiles of 1/2, 3/2, ..."""
    x, g, s = x.astype(np.longdouble), g.astype(np.longdouble), np.longdouble(scale)
    at = _points(x, s, np.arange(len(x)) + np.longdouble(0.5))
    lever = (at.share * at.distance).sum(0)
    return OrderReference(x[at.item] + s * at.offset, at.share @ g, g @ lever, np.abs(g).max())


def soft_permutation(x: Array, scale: float, g: Array) -> OrderReference:
    """Lap(b_j - z_i) - Lap(b_{j-1} - z_i) between the quantiles b of 1, 2, ..."""
    x, g, s = x.astype(np.longdouble), g.astype(np.longdouble), np.longdouble(scale)
    n = len(x)
    at = _points(x, s, np.arange(1, n).astype(np.longdouble))
    u = at.distance
    lap = np.where(u < 0, np.exp(np.minimum(u, 0)) / 2, 1 - np.exp(-np.maximum(u, 0)) / 2)
    upper, lower = np.concatenate([lap, np.ones((n, 1))], 1), np.concatenate([np.zeros((n, 1)), lap], 1)
    tail = np.where(u > 0, np.exp(-np.maximum(u, 0)) / 2, 1 - np.exp(np.minimum(u, 0)) / 2)
    above, under = np.concatenate([tail, np.zeros((n, 1))], 1), np.concatenate([np.ones((n, 1)), tail], 1)
    value = np.where(lower > 0.5, under - above, upper - lower)
    density = np.exp(-np.abs(u)) / 2
    flow = density * (g[:, :-1] - g[:, 1:])
    pull = flow.sum(0)
    lever = (at.share * u).sum(0)
    grad_x = (at.share @ pull - flow.sum(1)) / s
    size = (density * (np.abs(g[:, :-1]) + np.abs(g[:, 1:]))).sum()
    return OrderReference(value, grad_x, (flow * (lever[None, :] - u)).sum() / s, size / s)
