"""The activation that keeps entries above a threshold."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.nn.utils.parametrize import is_parametrized

from khot._contents import can_look, looks_at_contents
from khot._module import Module, as_scalar
from khot._validation import check_flag, check_floating, check_strided, checked_positive, checked_real
from khot.relaxations import straight_through_value


class JumpReLU(Module):
    r"""Keeps the entries above a threshold unchanged, and sets the others to 0.

    .. math:: y &= x\,[x > \theta], \\ \frac{\partial y}{\partial \theta} &:= -\frac{\theta}{\varepsilon}\,
        [|x - \theta| < \varepsilon / 2]

    Entries that are kept pass their gradient on to x. The gradient in the threshold is a pseudo-derivative of [1]: it
    estimates, from the entries near the threshold, how the mean of y changes. Entries and threshold are compared at
    least in float32, because the bandwidth is finer than the spacing of numbers in half precision. NaN stays NaN.

    ``threshold`` may be assigned at any time: a number for all its entries, or a tensor of its shape. It is trained by
    a penalty on :meth:`count`, the number of entries that are kept.

    Args:
        threshold: A number, or a tensor that broadcasts with the input, such as one for each unit.
        learn_threshold: Whether the threshold is a parameter, of shape (1,) for a number; otherwise it is a buffer, at
            least in float32.
        bandwidth: Width of the interval whose entries contribute to the gradient of the threshold.
        through_input: Whether the negative of the pseudo-derivative is added to the gradient in x.

    Attributes:
        threshold: A parameter or a buffer. A number or a tensor of its shape may be assigned at any time.

    References:
        [1] Rajamanoharan et al. (2024), "Jumping ahead: improving reconstruction fidelity with JumpReLU sparse
            autoencoders", arXiv:2407.14435.

    Example:
        >>> JumpReLU(0.5)(torch.tensor([0.3, 2.0, -1.0, 0.9]))
        tensor([0.0000, 2.0000, 0.0000, 0.9000])
    """

    threshold: Tensor

    def __init__(
        self,
        threshold: float | Tensor,
        *,
        learn_threshold: bool = False,
        bandwidth: float = 1e-3,
        through_input: bool = False,
    ) -> None:
        super().__init__()
        check_flag("learn_threshold", learn_threshold)
        check_flag("through_input", through_input)
        self.through_input = bool(through_input)
        dtype = torch.get_default_dtype()
        if not learn_threshold:  # a parameter has the default dtype, as in torch's modules
            dtype = torch.promote_types(dtype, torch.float32)
        value = checked_threshold(threshold, dtype).detach().clone()
        self._start["threshold"] = value.clone() if isinstance(threshold, Tensor) else float(threshold)
        if learn_threshold:
            self.threshold = Parameter(value if value.dim() else value.reshape(1))
        else:
            self.register_buffer("threshold", value.to(torch.promote_types(value.dtype, torch.float32)))
        self.bandwidth = float(checked_positive("bandwidth", bandwidth, torch.Size()))

    def __setattr__(self, name: str, value: Any) -> None:
        if name != "threshold" or self._is_replaced_by(value):
            super().__setattr__(name, value)
            return
        value = checked_threshold(value, self.threshold.dtype)
        if value.dim() and value.shape != self.threshold.shape:
            raise ValueError(
                f"`threshold` must be a number or a tensor of shape {tuple(self.threshold.shape)}, but got shape "
                f"{tuple(value.shape)}"
            )
        self._overwrite("threshold", value)

    def _is_replaced_by(self, value: Any) -> bool:
        """Whether torch replaces the threshold: FSDP by shards, ``load_state_dict(assign=True)``, or pruning."""
        stored = self._parameters | self._buffers
        is_pruned = "threshold" not in stored and not is_parametrized(self, "threshold")
        return isinstance(value, Parameter) or is_pruned or value is stored.get("threshold")

    def forward(self, x: Tensor) -> Tensor:
        wide, threshold = self._compared(x)
        if not (threshold.requires_grad or self.through_input):
            return torch.where(wide <= threshold, 0.0, x)  # in this order, which keeps NaN
        y = torch.where(wide <= threshold, 0.0, wide)
        factor = threshold.detach().nan_to_num(nan=torch.nan)  # finite, because an infinite one has distance 0
        return straight_through_value(y, factor * self._distance(wide, threshold)).to(x.dtype)

    def count(self, x: Tensor) -> Tensor:
        r"""The number of entries that are kept, with a pseudo-derivative, so that a penalty trains the threshold.

        .. math:: L_0 &= \sum_i [x_i > \theta_i], \\ \frac{\partial L_0}{\partial \theta_i} &:=
            -\frac{1}{\varepsilon}\, [|x_i - \theta_i| < \varepsilon / 2]

        With ``through_input`` the derivative in x is the negative of this; otherwise it is 0. See [1], section 3.

        Args:
            x: Entries (..., n).

        Returns:
            Tensor (...), at least in float32, in which numbers of entries are exact.

        Example:
            >>> JumpReLU(0.5).count(torch.tensor([[0.3, 2.0, -1.0, 0.9], [0.1, 0.0, 0.7, 0.2]]))
            tensor([2., 1.])
        """
        wide, threshold = self._compared(x)
        kept = torch.where(wide <= threshold, 0.0, torch.ones_like(wide))
        return straight_through_value(kept, self._distance(wide, threshold)).sum(-1)

    def _compared(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The entries and the threshold, in a dtype in which they are compared."""
        check_floating("x", x)
        threshold = as_scalar(self.threshold)
        dtype = torch.promote_types(torch.promote_types(x.dtype, threshold.dtype), torch.float32)
        return x.to(dtype), threshold.to(dtype)

    def _distance(self, wide: Tensor, threshold: Tensor) -> Tensor:
        """(x - threshold) / bandwidth of entries near the threshold, which has the derivatives of a step; else 0."""
        distance = (wide if self.through_input else wide.detach()) - threshold
        return torch.where(distance.detach().abs() < self.bandwidth / 2, distance, 0.0) / self.bandwidth

    def extra_repr(self) -> str:
        shown = f"{tuple(self.threshold.shape)}"
        if self.threshold.dim() == 0:  # a tensor without data has no number to show
            shown = f"{self.threshold.item():.4g}" if can_look(self.threshold) else "?"
        learnt = isinstance(self.threshold, Parameter)
        shown = f"threshold={shown}" + (f", learn_threshold=True, bandwidth={self.bandwidth:g}" if learnt else "")
        return f"{shown}, through_input=True" if self.through_input else shown


def checked_threshold(value: Any, dtype: torch.dtype) -> Tensor:
    """A number, as a tensor of this dtype, or a floating-point tensor; not NaN."""
    check_strided("threshold", value)
    if not isinstance(value, Tensor):
        number = float(checked_real("threshold", value, "a real number or a floating-point tensor"))
        value = torch.tensor(number, dtype=dtype)
    elif not value.is_floating_point():
        raise TypeError(f"`threshold` must be a real number or a floating-point tensor, but got {value!r}")
    if looks_at_contents(value) and bool(value.isnan().any()):
        raise ValueError("`threshold` must not be NaN")
    return value
