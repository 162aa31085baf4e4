"""Projections onto permutahedra, and soft ranks and sorting based on them: alternatives to the LapSum order maps."""

import torch
from torch import Tensor

from khot._contents import looks_at_contents
from khot._distributed.boundary import of_rows
from khot._validation import check_rows, check_softness, check_strided
from khot.kernels import order as kernel
from khot.kernels.call import Call
from khot.kernels.isotonic.exact import block_sums
from khot.kernels.order import sorted_rows

from .excluded import filled_below, may_have_excluded, with_lowest_first
from .isotonic import column, of_pooled, solve_blocks
from .order_map import OrderMap, has_excluded, sorted_scores
from .sparse import check_exponent


@of_rows(rows=("x", "w"))
def permutahedron_projection(
    _call: Call, x: Tensor, w: Tensor, strength: float | Tensor = 1.0, *, dim: int = -1, p: float = 2.0
) -> Tensor:
    r"""Projects ``x / strength`` onto the permutahedron of w (third argument: ``strength``; ``dim`` by keyword).

    .. math:: y &= \arg\max_{y \in \mathcal{P}(w)} \langle x, y \rangle - \tfrac{\lambda}2 \|y\|^2 \\
        &= \arg\min_{y \in \mathcal{P}(w)} \tfrac12 \|y - x/\lambda\|^2

    The permutahedron is the convex hull of all permutations of w. If w has k ones and n - k zeros, y is the sparse
    top-k mask with p = 2. For a small enough ``strength``, y is w in the order of ``x``; as it grows, y tends to the
    mean of w. The projection keeps the order of ``x``, has the sum of w, and is invariant to ``x + c``. It is
    differentiable in ``x``, ``w`` and ``strength``, in reverse and forward mode; it is piecewise linear in
    ``x / strength`` and ``w``, with exact zeros in the Jacobian. Excluded entries share the smallest weights.

    With another p the regulariser is :math:`\tfrac{\lambda}p \|y\|_p^p`, and y is smoother: it is once differentiable
    in ``x`` wherever the entries of a pooled block are not 0. The blocks are those of :func:`isotonic_lp`, and
    derivatives are exact to third order, as there.

    Args:
        x: Scores with ``n`` entries along ``dim``; ``-inf`` excludes an entry.
        w: Finite weights in any order: ``(n,)``, or of the shape of ``x``.
        strength: Positive softness.
        dim: Axis of the entries.
        p: Norm of the regulariser, ``1 < p <= 2``.

    Returns:
        Tensor like ``x``.

    Raises:
        ValueError: If ``strength`` is not positive, ``p`` is out of range, shapes do not fit, ``x`` contains NaN or
            ``inf``, or ``w`` is not finite. See :mod:`khot.relaxations`.

    References:
        [1] Blondel, Teboul, Berthet, Djolonga (2020), "Fast Differentiable Sorting and Ranking", Proposition 3.
        [2] Lim, Wright (2016), "Efficient Bregman Projections onto the Permutahedron and Related Polytopes".
        [3] Sander et al. (2023), "Fast, Differentiable and Sparse Top-k: a Convex Analysis Perspective", section 5, for
            p other than 2.

    Example:
        >>> permutahedron_projection(torch.tensor([0.2, 1.0, 0.5]), torch.tensor([1.0, 1.0, 0.0]), 0.5)
        tensor([0.2000, 1.0000, 0.8000])
    """
    check_rows(x, dim)
    _check_weights(w, x, dim)
    check_exponent(p)
    dtype, x = x.dtype, x.movedim(dim, -1)
    w = (w.expand(x.shape) if w.dim() == 1 else w.movedim(dim, -1)).double().sort(-1, descending=True).values
    check_softness("strength", strength, x, x.shape[:-1])
    strengths = column(strength, x)
    if may_have_excluded(x):  # entries that are farther apart than their weights do not pool
        x = filled_below(x.double(), 4 * strengths * (_root(w, p)[..., :1] - _root(w, p)[..., -1:] + 1)).x
    return _project(_call, x.double(), w, strengths, "x,w", float(p)).to(dtype).movedim(-1, dim)


def _root(w: Tensor, p: float) -> Tensor:
    """The (s - v) / strength at which a single entry has the weight w."""
    return w.detach().abs().pow(p - 1).copysign(w)


def _project(call: Call, x: Tensor, w: Tensor, strength: Tensor, names: str, p: float = 2.0) -> Tensor:
    """The projection for w in descending order."""
    order = sorted_rows(call, x, descending=True)[1]
    y = _project_sorted(x.gather(-1, order).double(), w, strength, names, p)
    return torch.zeros_like(y).scatter(-1, order, y)


def _project_sorted(s: Tensor, w: Tensor, strength: Tensor, names: str, p: float = 2.0) -> Tensor:
    """The projection of s for s and w in descending order."""
    middle = (s[..., :1] / 2 + s[..., -1:] / 2).detach()  # a shift that leaves the result the same but keeps its digits
    s = s - middle.nan_to_num(0.0, 0.0, 0.0)
    v, blocks = solve_blocks(s, w, strength, names, p)
    size = block_sums(torch.ones_like(s), blocks)
    mean = block_sums(s, blocks) / size
    s = s - mean
    # (s - v) / strength, where v is the mean of s - strength * w over its block; exactly w where nothing is pooled.
    y = s / strength + block_sums(w, blocks) / size
    if p != 2:
        y = torch.where(size == 1, w, of_pooled(s, w, strength, p, v - mean.detach(), blocks))
    return y


