"""What operators that draw have in common: a seed among their arguments, and many draws for each row of parameters."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .capped_simplex import move_batch_first
from .operator import operator


def draw_operator(name: str) -> Callable[[Callable[..., Tensor]], Any]:
    """Decorator for ``function(*parameters, seed, draws, dtype, ...)``: registers it as the operator ``khot::name``.

    The first of the parameters is ``(*batch, n)``, the others ``(*batch, ...)``; the result is ``(draws, *batch, n)``,
    of the dtype, and a function of the seed, which is from :func:`khot.kernels.philox.draw_seed`.
    """

    def decorate(function: Callable[..., Tensor]) -> Any:
        draw = operator(name)(function)

        @draw.register_fake
        def _(*args: Any) -> Tensor:
            _, draws, dtype = args[(at := _seed_position(args)) : at + 3]
            return args[0].new_empty((draws, *args[0].shape), dtype=dtype)

        @draw.register_vmap
        def _(info: Any, in_dims: Any, *args: Any) -> tuple[Tensor, int]:
            at = _seed_position(args)
            parameters = move_batch_first(info.batch_size, in_dims, args[:at])
            seed, options = args[at], args[at + 1 :]
            if in_dims[at] is None:  # the same randomness for all
                return torch.stack([draw(*row, seed, *options) for row in zip(*parameters, strict=True)]), 0
            return draw(*parameters, seed.movedim(in_dims[at], 0)[0], *options), 1  # draws and rows have their own

        return draw

    return decorate


def _seed_position(args: tuple[Any, ...]) -> int:
    return max(i for i, value in enumerate(args) if isinstance(value, Tensor))
