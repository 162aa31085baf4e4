"""Subsets by number, for those of Pyro's tools that need a plain Categorical."""

import math
from typing import Any

import torch
from pyro.distributions import Categorical
from torch import Tensor

from khot._contents import can_look
from khot._shapes import broadcast_shapes
from khot._validation import check_value, checked_index, checked_integer, described
from khot.distributions import SamplingDesign
from khot.distributions.base import unrounded
from khot.distributions.design import MAX_SUPPORT
from khot.distributions.entry import entry
from khot.distributions.sizes import size_varies, sizes_of
from khot.laws.subsets import MAX_RANK, k_hot_vectors_of_rank, rank_of_k_hot_vectors


@entry
def subset_categorical(design: SamplingDesign) -> Categorical:
    r"""A Categorical over the numbers of a sampling design's subsets, for small C(n, k).

    .. math:: P(i) = p(x^{(i)}), \qquad i = 0, \dots, \binom{n}{k} - 1

    where :math:`x^{(0)}, x^{(1)}, \dots` are the rows of ``design.enumerate_support()``. Some of Pyro's tools accept
    only a plain Categorical: ``TraceEnum_ELBO.compute_marginals`` and ``sample_posterior``, ``infer_discrete`` and
    AutoDiscreteParallel. They take this distribution where they refuse the design. In a model it is enumerated, and
    :func:`subset_vector` turns numbers into vectors::

        i = pyro.sample("subset", subset_categorical(design), infer={"enumerate": "parallel"})
        x = subset_vector(i, n, k)

    Plates, ``pyro.markov`` chains of subsets and a k that is a site itself work as with any Categorical.

    Rows of the batch may differ in k. There are then as many numbers as the row with most subsets needs; in other rows,
    the excess numbers have probability 0. Differentiable in the parameter of the design.

    Args:
        design: A design with ``log_prob`` and a fixed size.

    Returns:
        Categorical of the batch shape of the design.

    Raises:
        ValueError: If there are more than ``MAX_SUPPORT`` subsets.
        NotImplementedError: If ``design`` has no ``log_prob``.

    Example:
        >>> subsets = subset_categorical(ConditionalPoisson(logits=torch.tensor([0.0, 0.0, 1.0]), k=2))
        >>> subsets.probs  # of {0, 1}, {0, 2} and {1, 2}
        tensor([0.1554, 0.4223, 0.4223])
        >>> subset_vector(subsets.mode, 3, 2)
        tensor([1., 0., 1.])
    """
    _check_design(design)
    design = unrounded(design)  # in the dtype of the computation
    n, sizes = design.event_shape[0], sizes_of(design, "subset_categorical")
    most, k = max((math.comb(n, k), k) for k in sizes)
    if most > MAX_SUPPORT:
        raise ValueError(
            f"`design` must have at most {MAX_SUPPORT} subsets for subset_categorical, but C({n}, {k}) = {most}"
        )
    like = design.parameter.detach()
    number = torch.arange(most, device=design.k.device).view(-1, *(1,) * len(design.batch_shape))
    if len(sizes) == 1:
        log_prob = design.log_prob(k_hot_vectors_of_rank(n, k, number, like))
    else:
        count = _subsets(n, design.k)
        support = k_hot_vectors_of_rank(n, design.k, torch.minimum(number, count - 1), like)
        log_prob = design.log_prob(support).masked_fill(number >= count, -torch.inf)
    return Categorical(logits=log_prob.movedim(0, -1))