def _rank(values: Tensor, order: Tensor, strength: float | Tensor) -> Tensor:
    s = values.double().flip(-1)
    y = _project_sorted(s, _places(s), column(strength, s), "x,places").flip(-1)
    return torch.zeros_like(y).scatter(-1, order, y).to(values.dtype)


def _sort(values: Tensor, order: Tensor, strength: float | Tensor) -> Tensor:
    w = values.double().flip(-1)
    return _project_sorted(_places(w), w, column(strength, w), "places,x").flip(-1).to(values.dtype)


def _places(x: Tensor) -> Tensor:
    """n, ..., 1 for each row (..., n) of x."""
    return torch.arange(x.shape[-1], 0, -1, dtype=x.dtype, device=x.device).expand(x.shape)


_RANK = OrderMap(_rank, kernel.permutahedron_rank)
_SORT = OrderMap(_sort, kernel.permutahedron_sort)


def _check_weights(w: Tensor, x: Tensor, dim: int) -> None:
    if not isinstance(w, Tensor):
        raise TypeError(f"`w` must be a torch.Tensor, but got {type(w).__name__}")
    check_strided("w", w)
    if w.is_complex() or w.dtype == torch.bool:
        raise TypeError(f"`w` must be real, but got a tensor of dtype {w.dtype}")
    if w.shape not in (x.shape, (x.shape[dim],)):
        raise ValueError(
            f"`w` must have the shape of `x`, {tuple(x.shape)}, or ({x.shape[dim]},), but got {tuple(w.shape)}"
        )


@of_rows()
def permutahedron_rank(_call: Call, x: Tensor, strength: float | Tensor = 1.0, *, dim: int = -1) -> Tensor:
    r"""Relaxes the ranks by projection onto the permutahedron (second argument: ``strength``; ``dim`` by keyword).

    .. math:: r = \arg\min_{r \in \mathcal{P}(1, \dots, n)} \tfrac12 \|r - x/\lambda\|^2

    The smallest entry has rank 1, as with :func:`soft_rank`. The result is exactly the ranks once all gaps of the
    sorted ``x`` are at least ``strength``, and tends to ``(n + 1) / 2`` as it grows. It is differentiable as
    :func:`permutahedron_projection` is.

    Args:
        x: Scores with ``n`` entries along ``dim``; ``-inf`` excludes an entry.
        strength: Positive softness.
        dim: Axis of the entries.

    Returns:
        Tensor like ``x``, in ``[1, n]``.

    Raises:
        ValueError: As for :func:`permutahedron_projection`.
        TypeError: As for :func:`permutahedron_projection`.

    References:
        [1] Blondel, Teboul, Berthet, Djolonga (2020), "Fast Differentiable Sorting and Ranking": soft ranking, where
            the largest entry has rank 1.

    Example:
        >>> permutahedron_rank(torch.tensor([0.0, 3.0, 1.0]))
        tensor([1., 3., 2.])
    """
    rows, _ = sorted_scores(_call, x, strength, False, dim, "strength")
    return _RANK(_call, *rows).to(x.dtype).movedim(-1, dim)


@of_rows()
def permutahedron_sort(_call: Call, x: Tensor, strength: float | Tensor = 1.0, *, dim: int = -1) -> Tensor:
    r"""Relaxes ascending order by projection onto a permutahedron (second argument: ``strength``; ``dim`` by keyword).

    .. math:: y = \arg\min_{y \in \mathcal{P}(x)} \tfrac12 \|y - (1, \dots, n)/\lambda\|^2

    The result is exactly the sorted entries for ``strength`` up to the inverse of their largest gap, and tends to their
    mean as it grows. It increases along ``dim`` and does not depend on the order of ``x``. It is differentiable as
    :func:`permutahedron_projection` is.

    Args:
        x: Scores with ``n`` entries along ``dim``; ``-inf`` excludes an entry.
        strength: Positive softness.
        dim: Axis of the entries, and of the sorted entries.

    Returns:
        Tensor like ``x``.

    Raises:
        ValueError: As for :func:`permutahedron_projection`.
        TypeError: As for :func:`permutahedron_projection`.

    References:
        [1] Blondel, Teboul, Berthet, Djolonga (2020), "Fast Differentiable Sorting and Ranking": soft sorting, there
            in descending order.

    Example:
        >>> permutahedron_sort(torch.tensor([0.0, 3.0, 1.0]), 0.5)
        tensor([0., 1., 3.])
    """
    check_rows(x, dim)
    items, count = x.movedim(dim, -1), None
    check_softness("strength", strength, items, items.shape[:-1])
    values, order = sorted_rows(_call, items)
    if not looks_at_contents(items) or has_excluded(values, strength, "strength"):
        count = (values == -torch.inf).sum(-1, keepdim=True)
        # They then pool neither with each other nor with the other entries.
        highest = values[..., -1:].nan_to_num(neginf=0.0)
        values, items = (torch.where(v == -torch.inf, highest, v) for v in (values, items))
    y = _SORT(_call, items, values, order, strength)
    return (y if count is None else with_lowest_first(y, count)).movedim(-1, dim)
