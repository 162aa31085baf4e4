"""Checks of the contents of scores, sums and softness before a threshold is computed."""

from torch import Tensor

from khot._validation import SOFTNESS_LIMITS, size_advice, softness_error

from ..exact.reductions import WHOLE, Whole
from ..exact.rows import Span
from .kinds import Kind


def check_empty(k: Tensor) -> None:
    """Raises a ValueError unless k is 0, for rows without items."""
    if bool((k != 0).any()):
        raise ValueError(f"`k` must be 0 for an empty ground set, but got k={k.max().item():g}")


def check_contents(
    x: Tensor, k: Tensor, scale: Tensor, softness: str, kind: Kind, span: Span, over: Whole = WHOLE
) -> None:
    """Raises a ValueError for rows without a threshold; errors call the scale ``softness``.

    These have a NaN, a k or scale out of range or, for odd maps, an infinite entry.
    """
    if kind.absolute and bool((span.selected > 0).any()):
        row = int((span.selected > 0).nonzero()[0])
        raise ValueError(f"`x` must be finite (0 masks an entry), but row {row} of the flattened batch is not")
    n, (smallest, largest) = over.length(x), SOFTNESS_LIMITS[x.dtype]
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
