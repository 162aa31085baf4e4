"""n of every m weights, the pattern that accelerators multiply faster."""

from typing import Any

from torch import Tensor
from torch.nn import Parameter

from khot._validation import check_strided, checked_count
from khot.kernels.exact.rows import compute_dtype
from khot.relaxations import sigmoid_topk

from ._masking import Masking, Relaxation, checked_size


class NMSparsity(Masking):
    """Keeps exactly n of every m neighbours along the last axis: a parametrisation of weights.

    ``torch.nn.utils.parametrize.register_parametrization(layer, "weight", NMSparsity(2, 4))`` makes the weight of a
    layer 2:4 sparse, at every use, from the dense one that is trained. What is kept is decided by magnitude, or by
    learned scores. Without a softness a weight that is not kept gets no gradient; with one, and ``straight_through``,
    it gets that of the relaxed mask. A relaxed mask (``straight_through=False``) has its exact pattern in evaluation
    only, while in training it is soft.

    Args:
        n: Number of weights that are kept of every group.
        m: Length of a group, which must divide the last axis.
        softness: Third argument of the relaxation, None for the hard mask.
        relaxation: Relaxed mask, called as ``relaxation(x, k, softness)``.
        straight_through: Whether a hard mask gets the gradient of the relaxed one.
        learn_softness: Whether the softness is a parameter.
        scores: Start of scores of the shape of the weight, which are learned and decide in place of the magnitudes;
            they need a softness.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If an argument is out of range.

    References:
        [1] Mishra et al. (2021), "Accelerating sparse deep neural networks", arXiv:2104.08378.

    Example:
        >>> NMSparsity(2, 4)(torch.tensor([[0.3, -2.0, 1.0, 0.9, 4.0, 3.0, 2.0, 1.0]]))
        tensor([[ 0., -2.,  1.,  0.,  4.,  3.,  0.,  0.]])
    """

    numbers = ("n", "_softness")
    n: int
    scores: Parameter | None

    def __init__(
        self,
        n: int = 2,
        m: int = 4,
        softness: float | None = None,
        relaxation: Relaxation = sigmoid_topk,
        straight_through: bool = False,
        learn_softness: bool = False,
        scores: Tensor | None = None,
    ) -> None:
        super().__init__(softness, relaxation, straight_through, learn_softness)
        self.m = checked_count("m", m)
        self.n = n
        _check_learned(scores)
        self.register_parameter("scores", None if scores is None else Parameter(scores.detach().clone()))
        self._softness = self.checked("_softness", softness)

    def checked(self, name: str, value: Any, learned: bool = False) -> Any:
        """``n``, or the softness, which learned scores need."""
        if name == "n":
            n = checked_size("n", value, whole=True)
            if n > self.m:
                raise ValueError(f"`n` must satisfy 0 <= n <= m, but got n={n} with m={self.m}")
            return n
        if value is None and getattr(self, "scores", None) is not None:
            raise ValueError("`scores` need a `softness`: a hard mask gives them no gradient")
        return super().checked(name, value, learned)

    def forward(self, weight: Tensor) -> Tensor:
        check_strided("weight", weight)
        if weight.dim() == 0 or weight.shape[-1] % self.m:
            raise ValueError(f"`m` must divide the last axis, but got m={self.m} for a weight {tuple(weight.shape)}")
        if self.scores is not None and self.scores.shape != weight.shape:
            raise ValueError(
                f"`scores` must have the shape {tuple(weight.shape)} of the weight, but have {tuple(self.scores.shape)}"
            )
        wide = weight.to(compute_dtype(weight))
        scores = wide.abs() if self.scores is None else self.scores.to(wide.dtype)
        groups = (*weight.shape[:-1], weight.shape[-1] // self.m, self.m)
        is_hard = not (self.training or self.straight_through)
        mask = self.mask_of(scores.reshape(groups), self.number("n"), -1, hard=is_hard)
        return (wide * mask.reshape(weight.shape)).to(weight.dtype)

    def right_inverse(self, weight: Tensor) -> Tensor:
        """The dense weight to start from: what is assigned."""
        return weight

    def extra_repr(self) -> str:
        return f"n={self.n}, m={self.m}{self.shown_softness()}" + (", scores" if self.scores is not None else "")


def _check_learned(scores: Any) -> None:
    check_strided("scores", scores)
    if scores is not None and not (isinstance(scores, Tensor) and scores.is_floating_point()):
        raise TypeError(f"`scores` must be a floating-point tensor or None, but got {scores!r}")
