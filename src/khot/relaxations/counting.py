r"""The soft count of the entries below a point and its inverse, the soft quantile (LapSum, Theorem 4.1).

Between neighbouring entries a and b of the sorted row, where b follows a, the count is

.. math:: F(t) = j + \tfrac12 \big(R e^{-(x_{j+1} - t)/s} - L e^{-(t - x_j)/s}\big), \qquad
    L = \sum_{i \le j} e^{-(x_j - x_i)/s}, \quad R = \sum_{i > j} e^{-(x_i - x_{j+1})/s},

with j entries below t. Two sums over the row give L and R for all pairs of neighbours, and F(t) = c is a quadratic
equation in :math:`e^{t/s}`. Two Newton steps from its root, in differentiable operations, provide the derivatives.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from khot._contents import looks_at_contents
from khot._distributed.boundary import of_rows
from khot._validation import check_floating, check_rows, check_softness, check_softness_contents, checked_real
from khot.kernels.call import Call
from khot.kernels.exact.rows import in_rows_of
from khot.kernels.operators.autograd import with_derivatives_of
from khot.kernels.order import sorted_rows
from khot.kernels.order.sums import FAR

from .laplace import carried, decayed_sums, positions

STEEPEST = 60.0  # logarithm of the largest slope of a quantile in q, in scales; larger ones overflow in float32


class _Row(NamedTuple):
    """Sorted rows. Excluded entries have weight 0 and the value of the lowest other entry."""

    half: Tensor  # half the entries (..., n), so that differences do not overflow
    scale: Tensor  # half the scale (..., 1)
    weight: Tensor  # 1, or 0 for excluded entries
    before: Tensor  # weighted, decayed sums over everything to the left of each entry; `after`: to the right
    after: Tensor
    below: Tensor  # total weight (..., n + 1) of the first j entries


class _Sides(NamedTuple):
    """The entries on either side of points that have j entries below them."""

    left: Tensor  # half the neighbouring entry
    right: Tensor
    mass_left: Tensor  # L and R; 0 if there is no entry on that side
    mass_right: Tensor
    below: Tensor  # weight of the entries below


def soft_count(x: Tensor, points: float | Tensor, scale: float | Tensor = 1.0, *, dim: int = -1) -> Tensor:
    r"""Counts the entries below each point, softly (third argument: ``scale``; ``dim`` by keyword).

    .. math:: F(t) &= \sum_i \mathrm{Lap}((t - x_i)/s), \\
        \mathrm{Lap}(u) &= \tfrac12 e^{u} \text{ for } u < 0, \; 1 - \tfrac12 e^{-u} \text{ else}

    Tends to the number of entries below t as ``scale -> 0``, where an entry equal to t counts as one half, and to
    ``n / 2`` as it grows. The count increases with t, and ``soft_count(x, x) + 1/2`` are the soft ranks. It is
    differentiable to any order in ``x``, ``points`` and ``scale``, in reverse and forward mode. Takes O((n + m) log n)
    time.

    Args:
        x: Scores with ``n`` entries along ``dim``; ``-inf`` excludes an entry, which then lies below every point.
        points: Finite points, with m entries along ``dim`` and otherwise the shape of ``x``; a tensor ``(m,)`` for all
            rows; or a number, also as a tensor without dimensions.
        scale: Positive softness.
        dim: Axis of the entries, and of the points.

    Returns:
        Tensor of the dtype of ``x``, in ``[0, n]``, with m entries along ``dim``; for a number without this axis.

    Raises:
        ValueError: If ``scale`` is not positive, shapes do not fit, ``x`` contains NaN or ``inf``, or ``points`` are
            not finite. See :mod:`khot.relaxations`.
        TypeError: If an argument has the wrong type or dtype.

    References:
        [1] Struski et al. (2025), "LapSum - One Method to Differentiate Them All", section 3.

    Example:
        >>> soft_count(torch.tensor([0.0, 3.0, 1.0]), torch.tensor([-1.0, 2.0]), scale=0.5)
        tensor([0.0770, 1.9908])
    """
    counts: Callable[..., Tensor] = _count_below_each if _has_axis(points) else _count_below_one
    return counts(x, points, scale, dim=dim)


def _count_below(call: Call, x: Tensor, points: float | Tensor, scale: float | Tensor, dim: int) -> Tensor:
    rows, points = _checked(x, scale, "points", points, dim)
    is_excluded = rows == -torch.inf
    row = _sorted(call, rows, scale, is_excluded)
    half = points.double() * 0.5 + torch.zeros_like(row.scale)  # under a vmap over the rows: a row of points for each
    place = _places(row.half.detach(), half.detach())
    sides = _sides(row, place)
    left, right = half - sides.left, sides.right - half
    left = _decayed(sides.mass_left, left, row.scale, (left / row.scale).detach())
    right = _decayed(sides.mass_right, right, row.scale, (right / row.scale).detach())
    count = sides.below + 0.5 * (right - left)
    return (count + is_excluded.sum(-1, keepdim=True)).to(x.dtype).movedim(-1, dim)


def soft_quantile(x: Tensor, q: float | Tensor, scale: float | Tensor = 1.0, *, dim: int = -1) -> Tensor:
    r"""Relaxes quantiles (third argument: ``scale``; ``dim`` by keyword).

    .. math:: t = F^{-1}(q n), \quad F(t) = \sum_i \mathrm{Lap}((t - x_i)/s)

    This is the inverse of :func:`soft_count`. As ``scale -> 0`` it tends to entry number ``ceil(q n)`` of the sorted
    row or, if q n is an integer below n, to the midpoint between two entries. It increases with q, does not depend on
    the order of ``x``, and shifts by c with ``x + c``. It is differentiable to third order in ``x``, ``q`` and
    ``scale``, in reverse and forward mode. For each q, the derivatives with respect to the entries are nonnegative and
    sum to one. The derivative in q is limited where it would overflow, in the middle of a gap of very many scales.
    Takes O((n + m) log n) time.

    Args:
        x: Scores with ``n`` entries along ``dim``, n at least 1; ``-inf`` excludes an entry, which then counts as below
            all others: if m entries are excluded, quantiles with q n at most m are ``-inf``.
        q: Levels in (0, 1), with m entries along ``dim`` and otherwise the shape of ``x``; a tensor ``(m,)`` for all
            rows; or a number, also as a tensor without dimensions.
        scale: Positive softness.
        dim: Axis of the entries, and of the quantiles.

    Returns:
        Tensor of the dtype of ``x``, with m entries along ``dim``, where :func:`torch.quantile` has them along a new
        first axis; for a number without this axis, as there.

    Raises:
        ValueError: If ``scale`` is not positive, shapes do not fit, ``x`` contains NaN or ``inf``, or ``q`` is not in
            (0, 1). See :mod:`khot.relaxations`.
        TypeError: If an argument has the wrong type or dtype.

    References:
        [1] Struski et al. (2025), "LapSum - One Method to Differentiate Them All", Theorem 4.1.

    Example:
        >>> soft_quantile(torch.tensor([0.0, 3.0, 1.0]), torch.tensor([0.2, 0.5]), scale=0.5)
        tensor([0.0279, 1.0534])
    """
    quantiles: Callable[..., Tensor] = _each_quantile if _has_axis(q) else _one_quantile
    return quantiles(x, q, scale, dim=dim)


def _quantiles(call: Call, x: Tensor, q: float | Tensor, scale: float | Tensor, dim: int) -> Tensor:
    rows, q = _checked(x, scale, "q", q, dim)
    is_excluded = rows == -torch.inf
    number = is_excluded.sum(-1, keepdim=True)
    row = _sorted(
        call, rows, scale, is_excluded & (number < rows.shape[-1])
    )  # if all are excluded, treat none as excluded
    target = q.double() * rows.shape[-1] - number
    is_lowest = target <= 0
    target = torch.where(is_lowest, 0.5 * row.below[..., -1:], target)
    t = (2 * _half_quantile(row, target)).masked_fill(is_lowest, -torch.inf)
    return t.to(x.dtype).movedim(-1, dim)


def _has_axis(value: float | Tensor) -> bool:
    """Whether points or levels have an axis, which the results then have, too."""
    return isinstance(value, Tensor) and value.dim() > 0


@of_rows(rows=("x", "points"))
def _count_below_each(_call: Call, x: Tensor, points: Tensor, scale: float | Tensor, *, dim: int) -> Tensor:
    return _count_below(_call, x, points, scale, dim)


@of_rows(numbers=("points",), batch_first=True)
def _count_below_one(_call: Call, x: Tensor, points: float | Tensor, scale: float | Tensor, *, dim: int) -> Tensor:
    return _count_below(_call, x, points, scale, dim).squeeze(dim)


@of_rows(rows=("x", "q"))
def _each_quantile(_call: Call, x: Tensor, q: Tensor, scale: float | Tensor, *, dim: int) -> Tensor:
    return _quantiles(_call, x, q, scale, dim)


@of_rows(numbers=("q",), batch_first=True)
def _one_quantile(_call: Call, x: Tensor, q: float | Tensor, scale: float | Tensor, *, dim: int) -> Tensor:
    return _quantiles(_call, x, q, scale, dim).squeeze(dim)


def _checked(x: Tensor, scale: float | Tensor, name: str, value: float | Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """The rows, and the points or levels (..., m) that belong to them."""
    check_rows(x, dim)
    rows = x.movedim(dim, -1)
    check_softness("scale", scale, x, rows.shape[:-1])
    if rows.shape[-1] == 0:
        raise ValueError(f"`x` must have at least one entry along `dim`, but got shape {tuple(x.shape)}")
    if isinstance(value, Tensor):
        check_floating(name, value)
        value = value.unsqueeze(0) if value.dim() == 0 else value
        beside = value.movedim(dim, -1) if value.dim() == x.dim() else value
        if value.dim() != 1 and (value.dim() != x.dim() or beside.shape[:-1] != rows.shape[:-1]):
            raise ValueError(
                f"`{name}` must have shape (m,), or that of `x`, {tuple(x.shape)}, except along dim={dim}, "
                f"but got {tuple(value.shape)}"
            )
        value = beside
    else:
        value = rows.new_full((1,), checked_real(name, value, "a real number or a torch.Tensor"), dtype=torch.float64)
    _check_contents(rows, scale, name, value)
    return rows, value.expand(*rows.shape[:-1], value.shape[-1])


def _check_contents(x: Tensor, scale: float | Tensor, name: str, value: Tensor) -> None:
    if looks_at_contents(x) and not bool((x < torch.inf).all()):
        wrong = x[~(x < torch.inf)][0].item()
        raise ValueError(f"`x` must be finite or -inf, but contains {wrong}")
    if isinstance(scale, Tensor) and looks_at_contents(scale):
        check_softness_contents("scale", scale, x.dtype)
    if not looks_at_contents(value):
        return
    right, range_ = (value.isfinite(), "finite") if name == "points" else ((value > 0) & (value < 1), "in (0, 1)")
    if not bool(right.all()):
        raise ValueError(f"`{name}` must be {range_}, but contains {value[~right][0].item()}")


def _sorted(call: Call, x: Tensor, scale: float | Tensor, is_excluded: Tensor) -> _Row:
    lowest = x.detach().masked_fill(is_excluded, torch.inf).amin(-1, keepdim=True)
    lowest = lowest.masked_fill(lowest.isinf(), 0.0)
    x = torch.where(is_excluded | (x == -torch.inf), lowest, x)
    order = sorted_rows(call, x)[1]
    half, column = x.gather(-1, order).double() * 0.5, in_rows_of(x, scale).unsqueeze(-1) * 0.5
    z, gap = positions(half, column)
    weight = (~is_excluded).to(z.dtype).gather(-1, order)
    before, after = decayed_sums(z, gap, weight, weight.clone())  # Dynamo refuses the same tensor twice
    return _Row(half, column, weight, before, after, pad(weight.cumsum(-1), (1, 0)))


def _places(ascending: Tensor, values: Tensor) -> Tensor:
    """How many entries of each row (..., n) are at most each value (..., m)."""
    m = values.shape[-1]
    if m == 1:  # under a vmap over the values, torch moves a single column without a copy, and warns that it did so
        values = values.expand(*values.shape[:-1], 2)
    return torch.searchsorted(ascending.contiguous(), values.contiguous(), right=True)[..., :m]


def _sides(row: _Row, place: Tensor) -> _Sides:
    """The two sides of points that have ``place`` entries (..., m) below them."""
    n = row.half.shape[-1]
    lower, upper = (place - 1).clamp(min=0), place.clamp(max=n - 1)
    mass_left = (row.weight + row.before).gather(-1, lower).masked_fill(place == 0, 0.0)
    mass_right = (row.weight + row.after).gather(-1, upper).masked_fill(place == n, 0.0)
    left, right = row.half.gather(-1, lower), row.half.gather(-1, upper)
    return _Sides(left, right, mass_left, mass_right, row.below.gather(-1, place))


class _Root(NamedTuple):
    """A point t with a given count. All fields are constants.

    Attributes:
        half: t / 2.
        nearer: The distance to the nearer of its two neighbours, in scales.
        left: How much farther the left neighbour is; infinite if there is none.
        right: The same for the right neighbour.
    """

    half: Tensor
    nearer: Tensor
    left: Tensor
    right: Tensor


def _half_quantile(row: _Row, target: Tensor) -> Tensor:
    """Half the t that has the given weight below it (..., m), between 0 and the weight of the row."""
    constant = _Row(*(value.detach() for value in row))
    at_entries = constant.below[..., :-1] + 0.5 * (constant.weight + constant.after - constant.before)
    place = _places(at_entries, target.detach())
    root, sides = _root(_sides(constant, place), constant.scale, target.detach()), _sides(row, place)
    t = root.half
    for _ in range(2):
        # Excess of the count and its slope, both multiplied by e^nearer, so that neither underflows.
        left = _decayed(sides.mass_left, t - sides.left, row.scale, root.left)
        right = _decayed(sides.mass_right, sides.right - t, row.scale, root.right)
        excess = (sides.below - target) * root.nearer.clamp(max=STEEPEST).exp() + 0.5 * (right - left)
        t = t - row.scale * (excess - excess.detach()) / (0.5 * (right + left))
    return with_derivatives_of(root.half, t)


def _decayed(mass: Tensor, apart: Tensor, scale: Tensor, distance: Tensor) -> Tensor:
    """The mass times e^-distance, with the derivatives of ``apart / scale`` unless that overflows."""
    is_unfelt = (mass == 0) | (distance > FAR)
    apart = apart.masked_fill(is_unfelt | (apart / scale).detach().isinf(), 0.0)
    distance = carried(distance.masked_fill(is_unfelt, 0.0), apart / scale)
    return (mass * (-distance).exp()).masked_fill(is_unfelt, 0.0)


def _root(sides: _Sides, scale: Tensor, target: Tensor) -> _Root:
    r"""The t between two neighbours at which the count equals the target.

    Let r be the target minus the entries below, and g the gap in scales. The distance u to the left neighbour solves
    :math:`R e^{u - g} - L e^{-u} = 2r`, so :math:`L e^{-u} = \sqrt{r^2 + L R e^{-g}} - r`. The distance to the right
    neighbour satisfies the same equation with r negated. The code uses whichever has no cancellation; for r = 0 both
    are equal.
    """
    missing, width = target - sides.below, (sides.right - sides.left) / scale
    log_left, log_right = sides.mass_left.log(), sides.mass_right.log()
    log_root = (missing.square() + (log_left + log_right - width).exp()).sqrt().add(missing.abs()).log()
    near_left = torch.minimum((log_left - log_root).clamp(min=0), width.masked_fill(sides.mass_right == 0, torch.inf))
    near_right = torch.minimum((log_right - log_root).clamp(min=0), width.masked_fill(sides.mass_left == 0, torch.inf))
    lean = log_left - log_right  # how much farther the balanced point is from the left neighbour
    from_left, from_right, is_balanced = missing < 0, missing > 0, missing == 0
    left = torch.where(from_left, near_left, torch.where(from_right, width - near_right, 0.5 * (width + lean)))
    right = torch.where(from_left, width - near_left, torch.where(from_right, near_right, 0.5 * (width - lean)))
    left, right = left.masked_fill(sides.mass_left == 0, torch.inf), right.masked_fill(sides.mass_right == 0, torch.inf)
    nearer, difference = torch.minimum(left, right), torch.where(is_balanced, lean, left - right)
    half = torch.where(from_left, sides.left + near_left * scale, sides.right - near_right * scale)
    middle = sides.left + 0.5 * (sides.right - sides.left) + 0.5 * lean * scale
    half = torch.where(is_balanced, middle, half)
    return _Root(half, nearer, difference.clamp(min=0), (-difference).clamp(min=0))
