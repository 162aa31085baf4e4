"""Keeps the largest entries of a whole batch in training, and those above a learned threshold in evaluation."""

import math
import warnings
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from khot._contents import checks_contents, looks_at_contents
from khot._distributed.boundary import has_sharded_form
from khot._distributed.calls import shards_of
from khot._distributed.placements import as_dtensor, is_dtensor, local_part, placed, replicated, shard_axis, whole
from khot._distributed.shards import Shards
from khot._host import has_float64
from khot._torch_internals import is_exporting, outside_selective_checkpoints
from khot._validation import check_flag, checked_count, checked_real, checked_share, expanded, in_wide_dtype
from khot.kernels.exact.reductions import WHOLE, Whole
from khot.kernels.registry import define
from khot.relaxations import sigmoid_topk, straight_through_value, topk_mask

from ._keeping import keep_largest
from ._masking import Relaxation, hard_mask, keep_masked
from ._running_state import is_first_pass, number_of_rows, write
from .idle_units import DEAD_AFTER, CountsIdleUnits
from .jump_relu import JumpReLU, checked_threshold

UNTRAINED = (
    "BatchTopK has no threshold before it has been trained: this evaluation keeps the largest entries of its own batch"
)

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class BatchTopK(CountsIdleUnits):
    r"""Keeps the largest entries of a batch: k per row on average, more in some rows and fewer in others.

    In training, the :math:`\mathrm{round}(kB)` largest entries of x ``(..., n)`` with B rows are kept (SAELens
    truncates :math:`kB`); a relaxed mask has the sum :math:`kB`. In evaluation, entries above ``threshold`` are kept,
    so that rows do not depend on each other. The threshold is the moving average, over training batches, of the
    smallest positive entry that was kept; it is a float32 buffer whatever the dtype of the module. Rows like those of
    the training data have k entries above it on average, once x no longer changes: the average lags ``1 / momentum``
    batches behind, so let the learning rate decay at the end. Evaluation before any training keeps the largest entries
    of its batch, and warns. In data that the encoder was not fitted to, more entries may exceed the threshold. To adapt
    the threshold to such data, call the module in training mode without gradient on some held-out batches.

    With ``n``, the module counts for how many training rows each unit has not been kept; :meth:`auxiliary_loss` revives
    dead units. A ``cap`` limits what a single row may keep: only its ``cap`` largest entries take part, in training and
    in evaluation.

    Rows of ``-inf``, such as padding, count neither in B nor as idle rows. The second pass of an activation checkpoint
    changes neither the threshold nor the counts.

    ``k``, ``softness`` and ``threshold`` may be assigned at any time. ``module(x, k)`` uses another k for this call: a
    number, or a tensor with one for each row, whose sum is then the number of entries.

    Training changes the threshold in place; ``num_batches_tracked`` counts how often. Both are 0 before, and a trained
    threshold is positive, so that averages of several states can be evaluated. Transforms of ``torch.func`` refuse the
    change, as they do for batch normalisation; with ``track_running_stats=False`` there is no threshold to change.

    Args:
        k: Mean number of entries kept per row, positive; need not be an integer.
        softness, relaxation, straight_through, learn_softness: See :class:`TopKMask`.
        momentum: Weight of the newest batch in the threshold; None for the mean of all batches.
        n, dead_after: See :class:`TopKMask`.
        group: Processes that each hold a part of the batch, ``torch.distributed.group.WORLD`` for all. The largest
            entries are then those of all parts, and threshold and dead units are the same everywhere. All processes
            must call the module equally often. Gradients are scaled so that DistributedDataParallel, which averages
            them, obtains the gradient of the mean loss. Copies and pickles have no group. A DTensor needs none.
        track_running_stats: Whether there is a threshold. Without it, evaluation also keeps the largest entries of the
            batch, and there are no dead units.
        by: "value" for the largest entries, "magnitude" for the largest absolute values, with their signs.
        cap: Largest number of entries of a row, an int of at least ``k``; None for no limit.

    Attributes:
        k: Mean number of entries kept per row. It may be assigned at any time.
        threshold: What entries must exceed in evaluation, a float32 buffer; None without running statistics. It may be
            assigned at any time.
        cap: Largest number of entries of a row, or None.

    Raises:
        RuntimeError: If it is trained inside a transform of ``torch.func`` but has a threshold from outside.

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

    threshold: Any  # a tensor, or None without running statistics
    num_batches_tracked: Any  # how many batches moved the threshold
    cap: int | None

    def __init__(
        self,
        k: float,
        *,
        softness: float | None = None,
        relaxation: Relaxation = sigmoid_topk,
        straight_through: bool = False,
        learn_softness: bool = False,
        momentum: float | None = 0.01,
        n: int | None = None,
        dead_after: int = DEAD_AFTER,
        group: "ProcessGroup | None" = None,
        track_running_stats: bool = True,
        by: str = "value",
        cap: int | None = None,
    ) -> None:
        super().__init__(softness, relaxation, straight_through, learn_softness, by)
        check_flag("track_running_stats", track_running_stats)
        if n is not None and not track_running_stats:
            raise ValueError(f"`n` counts dead units, which needs track_running_stats=True, but got n={n}")
        self.cap = None if cap is None else checked_count("cap", cap)
        self.k, self.momentum = k, None if momentum is None else checked_share("momentum", momentum, above="<")
        self._set_up_counts(n, dead_after, group)
        self._has_warned = False
        self.register_buffer("threshold", torch.zeros((), dtype=torch.float32) if track_running_stats else None)
        self.register_buffer("num_batches_tracked", torch.tensor(0) if track_running_stats else None)

    def reset_parameters(self) -> None:
        super().reset_parameters()
        self._has_warned = False
        if self.threshold is not None:
            self._overwrite("threshold", 0.0)
            self._overwrite("num_batches_tracked", 0)

    def _checked(self, name: str, value: Any, learned: bool = False) -> Any:
        """The checked ``k``, which is positive, or the checked softness."""
        if name != "k":
            return super()._checked(name, value, learned)
        if not 0 < (k := checked_real("k", value)) < math.inf:
            raise ValueError(f"`k` must be positive and finite, but got {value}")
        if self.cap is not None and k > self.cap:
            raise ValueError(f"`k` must not exceed the cap of a row, but got k={value} with cap={self.cap}")
        return k

    def __setattr__(self, name: str, value: Any) -> None:
        if name != "threshold" or value is self.threshold:  # as after loading a state with assign=True
            super().__setattr__(name, value)
            return
        if self.threshold is None:
            raise ValueError("`threshold` cannot be assigned with track_running_stats=False, which keeps none")
        value = checked_threshold(value, self.threshold.dtype)
        if value.numel() != 1:
            raise ValueError(f"`threshold` must be one number, but got a tensor of shape {tuple(value.shape)}")
        self._overwrite("threshold", value.reshape(()))
        with torch.no_grad():
            self.num_batches_tracked.clamp_(min=1)

    def forward(self, x: Tensor, k: float | Tensor | None = None) -> Tensor:
        self._check_units(x)
        if k is None:
            k = self._number("k")
        elif not isinstance(k, Tensor):
            k = self._checked("k", k)
        if self.training or self._is_untrained():
            return self._of_the_batch(x, k)
        return self._above_the_threshold(x, k)

    def _current_softness(self) -> float | Tensor | None:
        softness: Any = super()._current_softness()
        if is_dtensor(softness):  # it is the same on all processes, and so is its gradient
            return cast(Tensor, softness.to_local())
        if self.group is None or not isinstance(softness, Tensor):
            return softness
        share = softness / dist.get_world_size(self.group)  # because each process gets the gradients of all processes
        return straight_through_value(softness.detach(), share)

    def _of_the_batch(self, x: Tensor, k: float | Tensor) -> Tensor:
        if is_dtensor(x):
            return self._of_dtensor(x, k)
        rows = number_of_rows(x)
        if self.group is None:
            return self._of_parts(x, rows, k, WHOLE)
        shards = Shards.of_parts(self.group, x.numel(), x.device)
        (of_all,) = shards.sum(torch.as_tensor(rows, device=x.device))
        return self._of_parts(x, int(of_all), k, shards)

    def _of_dtensor(self, x: Any, k: float | Tensor) -> Tensor:
        softness = super()._current_softness()
        if isinstance(softness, Tensor):
            as_dtensor("softness", softness, "x", x.device_mesh)  # validates the argument early
        x = placed(x, [replicated(x.device_mesh)[0] if p.is_partial() else p for p in x.placements])
        rows = number_of_rows(x)
        cut = [at for at, placement in enumerate(x.placements) if shard_axis(placement) is not None]
        y = self._of_parts(local_part(x, x.placements), rows, k, shards_of(x, set(range(x.dim())), cut))
        return whole(y, x, x.placements, x.shape, x.stride())

    def _of_parts(self, x: Tensor, rows: int | Tensor, k: float | Tensor, over: Whole) -> Tensor:
        """The entries of x, masked among the entries of all processes."""
        if not over.is_whole:
            self._check_parts(k)
        size, whole = self._sizes(x, rows, k)
        axes = tuple(range(x.dim()))

        def hard(entries: Tensor) -> Tensor:
            return hard_mask(self._scores_of(self._within_cap(entries)), whole, axes, over)

        is_hard = self.softness is None or not (self.training or self.threshold is None)
        watches = self.training and self.threshold is not None and is_first_pass()
        watches = watches and (isinstance(whole, Tensor) or whole > 0)
        kept = keep_largest(x, whole, axes, self.by) if is_hard and self.cap is None and over.is_whole else None
        if kept:
            if watches:
                self._watch(x.detach(), kept.mask, kept.smallest, rows, over)
            return kept.values

        def relaxed(entries: Tensor) -> Tensor:
            return self._mask_of(self._within_cap(entries), size, axes, over=over)

        y, mask = keep_masked(x, hard if is_hard else relaxed)
        if watches:
            with outside_selective_checkpoints():
                marked = (mask.detach() if is_hard or self.straight_through else hard(x.detach())) != 0
                scores = self._scores_of(x.detach())
                positive = scores.masked_fill(~marked | (scores <= 0), torch.inf)
                smallest = positive.amin() if positive.numel() else positive.new_full((), torch.inf)
                self._watch(x.detach(), marked, smallest, rows, over)
        return y

    def _check_parts(self, k: float | Tensor) -> None:
        """Raises an error for settings that need whole rows of units, if processes share a batch."""
        if self.cap is not None:
            raise NotImplementedError("`cap` must be None if processes share a batch")
        if isinstance(k, Tensor) and k.dim():
            raise NotImplementedError("`k` must be a number, or a tensor without axes, if processes share a batch")
        if self._softness is not None and not has_sharded_form(self.relaxation):
            raise NotImplementedError(
                "`relaxation` must be a mask of khot with a link if processes share a batch, "
                f"but got {self.relaxation!r}"
            )

    def _within_cap(self, x: Tensor) -> Tensor:
        """The entries, without those beyond the cap of their row."""
        if self.cap is None or self.cap >= x.shape[-1]:
            return x
        return x.masked_fill(topk_mask(self._scores_of(x.detach()), self.cap) == 0, -torch.inf)

    def _sizes(self, x: Tensor, rows: int | Tensor, k: float | Tensor) -> tuple[float | Tensor, int | Tensor]:
        """The number of entries to keep, as the sum of a relaxed mask and as a whole number."""
        if not isinstance(k, Tensor):
            if k > x.shape[-1]:
                raise ValueError(f"`k` must satisfy 0 < k <= n, but got k={k} with n={x.shape[-1]}")
            if not isinstance(rows, Tensor):
                return k * rows, round(k * rows)
            size = (rows.double() if has_float64(rows) else rows.float()) * k
        elif k.dim() == 0:
            size = in_wide_dtype(k) * rows
        else:
            sizes = expanded("k", in_wide_dtype(k), x.shape[:-1])
            size = sizes.masked_fill((x.detach() == -torch.inf).all(-1), 0).sum()
        return size, size.detach().round().long()

    @torch.no_grad()
    def _watch(self, x: Tensor, kept: Tensor, smallest: Tensor, rows: int | Tensor, over: Whole) -> None:
        """Updates the threshold, and counts for how long units have been idle."""
        for state in (self.threshold, self.num_batches_tracked):
            self._check_in_place(x, state, "moves its threshold")
        new = _largest(-smallest, over).neg().to(self.threshold.dtype)
        is_new, is_first = new.isfinite(), _is_missing(self.threshold, self.num_batches_tracked)
        count = self.num_batches_tracked + is_new
        weight: Any = 1 / count.clamp(min=1) if self.momentum is None else self.momentum
        moved = torch.where(is_first, new, self.threshold.lerp(new, weight))
        write(self.threshold, torch.where(is_new, moved, self.threshold))
        write(self.num_batches_tracked, count)
        if self.idle is not None:
            used = (kept & (x != 0)).reshape(-1, x.shape[-1]).any(0)
            self._count_idle(_largest(used.float(), over) > 0, rows)

    def _is_untrained(self) -> bool:
        """Whether there is certainly no threshold; warns once if there should be one."""
        if self.threshold is None:
            return True
        count = self.num_batches_tracked
        if not looks_at_contents(self.threshold, count) or not bool(_is_missing(self.threshold, count)):
            return False
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(UNTRAINED, RuntimeWarning, stacklevel=5)  # at the line that calls the module
        return True

    def _above_the_threshold(self, x: Tensor, k: float | Tensor) -> Tensor:
        threshold, scores = self.threshold, self._scores_of(self._within_cap(x))
        is_missing = _is_missing(threshold, self.num_batches_tracked)
        if torch.compiler.is_compiling() and not is_exporting():
            size, _ = self._sizes(x, number_of_rows(x), k)
            size = torch.as_tensor(size, dtype=torch.float64)
            threshold = _threshold_for(threshold, is_missing, scores.detach(), size)
            is_missing = threshold.isnan()
        dtype = torch.promote_types(x.dtype, threshold.dtype)
        # It is missing only if contents cannot be read; the result is then NaN.
        nothing = torch.zeros_like(threshold).masked_fill(is_missing, torch.nan)
        limit = threshold.masked_fill(is_missing, torch.inf)
        return torch.where(scores.to(dtype) <= limit.to(dtype), nothing.to(x.dtype), x)  # which keeps NaN in x

    def to_jumprelu(self) -> JumpReLU:
        """The equivalent module for evaluation, without training state."""
        if self.threshold is None:
            raise RuntimeError("BatchTopK has no threshold with track_running_stats=False, and JumpReLU needs one")
        if bool(_is_missing(self.threshold, self.num_batches_tracked)):
            raise RuntimeError("BatchTopK has no threshold before it has been trained: call it in training mode first")
        if self.by == "magnitude" or self.cap is not None:
            raise NotImplementedError("JumpReLU has neither magnitudes nor a cap: keep BatchTopK in evaluation mode")
        return JumpReLU(self.threshold)

    def extra_repr(self) -> str:
        units = self._shown_units() + ("" if self.cap is None else f", cap={self.cap}")
        momentum = "" if self.threshold is None else f", momentum={self.momentum}"
        untracked = ", track_running_stats=False" if self.threshold is None else ""
        return f"k={self.k}{self._shown_softness()}{momentum}{units}{untracked}"


def _largest(values: Tensor, over: Whole) -> Tensor:
    """The largest of these values over all parts of the batch."""
    return over.max(values)[0].to(values.dtype)


def _is_missing(threshold: Tensor, count: Any) -> Tensor:
    """Whether there is no threshold yet. Averages of states may round the count down to 0, but have a threshold."""
    return (threshold == 0) & (count == 0)


def _kept_above(threshold: Tensor, is_missing: Tensor, x: Tensor, size: Tensor) -> Tensor:
    """The threshold; before training a value below the ``size`` largest entries of x, or NaN if they cannot be read."""
    if not checks_contents(threshold) or not bool(is_missing):
        return threshold.masked_fill(is_missing, torch.nan)
    warnings.warn(UNTRAINED, RuntimeWarning, stacklevel=2)
    kept = x.flatten().topk(int(size.round())).values.to(threshold.dtype)
    if kept.numel() == 0:
        return torch.full_like(threshold, torch.inf)
    return kept.amin().nextafter(torch.full_like(threshold, -torch.inf))


# A graph cannot read the threshold, but the inside of an operator is not part of the graph.
_threshold_for = define("batch_topk_threshold", _kept_above)
_threshold_for.register_fake(lambda threshold, is_missing, x, size: torch.empty_like(threshold))
