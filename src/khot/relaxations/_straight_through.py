"""Hard values with the gradient of soft ones, for the top-k mask or any other tensor."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from khot._distributed.boundary import has_sharded_form, of_rows, sharded_form
from khot._refusals import refuse_trace
from khot._torch_internals import leave_graph_if_differentiated
from khot._validation import check_floating, check_function, check_positive_contents, check_rows, check_softness
from khot.kernels.call import Call
from khot.kernels.operators.autograd import with_derivatives_of

from .axes import as_axes, as_rows
from .hard import topk_mask
from .sigmoid import sigmoid_topk


@of_rows(sharded=lambda arguments: has_sharded_form(arguments["relaxation"]))
def straight_through_topk(
    _call: Call,
    x: Tensor,
    k: float | Tensor,
    softness: float | Tensor = 1.0,
    *,
    dim: int | tuple[int, ...] = -1,
    relaxation: Callable[[Tensor, Any, Any], Tensor] = sigmoid_topk,
) -> Tensor:
    r"""Marks the k largest, with the gradient of a relaxed mask (third argument: ``softness``; ``dim`` by keyword).

    .. math:: y &= \mathrm{topk}(x, k), \\ dy &:= d\,\mathrm{relaxation}(x, k, \text{softness})

    The gradient is biased: the softer the relaxation, the more entries far from the threshold receive a gradient. The
    result is deterministic; :class:`~khot.StraightThrough` does the same for random draws. The result is differentiable
    in ``x``, ``k`` and ``softness`` if the relaxation is.

    Args:
        x: Real scores with ``n`` entries along ``dim``.
        k: Number of ones, ``0 <= k <= n``. A learned size need not be an integer; the mask then has the nearest number
            of ones.
        softness: Third argument of the relaxation.
        dim: Axis of the ground set, or axes that together form one ground set.
        relaxation: Relaxed mask that keeps the order, called as ``relaxation(x, k, softness)``.

    Returns:
        Tensor like ``x`` of zeros and ones.

    Raises:
        ValueError: If the relaxation raises one.
        TypeError: If the relaxation raises one.

    References:
        [1] Bengio, Léonard, Courville (2013), "Estimating or propagating gradients through stochastic neurons for
            conditional computation", arXiv:1308.3432.

    Example:
        >>> x = torch.tensor([0.3, 2.0, -1.0, 0.9], requires_grad=True)
        >>> y = straight_through_topk(x, 2)
        >>> y.tolist(), torch.autograd.grad(y[0], x)[0]
        ([0.0, 1.0, 0.0, 1.0], tensor([ 0.1690, -0.0484, -0.0447, -0.0759]))
    """
    check_rows(x, dim, joint=True)
    check_function("relaxation", relaxation, "(x, k, softness)")
    rows = as_rows(x, dim)
    check_softness("softness", softness, x, rows.shape[:-1])  # here, for an error with this name
    check_positive_contents("softness", softness)
    relaxed = sharded_form(relaxation, _call.over)(rows, k, softness)
    size = k.detach().round().long() if isinstance(k, Tensor) else round(k)
    return as_axes(with_derivatives_of(sharded_form(topk_mask, _call.over)(rows, size), relaxed), x, dim)


def straight_through_value(hard: Tensor, soft: Tensor) -> Tensor:
    r"""Returns ``hard`` in the forward pass, with the gradient of ``soft``: the straight-through trick.

    .. math:: y = \text{hard} + (\text{soft} - [\text{soft}]), \qquad [\cdot] \text{ a constant}

    Derivatives of every order, in both modes, are those of ``soft``, plus those of ``hard`` if it has any. ``soft``
    must be finite.

    Args:
        hard: The value of the result.
        soft: The tensor that is differentiated instead. It broadcasts to the shape of ``hard`` and is on its device.

    Returns:
        Tensor like ``hard``.

    Raises:
        TypeError: If an argument is not a floating-point tensor.
        ValueError: If ``soft`` does not broadcast to the shape of ``hard``.

    References:
        [1] Bengio, Léonard, Courville (2013), "Estimating or propagating gradients through stochastic neurons for
            conditional computation", arXiv:1308.3432.

    Example:
        >>> soft = torch.tensor([0.2, 0.8], requires_grad=True)
        >>> y = straight_through_value(soft.round(), soft)
        >>> y.tolist(), torch.autograd.grad(y.sum(), soft)[0]
        ([0.0, 1.0], tensor([1., 1.]))
    """
    refuse_trace()
    leave_graph_if_differentiated()
    check_floating("hard", hard)
    check_floating("soft", soft)
    try:
        soft = soft.expand(hard.shape)
    except RuntimeError:
        raise ValueError(
            f"`soft` must broadcast to the shape {tuple(hard.shape)} of `hard`, but got shape {tuple(soft.shape)}"
        ) from None
    return with_derivatives_of(hard, soft.to(hard.dtype))
