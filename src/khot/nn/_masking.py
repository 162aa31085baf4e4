"""What the modules have in common: a mask that is hard, relaxed or straight-through, with a softness that may learn."""

import math
from collections.abc import Callable
from numbers import Real
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from khot._distributed.placements import is_dtensor
from khot._distributed.shards import shards_of_rows
from khot._validation import check_flag, check_function, check_k, check_scores, checked_positive, looks_at_contents
from khot.relaxations import straight_through_topk, topk_mask
from khot.relaxations.axes import as_axes, as_rows

Relaxation = Callable[..., Tensor]


class Masking(Module):
    """A mask of k entries; the softness is a number, or exp of the parameter ``log_softness``."""

    log_softness: Parameter | None

    def __init__(
        self, softness: float | None, relaxation: Relaxation, straight_through: bool, learn_softness: bool
    ) -> None:
        super().__init__()
        check_function("relaxation", relaxation, "(x, k, softness)")
        check_flag("straight_through", straight_through)
        check_flag("learn_softness", learn_softness)
        if softness is None and (straight_through or learn_softness):
            name = "straight_through" if straight_through else "learn_softness"
            raise ValueError(f"`{name}` needs a `softness`, but got softness=None, the hard mask")
        if isinstance(softness, Tensor):
            raise TypeError("`softness` must be a number or None, but got a tensor; learn_softness=True learns it")
        self.relaxation, self.straight_through = relaxation, bool(straight_through)
        self._softness = None if softness is None else float(checked_positive("softness", softness, torch.Size()))
        start = torch.tensor(math.log(self._softness)) if learn_softness and self._softness else None
        self.register_parameter("log_softness", None if start is None else Parameter(start))

    @property
    def softness(self) -> float | Tensor | None:
        """A number, a tensor with the gradient of ``log_softness``, or None for a hard mask."""
        return self._current_softness()

    def _current_softness(self) -> float | Tensor | None:  # no property, which compilers do not find by `super`
        return self._softness if self.log_softness is None else self.log_softness.exp()

    def mask_of(self, x: Tensor, k: Any, dim: int | tuple[int, ...], hard: bool = False) -> Tensor:
        """The mask of these scores; ``hard`` ignores the softness."""
        softness = self.softness
        if hard or softness is None:
            return topk_mask(x, k, dim)
        if self.straight_through:
            return straight_through_topk(x, k, softness, dim, relaxation=self.relaxation)
        if is_dtensor(x):  # whose axes are better not moved
            return self.relaxation(x, k, softness, dim=dim)
        rows = as_rows(x, dim)
        return as_axes(self.relaxation(rows, k, softness), x, dim)

    def shown_softness(self) -> str:
        """For ``extra_repr``: empty for a hard mask."""
        if self._softness is None:
            return ""
        softness = self._softness if self.log_softness is None else self.log_softness.detach().exp().item()
        name = getattr(self.relaxation, "__name__", repr(self.relaxation))
        shown = f", softness={softness:.4g}, relaxation={name}"
        shown += ", straight_through=True" if self.straight_through else ""
        return shown + (", learn_softness=True" if self.log_softness is not None else "")


def keep_largest(x: Tensor, k: int, dim: int | tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """``keep(x, topk_mask(x, k, dim))`` at the cost of ``topk``, and the entries that are kept, ``(..., k)``.

    Of x of which other processes have parts, infinities in the place of the entries that are not kept.
    """
    check_scores(x, dim, joint=True)
    if has_parts(x):
        mask = topk_mask(x, k, dim)
        return keep(x, mask), x.detach().masked_fill(mask == 0, torch.inf)
    rows = as_rows(x, dim)
    check_k(k, x, rows.shape[:-1], rows.shape[-1])
    values, indices = rows.topk(k, -1, sorted=False)
    if looks_at_contents(values) and bool(values.isnan().any()):  # which topk takes for the largest
        raise ValueError("`x` must not contain NaN")
    kept = torch.zeros_like(rows).scatter(-1, indices, values.masked_fill(values == -torch.inf, 0))
    return as_axes(kept, x, dim), values.detach()


def keep(x: Tensor, mask: Tensor) -> Tensor:
    """The product, in which entries that ``-inf`` excludes are 0."""
    return x.masked_fill(x == -torch.inf, 0) * mask


def has_parts(x: Tensor) -> bool:
    """Whether other processes have parts of x."""
    return not torch.compiler.is_compiling() and (is_dtensor(x) or shards_of_rows() is not None)


def check_size(name: str, value: Any, whole: bool) -> None:
    """``value`` is a number >= 0, an int where the mask is hard."""
    if isinstance(value, bool) or not isinstance(value, int if whole else Real):
        kind = "an int for a hard mask" if whole else "a real number"
        raise TypeError(f"`{name}` must be {kind}, but got {value!r}")
    if not 0 <= float(value) < math.inf:
        raise ValueError(f"`{name}` must be finite and at least 0, but got {value}")


def check_axes(dim: Any) -> None:
    """``dim`` is an int or a tuple of ints."""
    axes = dim if isinstance(dim, tuple) else (dim,)
    if not axes or any(isinstance(axis, bool) or not isinstance(axis, int) for axis in axes):
        raise TypeError(f"`dim` must be an int or a tuple of ints, but got {dim!r}")
