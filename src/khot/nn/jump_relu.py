"""The activation that keeps what exceeds a threshold."""

import math
from numbers import Real

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from khot._validation import check_flag, checked_positive
from khot.relaxations import straight_through_value


class JumpReLU(Module):
    r"""Keeps the entries above a threshold, as they are, and sets the others to 0.

    .. math:: y = x\,[x > \theta], \qquad \frac{\partial y}{\partial \theta} := -\frac{\theta}{\varepsilon}\,
        [|x - \theta| < \varepsilon / 2]

    The gradient in x is that of the entries that are kept. That in the threshold is a pseudo-derivative of [1]: an
    estimate, over the entries next to it, of how the mean of y moves.

    Args:
        threshold: A number, or a tensor that broadcasts with the input, such as one for each unit.
        learn_threshold: Whether the threshold is a parameter; otherwise a buffer.
        bandwidth: Width of the interval whose entries give the threshold its gradient.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If the bandwidth is not positive, or the threshold NaN.

    References:
        [1] Rajamanoharan et al. (2024), "Jumping ahead: improving reconstruction fidelity with JumpReLU sparse
            autoencoders", arXiv:2407.14435.

    Example:
        >>> JumpReLU(0.5)(torch.tensor([0.3, 2.0, -1.0, 0.9]))
        tensor([0.0000, 2.0000, 0.0000, 0.9000])
    """

    threshold: Tensor

    def __init__(self, threshold: float | Tensor, learn_threshold: bool = False, bandwidth: float = 1e-3) -> None:
        super().__init__()
        is_number = isinstance(threshold, Real) and not isinstance(threshold, bool)
        if not is_number and not (isinstance(threshold, Tensor) and threshold.is_floating_point()):
            raise TypeError(f"`threshold` must be a real number or a floating-point tensor, but got {threshold!r}")
        if is_number and math.isnan(float(threshold)):
            raise ValueError("`threshold` must not be NaN")
        check_flag("learn_threshold", learn_threshold)
        value = threshold.detach().clone() if isinstance(threshold, Tensor) else torch.tensor(float(threshold))
        if learn_threshold:
            self.threshold = Parameter(value)
        else:
            self.register_buffer("threshold", value)
        self.bandwidth = float(checked_positive("bandwidth", bandwidth, torch.Size()))

    def forward(self, x: Tensor) -> Tensor:
        threshold = self.threshold.to(x.dtype)
        y = torch.where(x > threshold, x, 0.0)
        if not threshold.requires_grad:
            return y
        near = (x - threshold).detach().abs() < self.bandwidth / 2
        return straight_through_value(y, -(threshold.detach() / self.bandwidth) * near * threshold)

    def extra_repr(self) -> str:
        shown = f"{self.threshold.item():.4g}" if self.threshold.dim() == 0 else f"{tuple(self.threshold.shape)}"
        learnt = isinstance(self.threshold, Parameter)
        return f"threshold={shown}" + (f", learn_threshold=True, bandwidth={self.bandwidth:g}" if learnt else "")
