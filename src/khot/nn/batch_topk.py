"""The largest entries of a whole batch, and the threshold that stands for them afterwards."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from khot._distributed.boundary import shards_of
from khot._distributed.placements import as_dtensor, is_dtensor, local_part, placed, replicated, shard_axis, whole
from khot._distributed.shards import Shards, shards_of_rows, spread_over
from khot._validation import (
    check_count,
    check_function,
    check_positive,
    check_scores,
    check_weight,
    looks_at_contents,
)
from khot.relaxations import sigmoid_topk, straight_through_value, topk_mask

from ._masking import Masking, Relaxation, has_parts, keep, keep_largest
from .jump_relu import JumpReLU

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class BatchTopK(Masking):
    r"""Keeps the largest entries of a batch: k for each row on average, more in one row and fewer in another.

    Training: of x ``(..., n)`` with B rows, the :math:`\mathrm{round}(kB)` largest entries of all are kept; a relaxed
    mask has the sum :math:`kB`. Evaluation: what exceeds ``threshold`` is kept, so that rows do not depend on each
    other; it is the moving average, over the batches of training, of the smallest entry that was kept, a buffer. Rows
    like those of training exceed it k times on average, once x has come to rest: the average lags ``1 / momentum``
    batches behind, so let the learning rate fall at the end. Rows that the encoder was not fitted to may exceed it more
    often. For these, calls in training mode without gradient, on some held-out batches, move the threshold to k::

        with torch.no_grad():
            for batch in held_out:
                topk(encoder(batch))

    With ``n`` it knows, too, for how many batches each unit has not been kept; :meth:`auxiliary_loss` revives those
    that are dead.

    Args:
        k: Mean number of entries kept in a row, positive; need not be an integer.
        softness: Third argument of the relaxation, None for the hard mask.
        relaxation: Relaxed mask, called as ``relaxation(x, k, softness)``.
        straight_through: Whether a hard mask gets the gradient of the relaxed one.
        learn_softness: Whether the softness is a parameter.
        momentum: Weight of the newest batch in the threshold.
        n: Number of units, for :meth:`auxiliary_loss`.
        dead_after: For how many batches a dead unit has not been kept.
        group: Processes that have a part of the batch each, ``torch.distributed.group.WORLD`` for all: the largest
            entries are those of all parts, and threshold and dead units the same everywhere. All of them call the
            module as often. Gradients are such that DistributedDataParallel, which takes their mean, gets those of the
            mean loss. Copies and pickles have no group. A DTensor needs none.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If an argument is out of range, or x has fewer units than k.
        RuntimeError: If it is called in evaluation before it was in training.

    References:
        [1] Bussmann, Leask, Nanda (2024), "BatchTopK sparse autoencoders", arXiv:2412.06410.
        [2] Gao et al. (2024), "Scaling and evaluating sparse autoencoders", arXiv:2406.04093, appendix A.2.

    Example:
        >>> topk = BatchTopK(1)
        >>> topk(torch.tensor([[3.0, 2.0, 0.0], [1.0, 0.5, 0.2]]))
        tensor([[3., 2., 0.],
                [0., 0., 0.]])
        >>> topk.eval()(torch.tensor([2.5, 1.5, 0.0]))
        tensor([2.5000, 0.0000, 0.0000])
    """

    threshold: Tensor
    idle: Tensor | None

    def __init__(
        self,
        k: float,
        softness: float | None = None,
        relaxation: Relaxation = sigmoid_topk,
        straight_through: bool = False,
        learn_softness: bool = False,
        *,
        momentum: float = 0.01,
        n: int | None = None,
        dead_after: int = 1000,
        group: "ProcessGroup | None" = None,
    ) -> None:
        super().__init__(softness, relaxation, straight_through, learn_softness)
        check_positive("k", k)
        check_weight("momentum", momentum)
        check_count("dead_after", dead_after)
        if n is not None:
            check_count("n", n)
        self.k, self.momentum, self.n, self.dead_after, self.group = k, momentum, n, dead_after, group
        self.register_buffer("threshold", torch.tensor(torch.nan))  # NaN: there was no training yet
        self.register_buffer("idle", None if n is None else torch.zeros(n, dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        check_scores(x, -1)
        if self.n is not None and x.shape[-1] != self.n:
            raise ValueError(f"`x` must have n={self.n} units, but got shape {tuple(x.shape)}")
        if not self.training:
            return self._above_the_threshold(x)
        if is_dtensor(x):
            return self._of_dtensor(x)
        if self.group is None:
            return self._of_the_batch(x, x.numel())
        shards = Shards.of_parts(self.group, x.numel(), x.device)
        with spread_over(shards):
            return self._of_the_batch(x, shards.n)

    @property
    def softness(self) -> float | Tensor | None:
        """A number, a tensor with the gradient of ``log_softness``, or None for a hard mask."""
        softness: Any = self._current_softness()
        if is_dtensor(softness):  # the same on all processes, as is its gradient
            return cast(Tensor, softness.to_local())
        if self.group is None or not isinstance(softness, Tensor):
            return softness
        share = softness / dist.get_world_size(self.group)  # as the gradient of each process is that of all
        return straight_through_value(softness.detach(), share)

    def _of_dtensor(self, x: Any) -> Tensor:
        softness = self._current_softness()
        if isinstance(softness, Tensor):
            as_dtensor("softness", softness, "x", x.device_mesh)  # whose errors are due now
        x = placed(x, [replicated(x.device_mesh)[0] if p.is_partial() else p for p in x.placements])
        cut = [at for at, placement in enumerate(x.placements) if shard_axis(placement) is not None]
        with spread_over(shards_of(x, set(range(x.dim())), cut)):
            y = self._of_the_batch(local_part(x, x.placements), x.numel())
        return whole(y, x, x.placements, x.shape, x.stride())

    def __getstate__(self) -> dict[str, Any]:
        """Without the group, of which there are no copies."""
        return self.__dict__ | {"group": None}

    def _of_the_batch(self, x: Tensor, entries: int) -> Tensor:
        rows = entries // max(x.shape[-1], 1)
        size = self.k * rows
        if self.k > x.shape[-1]:
            raise ValueError(f"`k` must satisfy 0 < k <= n, but got k={self.k} with n={x.shape[-1]}")
        axes = tuple(range(x.dim()))
        if self.softness is None:
            y, kept = keep_largest(x, round(size), axes)
        else:
            y = keep(x, self.mask_of(x, size, axes))
            if has_parts(x):
                _, kept = keep_largest(x.detach(), round(size), axes)
            else:
                kept = x.detach().flatten().topk(round(size), sorted=False).values
        if round(size):
            self._watch(x.detach(), kept)
        return y

    @torch.no_grad()
    def _watch(self, x: Tensor, kept: Tensor) -> None:
        """Moves the threshold, and counts for how long units have been idle."""
        smallest = self._over_parts(kept.amin() if kept.numel() else kept.new_full((), torch.inf), smallest=True)
        new = smallest.to(self.threshold.dtype)
        moved = torch.where(self.threshold.isnan(), new, self.threshold.lerp(new, self.momentum))
        self.threshold.copy_(torch.where(new.isfinite(), moved, self.threshold))
        if self.idle is not None:
            none = x.new_full((1, x.shape[-1]), -torch.inf)
            rows = x.reshape(-1, x.shape[-1])
            best = self._over_parts((rows if len(rows) else none).amax(0))
            self.idle.copy_(torch.where((best >= smallest) & (best != 0), 0, self.idle + 1))

    def _over_parts(self, values: Tensor, smallest: bool = False) -> Tensor:
        """The largest values, or the smallest, that the parts of the batch have."""
        if (shards := shards_of_rows()) is None:
            return values
        (most,) = shards.max(-values if smallest else values)
        return (-most if smallest else most).to(values.dtype)

    def _above_the_threshold(self, x: Tensor) -> Tensor:
        if looks_at_contents(self.threshold) and bool(self.threshold.isnan()):
            raise RuntimeError("BatchTopK has no threshold before it was trained: call it in training mode first")
        threshold = self.threshold.to(x.dtype)
        nothing = torch.zeros_like(threshold).masked_fill(threshold.isnan(), torch.nan)  # where nobody can look
        return torch.where(x > threshold, x, nothing)

    def to_jumprelu(self) -> JumpReLU:
        """The module that it is in evaluation, without state of training."""
        if bool(self.threshold.isnan()):
            raise RuntimeError("BatchTopK has no threshold before it was trained: call it in training mode first")
        return JumpReLU(self.threshold)

    def auxiliary_loss(self, x: Tensor, error: Callable[[Tensor], Tensor], k: int | None = None) -> Tensor:
        """The error that the dead units would leave, had they to explain alone what the others have not.

        Gives dead units a gradient, by [2]: of each row the k largest dead entries are kept, all others are 0.

        Args:
            x: Scores ``(..., n)``, those of the forward pass.
            error: From such activations, of the shape of ``x``, to a scalar, such as ``lambda z: (decoder(z) -
                residual.detach()).square().mean()``.
            k: How many dead units to keep in a row; as many as ``self.k``, rounded up, if None.

        Returns:
            ``error`` of these activations; 0 while no unit is dead.
        """
        if self.idle is None:
            raise ValueError("`n`, the number of units, must be given to BatchTopK for an auxiliary loss")
        check_scores(x, -1)
        check_function("error", error, "activations")
        dead = self.idle >= self.dead_after
        if x.shape[-1] != dead.shape[0]:
            raise ValueError(f"`x` must have n={self.n} units, but got shape {tuple(x.shape)}")
        size = min(-int(-self.k // 1), dead.shape[0]) if k is None else k
        mask = topk_mask(x.detach().masked_fill(~dead, -torch.inf), size) * dead
        loss = error(keep(x, mask))
        return torch.where(dead.any(), loss, torch.zeros_like(loss))

    def extra_repr(self) -> str:
        units = f", n={self.n}, dead_after={self.dead_after}" if self.n is not None else ""
        return f"k={self.k}{self.shown_softness()}, momentum={self.momentum:g}{units}"
