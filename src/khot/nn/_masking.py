"""The shared part of modules with a mask: hard, relaxed or straight-through, with a softness that may be learned."""

import math
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import Parameter

from khot._contents import can_look, looks_at_contents
from khot._distributed.boundary import sharded_form
from khot._distributed.placements import is_dtensor
from khot._module import Module, as_scalar
from khot._torch_internals import is_exporting, is_known
from khot._validation import (
    check_choice,
    check_enough,
    check_flag,
    check_function,
    checked_int,
    checked_positive,
    checked_real,
    is_int,
)
from khot.kernels.exact.reductions import WHOLE, Whole
from khot.kernels.exact.rows import compute_dtype
from khot.relaxations import straight_through_topk, topk_mask
from khot.relaxations.axes import as_axes, as_rows
from khot.relaxations.hard import indices_of_largest

Relaxation = Callable[..., Tensor]


class Masking(Module):
    """A mask of k entries; the softness is a number, or exp of the parameter ``log_softness``."""

    _numbers: ClassVar[tuple[str, ...]] = ("k", "_softness")
    log_softness: Parameter | None
    _softness: float | None

    def __init__(
        self,
        softness: float | None,
        relaxation: Relaxation,
        straight_through: bool,
        learn_softness: bool,
        by: str = "value",
    ) -> None:
        super().__init__()
        check_choice("by", by, ("value", "magnitude"))
        self.by = by
        check_function("relaxation", relaxation, "(x, k, softness)")
        check_flag("straight_through", straight_through)
        check_flag("learn_softness", learn_softness)
        self.relaxation, self.straight_through = relaxation, bool(straight_through)
        self.register_parameter("log_softness", None)
        if learn_softness:
            self.log_softness = Parameter(torch.tensor([math.log(self._checked("_softness", softness, learned=True))]))
        self._softness = softness

    def reset_parameters(self) -> None:
        super().reset_parameters()
        if self.log_softness is not None:
            self.softness = self._softness

    def _checked(self, name: str, value: Any, learned: bool = False) -> Any:
        """The checked ``k``, an int if the mask is hard, or the checked softness."""
        if name == "k":
            return checked_size("k", value, whole=self._softness is None)
        if value is not None:
            if isinstance(value, Tensor):
                raise TypeError("`softness` must be a number or None, but got a tensor; learn_softness=True learns it")
            return float(checked_positive("softness", value, torch.Size()))
        if self.straight_through or learned or self.log_softness is not None:
            name = "straight_through" if self.straight_through else "learn_softness"
            raise ValueError(f"`{name}` needs a `softness`, but got softness=None, which gives the hard mask")
        return None

    @property
    def softness(self) -> float | Tensor | None:
        """A number, a tensor with the gradient of ``log_softness``, or None for a hard mask.

        A number may be assigned at any time; it goes to ``log_softness`` if the softness is learned.
        """
        return self._current_softness()

    @softness.setter
    def softness(self, value: float | None) -> None:
        self._softness = value
        if self.log_softness is not None and self._softness is not None:
            self._overwrite("log_softness", math.log(self._softness))

    def _current_softness(self) -> float | Tensor | None:  # not a property: compilers cannot find one through `super`
        if self.log_softness is not None:
            return as_scalar(self.log_softness).to(compute_dtype(self.log_softness)).exp()
        softness: float | Tensor | None = self._number("_softness")
        return softness

    def _mask_of(
        self, x: Tensor, k: Any, dim: int | tuple[int, ...], hard: bool = False, over: Whole = WHOLE
    ) -> Tensor:
        """The mask of these entries, and of those that other processes hold; ``hard`` ignores the softness."""
        x, softness = self._scores_of(x), self.softness
        if hard or softness is None:
            return hard_mask(x, k, dim, over)
        if self.straight_through:
            return sharded_form(straight_through_topk, over)(x, k, softness, dim=dim, relaxation=self.relaxation)
        if is_dtensor(x):  # its axes should not be moved
            return self.relaxation(x, k, softness, dim=dim)
        rows = as_rows(x, dim)
        return as_axes(sharded_form(self.relaxation, over)(rows, k, softness), x, dim)

    def _scores_of(self, x: Tensor) -> Tensor:
        """The scores that decide which entries are kept, values or absolute values; ``-inf`` excludes an entry."""
        return x if self.by == "value" else x.abs().masked_fill(x == -torch.inf, -torch.inf)

    def _shown_softness(self) -> str:
        """The part of ``extra_repr`` about the softness; empty for a hard mask by value."""
        by = ", by='magnitude'" if self.by == "magnitude" else ""
        if self._softness is None:
            return by
        softness, learned = f"{self._softness:.4g}", self.log_softness
        if learned is not None:  # shards and tensors without data have no number to show
            softness = "?" if is_dtensor(learned) or not can_look(learned) else f"{learned.detach().exp().item():.4g}"
        name = getattr(self.relaxation, "__name__", repr(self.relaxation))
        shown = f", softness={softness}, relaxation={name}"
        shown += ", straight_through=True" if self.straight_through else ""
        return shown + (", learn_softness=True" if learned is not None else "") + by


