"""Designs whose parameter is a DTensor: each method works on the local rows of the batch.

Rows are whole as a rule: sharded rows are gathered when the design is made, and results with an entry for each unit are
sharded again. No method communicates then, except that draws get a common seed from the first process. A draw is a
function of that seed, its number, and the numbers of its row and unit in the whole batch. So any number of processes
draw the same values, and different rows never share numbers.

Designs that can work on sharded rows, such as order sampling, keep them sharded. Members for which ``works_on_parts``
holds then work on the local parts and exchange a few numbers per row. For the other members, the rows are gathered at
the first call of one of them.
"""

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from khot._distributed.batch import SpreadBatch
from khot._distributed.placements import is_dtensor
from khot._distributed.shards import Shards, spread_over
from khot._tracing import broadcast_shapes
from khot._validation import check_generator, checked_shape
from khot.kernels.random_numbers.philox import draw_seed


def by_rows_here(name: str, axes: int, member: Callable[..., Any]) -> Callable[..., Any]:
    """The member of a design; if the design is spread over processes, that of the design of the local rows."""

    @functools.wraps(member)
    def call(design: Any, *args: Any, **kwargs: Any) -> Any:
        if design.spread is None:
            return member(design, *args, **kwargs)
        return _CALLS.get(name, _found)(design, name, axes, *args, **kwargs)

    return call


OF_ONE_SIZE = ("sample_indices", "enumerate_support")  # members whose results have as many entries for each row


class _Here(NamedTuple):
    """The local design for a member: of whole rows, or of parts of them."""

    design: Any
    spread: SpreadBatch
    shards: Shards | None

    @classmethod
    def of(cls, design: Any, name: str) -> "_Here":
        if name in OF_ONE_SIZE:
            return cls(design.rows_of_one_size(name), design.spread, None)
        if not design.works_on_parts(name):
            return cls(design.rows_here, design.spread, None)
        spread = design.spread.in_parts()
        return cls(design.parts_here, spread, spread.shards)

    def telling(self) -> AbstractContextManager[None]:
        """In this context, functions of rows know which processes hold the other parts."""
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
    spread = design.spread  # if something is wrong, the rows are gathered for the message
    return spread.together(design.rows_here.log_prob(spread.here("value", value, before)), axes)


def _has_shape_of(design: Any, value: Tensor) -> bool:
    """Whether a value has all units and broadcasts with the batch."""
    try:
        broadcast_shapes(value.shape[:-1], design.batch_shape)
    except RuntimeError:
        return False
    return value.shape[-1:] == design.event_shape


def _enumerate_support(design: Any, name: str, axes: int, expand: bool = True) -> Tensor:
    rows, spread, _ = _Here.of(design, name)
    values = rows.enumerate_support(expand=False)
    return spread.together(values.expand(-1, *rows.batch_shape, -1), axes) if expand else spread.replicated(values)


def _to_khot(design: Any, name: str, axes: int, value: Tensor) -> Tensor:
    """Of values of any batch shape, which keep their placements."""
    spread = SpreadBatch.of("value", value if is_dtensor(value) else design.spread.replicated(value))
    return spread.together(design.rows_here.to_khot(spread.here("value", value)), axes)


_CALLS: dict[str, Callable[..., Tensor]] = {
    "sample": _draws,
    "sample_indices": _draws,
    "log_prob": _log_prob,
    "enumerate_support": _enumerate_support,
    "to_khot": _to_khot,
}