def subset_vector(index: int | Tensor, n: int, k: int | Tensor, *, dtype: torch.dtype | None = None) -> Tensor:
    """The k-hot vectors with these numbers, in the order of ``enumerate_support``: lexicographic by positions.

    Exact in 64-bit integers, for any n and k with C(n, k) < 2⁶³. The inverse of :func:`subset_index`.

    Args:
        index: Numbers of subsets, from 0 to C(n, k) - 1; an int or an integer tensor of any shape.
        n: Number of units.
        k: Number of ones, an int or an integer tensor that broadcasts with ``index``. If a tensor contains several
            sizes, a number that is too large for its own size but not for all of them gives the last subset;
            :func:`subset_categorical` assigns it probability 0.
        dtype: Floating-point dtype of the result; by default torch's default dtype.

    Returns:
        k-hot vectors ``(..., n)``, where ``...`` is the common shape of ``index`` and ``k``.

    Raises:
        ValueError: If C(n, k) does not fit into 63 bits.

    Example:
        >>> subset_vector(torch.tensor([0, 1, 5]), 4, 2)
        tensor([[1., 1., 0., 0.],
                [1., 0., 1., 0.],
                [0., 0., 1., 1.]])
    """
    n, dtype = checked_index("n", n), _checked_dtype(dtype)
    if n < 1:
        raise ValueError(f"`n` must be at least 1, but got {n}")
    number, size = _checked_integers("index", index), _checked_integers("k", k)
    size = size.to(number.device)
    try:
        shape = broadcast_shapes(number.shape, size.shape)
    except RuntimeError:
        raise ValueError(
            f"`k` must broadcast with `index` of shape {tuple(number.shape)}, but got shape {tuple(size.shape)}"
        ) from None
    count = _subsets(n, size)
    if (
        can_look(number)
        and number.numel()
        and count.numel()
        and not bool(((number >= 0) & (number < count.max())).all())
    ):
        raise ValueError(
            f"`index` must satisfy 0 <= index < C(n, k) = {count.max().item()}, but got index from "
            f"{number.min().item()} to {number.max().item()} with n={n}"
        )
    rank = torch.minimum(number, count - 1).expand(shape)
    like = torch.empty(0, dtype=dtype, device=number.device)
    return k_hot_vectors_of_rank(n, size if isinstance(k, Tensor) else int(k), rank, like)


def subset_index(value: Tensor) -> Tensor:
    """The numbers of k-hot vectors among those of the same size, in the order of ``enumerate_support``.

    Exact in 64-bit integers, for any n and k with C(n, k) < 2⁶³. The inverse of :func:`subset_vector`.

    Args:
        value: Vectors of zeros and ones ``(..., n)``, of one size or of several.

    Returns:
        Numbers from 0 to C(n, k) - 1, ``(...)``, int64.

    Raises:
        ValueError: If ``value`` does not consist of zeros and ones, or C(n, k) does not fit into 63 bits.

    Example:
        >>> subset_index(torch.tensor([[1.0, 1.0, 0.0, 0.0], [0.0, 0.0, 1.0, 1.0]]))
        tensor([0, 5])
    """
    check_value(value)
    if value.dim() < 1 or value.shape[-1] < 1:
        raise ValueError(f"`value` must have shape (..., n) with n >= 1, but got shape {tuple(value.shape)}")
    if can_look(value):
        wrong = value.detach()[~((value == 0) | (value == 1))]
        if wrong.numel():
            raise ValueError(f"`value` must contain only zeros and ones, but got {wrong[0].item():g}")
        _subsets(value.shape[-1], (value > 0).sum(-1))
    return rank_of_k_hot_vectors(value.detach())


def _check_design(design: Any) -> None:
    if isinstance(design, type):
        got = described(design, SamplingDesign)
    elif not isinstance(design, SamplingDesign):
        got = f"{type(design).__name__}; number the design itself, before `to_event`, `mask` or an estimator"
    elif size_varies(design):
        got = f"{design}"
    else:
        return
    raise TypeError(f"`design` must be a sampling design of a fixed size, but got {got}")


def _subsets(n: int, k: Tensor) -> Tensor:
    """C(n, k) of each k, after a check that k is from 0 to n and that the result fits into 63 bits."""
    counts = [math.comb(n, size) for size in range(n + 1)]
    if can_look(k) and k.numel():
        smallest, largest = int(k.min()), int(k.max())
        if not 0 <= smallest <= largest <= n:
            raise ValueError(f"`k` must satisfy 0 <= k <= n, but got k from {smallest} to {largest} with n={n}")
        most = max(counts[smallest : largest + 1])
        for size in k.unique().tolist() if most > MAX_RANK else ():
            if counts[size] > MAX_RANK:
                raise ValueError(f"`k` must satisfy C(n, k) < 2**63 to number subsets, but got k={size} with n={n}")
    return torch.tensor([min(count, MAX_RANK) for count in counts], device=k.device)[k]


def _checked_dtype(dtype: Any) -> torch.dtype:
    if dtype is None:
        return torch.get_default_dtype()
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise TypeError(f"`dtype` must be a floating-point torch.dtype or None, but got {dtype!r}")
    return dtype


def _checked_integers(name: str, value: Any) -> Tensor:
    """An int or an integer tensor, as int64."""
    number = checked_integer(name, value)
    if isinstance(number, Tensor):
        return number
    if not -MAX_RANK <= number <= MAX_RANK:
        raise ValueError(f"`{name}` must fit into 63 bits, but got {number}")
    return torch.tensor(number)