def hard_mask(x: Tensor, k: Any, dim: int | tuple[int, ...], over: Whole = WHOLE) -> Tensor:
    """:func:`topk_mask` that never marks an entry excluded by ``-inf``, and raises if too few others are left.

    If the contents cannot be read, such a mask has fewer ones.
    """
    if not isinstance(k, Tensor):
        k = checked_int("k", k, "an int or an integer tensor for a hard mask")
    mask = sharded_form(topk_mask, over)(x, k, dim=dim)
    if has_parts(x) or not over.is_whole or not looks_at_contents(x, k):
        return mask.masked_fill(x == -torch.inf, 0)
    check_enough(as_rows(x, dim), k)
    return mask


def places_of_largest(x: Tensor, k: int, *, may_exclude: bool = False) -> Tensor:
    """The indices of the k largest entries of each row of x (..., n), in increasing order.

    Raises if ``-inf`` leaves fewer than k entries and the contents can be read, unless excluded entries may fill up the
    selection.
    """
    indices = indices_of_largest(x, k)
    if not may_exclude and looks_at_contents(x) and bool((x.gather(-1, indices) == -torch.inf).any()):
        check_enough(x, k)
    return indices


def keep(x: Tensor, mask: Tensor) -> Tensor:
    """The product, in which entries excluded by ``-inf`` are 0."""
    if (
        x.device.type == "cpu"
        and x.numel()
        and can_look(x)
        and not has_parts(x)
        and bool(x.detach().amin() > -torch.inf)
    ):
        return x * mask  # no entry is excluded; testing for that is cheaper than replacing entries
    return x.masked_fill(x == -torch.inf, 0) * mask


def keep_masked(x: Tensor, mask: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    """:func:`keep` and the mask, a function of x; both at least in float32, so that the product is rounded once."""
    wide = x.to(compute_dtype(x))
    found = mask(wide)
    return keep(wide, found).to(x.dtype), found


def has_parts(x: Tensor) -> bool:
    """Whether other processes hold parts of x."""
    return not torch.compiler.is_compiling() and is_dtensor(x)


def checked_size(name: str, value: Any, whole: bool) -> float:
    """A number >= 0; an int if the mask is hard."""
    number = checked_int(name, value, "an int for a hard mask") if whole else checked_real(name, value)
    if not 0 <= number < math.inf:
        raise ValueError(f"`{name}` must be finite and at least 0, but got {value}")
    return number


def at_most(k: Any, n: int, device: torch.device) -> Any:
    """The number k, or n if that is smaller; a tensor if an exported program has to find out which."""
    if not is_exporting() or is_known(k <= n):
        return min(k, n)
    # As a Python number, k would add a guard min(k, n) <= n that the compiler cannot prove.
    dtype = torch.int64 if is_int(k) else torch.float64
    return torch.full((), k, dtype=dtype, device=device).clamp(max=n)


def check_axes(dim: Any) -> None:
    """Checks that ``dim`` is an int or a tuple of ints."""
    axes = dim if isinstance(dim, tuple) else (dim,)
    if not axes or not all(map(is_int, axes)):
        raise TypeError(f"`dim` must be an int or a tuple of ints, but got {dim!r}")
