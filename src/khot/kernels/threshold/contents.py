"""Checks of the contents of scores, sums and softness before a threshold is computed."""

from torch import Tensor

from khot._distributed.shards import Shards
from khot._validation import size_advice, softness_error, softness_limits

from ..exact.rows import Span, compute_dtype, row_range


def check_empty(k: Tensor) -> None:
    """Raises a ValueError unless k is 0, for rows without items."""
    if bool((k != 0).any()):
        raise ValueError(f"`k` must be 0 for an empty ground set, but got k={k.max().item():g}")


def check_contents(
    x: Tensor, k: Tensor, scale: Tensor, softness: str, span: Span, shards: Shards | None = None
) -> None:
    """Raises a ValueError for rows with a NaN, or a k or scale out of range; errors call the scale ``softness``."""
    n, (smallest, largest) = x.shape[-1] if shards is None else shards.n, softness_limits(x.dtype)
    feasible = (k >= span.selected) & (k <= span.selected + span.finite)
    normal = (scale >= smallest) & (scale <= largest)
    real = ~span.nan
    if bool((feasible & normal & real).all()):
        return
    row = int((~(feasible & normal & real)).nonzero()[0])
    if not real[row]:
        raise ValueError(f"`x` must not contain NaN, but row {row} of the flattened batch does")
    if not normal[row]:
        raise ValueError(f"{softness_error(softness, scale[row].item(), x.dtype)} (row {row} of the batch)")
    limits = f"0 <= k <= n, but got k={k[row].item():g} with n={n}"
    if 0 <= k[row] <= n:
        selected, unmasked = int(span.selected[row]), int(span.selected[row] + span.finite[row])
        limits = (
            f"lie between the number of +inf entries, {selected}, and that of entries above -inf, {unmasked}, "
            f"but got k={k[row].item():g} with n={n}"
        )
        raise ValueError(f"`k` must {limits} (row {row} of the batch){size_advice(k[row].item(), unmasked)}")
    raise ValueError(f"`k` must satisfy {limits} (row {row} of the batch)")


def check_rows(x: Tensor, k: Tensor, scale: Tensor, softness: str) -> None:
    """:func:`check_contents` of x (..., n), and k and scale of the batch shape, for callers that have no rows yet."""
    rows = x.to(compute_dtype(x)).reshape(-1, x.shape[-1])
    k, scale = (v.to(x.device).reshape(-1) for v in (k, scale))
    check_contents(rows, k, scale, softness, row_range(rows))
