"""Designs whose parameter is a DTensor: each method by the rows of the batch that this process has.

Rows are whole as a rule: where they are cut they are gathered, when the design is made, and results with an entry for
each unit are cut again. Then no method communicates but for draws, whose seed all processes have from the first one. A
draw is a function of that seed, its number and that of its row and unit in the whole batch, so that any number of
processes draw the same, and no two the same for different rows.

A design that knows what to do with parts of rows, as order sampling does, keeps them. Members for which its
``works_on_parts`` holds are then those of the parts that are here, and exchange a few numbers a row; for the others the
rows are gathered at the first call of one.
"""

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from khot._distributed.batch import SpreadBatch
from khot._distributed.shards import Shards, spread_over
from khot._tracing import broadcast_shapes
from khot._validation import check_generator, checked_shape
from khot.kernels.random_numbers.philox import draw_seed


def by_rows_here(name: str, axes: int, member: Callable[..., Any]) -> Callable[..., Any]:
    """The member of a design; of one that is spread over processes, by the design of the rows that are here."""

    @functools.wraps(member)
    def call(design: Any, *args: Any, **kwargs: Any) -> Any:
        if design.spread is None:
            return member(design, *args, **kwargs)
        return _CALLS.get(name, _found)(design, name, axes, *args, **kwargs)

    return call


class _Here(NamedTuple):
    """The design of what is here of the rows for a member: whole rows, or parts of them."""

    design: Any
    spread: SpreadBatch
    shards: Shards | None

    @classmethod
    def of(cls, design: Any, name: str) -> "_Here":
        if not design.works_on_parts(name):
            return cls(design.rows_here, design.spread, None)
        spread = design.spread.in_parts()
        return cls(design.parts_here, spread, spread.shards)

    def telling(self) -> AbstractContextManager[None]:
        """In this block functions of rows are told who has the other parts."""
        return nullcontext() if self.shards is None else spread_over(self.shards)


def _found(design: Any, name: str, axes: int, *args: Any, **kwargs: Any) -> Tensor:
    here = _Here.of(design, name)
    with here.telling():
        found = getattr(here.design, name)
        local = found(*args, **kwargs) if callable(found) else found
    return here.spread.together(local, axes)


def _draws(
    design: Any, name: str, axes: int, sample_shape: Any = torch.Size(), *, generator: torch.Generator | None = None
) -> Tensor:
    local, spread, shards = here = _Here.of(design, name)
    check_generator(generator, local.parameter.device)
    shape, rows = checked_shape("sample_shape", sample_shape), local.batch_shape.numel()

    def draw_rows(start: int, stop: int) -> Tensor:
        is_local = len(local.batch_shape) == 1 and (start, stop) == (0, rows)
        drawn: Tensor = getattr(local if is_local else local.some_rows(start, stop), name)(shape)
        return drawn

    with torch.no_grad(), here.telling():
        seed = spread.same_everywhere(draw_seed(local.parameter.device, generator))
        first = 0 if shards is None else shards.first
        drawn: Tensor = spread.together(spread.draw(seed, shape, draw_rows, first), axes)
        return drawn


def _log_prob(design: Any, name: str, axes: int, value: Tensor) -> Tensor:
    local, spread, shards = here = _Here.of(design, name)
    before = value.dim() - 1 - len(spread.shape)
    if shards is not None:
        parts = spread.here("value", value, before) if _has_shape_of(design, value) else None
        inside = None if parts is None else local.holds_parts(parts, shards)
        if inside is not None and not (design.checks_rows_here and not bool(inside.all())):
            with here.telling():
                found = local.log_prob_of_parts(local.some_parts(parts, inside, shards), shards)
            return spread.together(found.masked_fill(~inside, -torch.inf), axes)
    spread = design.spread  # where something is wrong, the rows are gathered for the message
    return spread.together(design.rows_here.log_prob(spread.here("value", value, before)), axes)


def _has_shape_of(design: Any, value: Tensor) -> bool:
    """Whether a value has all units, and broadcasts with the batch."""
    try:
        broadcast_shapes(value.shape[:-1], design.batch_shape)
    except RuntimeError:
        return False
    return value.shape[-1:] == design.event_shape


def _enumerate_support(design: Any, name: str, axes: int, expand: bool = True) -> Tensor:
    local = design.rows_here.enumerate_support(expand=False)
    spread: SpreadBatch = design.spread
    wide = local.expand(-1, *design.rows_here.batch_shape, -1) if expand else None
    return spread.replicated(local) if wide is None else spread.together(wide, axes)


_CALLS: dict[str, Callable[..., Tensor]] = {
    "sample": _draws,
    "sample_indices": _draws,
    "log_prob": _log_prob,
    "enumerate_support": _enumerate_support,
}
