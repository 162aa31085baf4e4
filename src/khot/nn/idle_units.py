"""For how many tokens each unit of an autoencoder has not been kept, and a loss that revives those that are dead."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from khot._torch_internals import is_wrapped
from khot._validation import check_function, check_scores, checked_count
from khot.relaxations import topk_mask

from ._masking import Masking, keep

DEAD_AFTER = 10_000_000  # tokens, as in [2] of TopK


class CountsIdleUnits(Masking):
    """A mask that, given the number ``n`` of units, counts the rows of training since each was kept, in ``idle``."""

    n: int | None
    dead_after: int
    idle: Tensor | None
    k: float

    def set_up_counts(self, n: Any, dead_after: Any) -> None:
        """Takes the arguments; called when the module is made."""
        self.n, self.dead_after = None if n is None else checked_count("n", n), checked_count("dead_after", dead_after)
        self.register_buffer("idle", None if self.n is None else torch.zeros(self.n, dtype=torch.long))

    def check_units(self, x: Tensor) -> None:
        """The last axis of x has the units that are counted."""
        if self.n is not None and x.shape[-1] != self.n:
            raise ValueError(f"`x` must have n={self.n} units, but got shape {tuple(x.shape)}")

    @torch.no_grad()
    def count_idle(self, was_kept: Tensor, rows: int) -> None:
        """Counts these rows for the units that were kept in none of them; ``was_kept`` is (n,)."""
        assert self.idle is not None
        self.check_in_place(was_kept, self.idle, "counts idle units")
        self.idle.copy_(torch.where(was_kept, 0, self.idle + rows))

    def check_in_place(self, x: Tensor, state: Tensor, what: str) -> None:
        """The state can be written into: it is not that of a module outside of the transform that wraps x."""
        if not torch.compiler.is_compiling() and is_wrapped(x) and not is_wrapped(state):
            cure = "make it with track_running_stats=False" if hasattr(self, "threshold") else "make it without `n`"
            raise RuntimeError(
                f"{type(self).__name__} {what} in place, which a transform of torch.func refuses: {cure}, or call it "
                "in evaluation mode"
            )

    def auxiliary_loss(self, x: Tensor, error: Callable[[Tensor], Tensor], k: int | None = None) -> Tensor:
        """The error that the dead units would leave, had they to explain alone what the others have not.

        Gives dead units a gradient (Gao et al. 2024, appendix A.2): of each row the k largest dead entries are kept,
        all others are 0. Dead is a unit that no row has kept in ``dead_after`` rows of training.

        Args:
            x: Scores ``(..., n)``, those of the forward pass.
            error: From such activations, of the shape of ``x``, to a scalar, such as ``lambda z: (decoder(z) -
                residual.detach()).square().mean()``.
            k: How many dead units to keep in a row; as many as ``self.k``, rounded up, if None.

        Returns:
            ``error`` of these activations; 0 while no unit is dead.
        """
        if self.idle is None:
            raise ValueError(f"`n`, the number of units, must be given to {type(self).__name__} for an auxiliary loss")
        check_scores(x, -1)
        check_function("error", error, "activations")
        self.check_units(x)
        dead = self.idle >= self.dead_after
        size = min(math.ceil(self.k), dead.shape[0]) if k is None else k
        mask = topk_mask(self.scores_of(x.detach()).masked_fill(~dead, -torch.inf), size) * dead
        loss = error(keep(x, mask))
        return torch.where(dead.any(), loss, torch.zeros_like(loss))

    def shown_units(self) -> str:
        """For ``extra_repr``."""
        return f", n={self.n}, dead_after={self.dead_after}" if self.n is not None else ""
