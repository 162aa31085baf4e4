"""Counts for how many tokens each unit of an autoencoder has not been kept, with a loss that revives dead units."""

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from khot._validation import check_flag, check_function, check_scores, checked_count
from khot.relaxations import topk_mask

from ._masking import Masking, keep
from ._running_state import check_in_place, write

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

DEAD_AFTER = 10_000_000  # tokens, as in Gao et al. (2024)


class CountsIdleUnits(Masking):
    """A mask that, given the number ``n`` of units, counts in ``idle`` the training rows since each was last kept."""

    n: int | None
    dead_after: int
    group: "ProcessGroup | None"
    idle: Tensor | None
    k: float

    def _set_up_counts(self, n: Any, dead_after: Any, group: "ProcessGroup | None") -> None:
        """Sets up the counts; called at construction."""
        self.n, self.dead_after = None if n is None else checked_count("n", n), checked_count("dead_after", dead_after)
        self.group = group
        self.register_buffer("idle", None if self.n is None else torch.zeros(self.n, dtype=torch.long))

    def reset_parameters(self) -> None:
        super().reset_parameters()
        if self.idle is not None:
            self._overwrite("idle", 0)

    def __getstate__(self) -> dict[str, Any]:
        """The state without the group, which cannot be copied."""
        return self.__dict__ | {"group": None}

    def _check_units(self, x: Tensor, dim: int | tuple[int, ...] = -1) -> None:
        """Checks that x has these axes, and in the last one the units that are counted."""
        check_scores(x, dim, joint=True)
        if self.n is not None and x.shape[-1] != self.n:
            raise ValueError(f"`x` must have n={self.n} units, but got shape {tuple(x.shape)}")

    @torch.no_grad()
    def _count_idle(self, was_kept: Tensor, rows: int | Tensor) -> None:
        """Adds ``rows`` to the idle count of every unit that no row kept; ``was_kept`` is (n,)."""
        assert self.idle is not None
        self._check_in_place(was_kept, self.idle, "counts idle units")
        write(self.idle, torch.where(was_kept, 0, self.idle + rows))

    def _over_group(self, was_kept: Tensor, rows: int | Tensor) -> tuple[Tensor, int | Tensor]:
        """Which units some process has kept, and the number of rows of all processes: one collective."""
        if self.group is None:
            return was_kept, rows
        counts = torch.cat([was_kept.long(), torch.zeros_like(was_kept[:1], dtype=torch.long) + rows])
        dist.all_reduce(counts, group=self.group)
        return counts[:-1] > 0, counts[-1]

    def _check_in_place(self, x: Tensor, state: Tensor, what: str) -> None:
        cure = "make it with track_running_stats=False" if hasattr(self, "threshold") else "make it without `n`"
        check_in_place(type(self).__name__, x, state, what, cure)

    @property
    def dead(self) -> Tensor | None:
        """Which of the ``n`` units no row has kept in ``dead_after`` training rows; None without ``n``."""
        return None if self.idle is None else self.idle >= self.dead_after

    def auxiliary_loss(
        self, x: Tensor, error: Callable[[Tensor], Tensor], k: int | None = None, *, scaled: bool = False
    ) -> Tensor:
        """The error with which the dead units alone explain what the other units have left unexplained.

        This gives dead units a gradient (Gao et al. 2024, appendix A.2): in each row the k largest dead entries are
        kept, and all others are 0. Units are dead if no row kept them in ``dead_after`` training rows; see ``dead``.

        Args:
            x: Scores ``(..., n)`` of the forward pass.
            error: Maps such activations, of the shape of ``x``, to a scalar, such as ``lambda z: (decoder(z) -
                residual.detach()).square().mean()``.
            k: Number of dead units to keep per row; by default ``self.k``, rounded up.
            scaled: Whether to multiply by min(d / k, 1) while d units are dead, since few of them explain little.

        Returns:
            ``error`` of these activations; 0 while no unit is dead.
        """
        dead = self.dead
        if dead is None:
            raise ValueError(f"`n`, the number of units, must be given to {type(self).__name__} for an auxiliary loss")
        check_function("error", error, "activations")
        self._check_units(x)
        check_flag("scaled", scaled)
        size = min(math.ceil(self.k), dead.shape[0]) if k is None else k
        mask = topk_mask(self._scores_of(x.detach()).masked_fill(~dead, -torch.inf), size) * dead
        loss = error(keep(x, mask))
        if scaled:
            loss = loss * (dead.sum() / max(size, 1)).clamp(max=1).to(loss.dtype)
        return torch.where(dead.any(), loss, torch.zeros_like(loss))

    def _shown_units(self) -> str:
        """The part of ``extra_repr`` about the counted units."""
        return f", n={self.n}, dead_after={self.dead_after}" if self.n is not None else ""
