"""The one place where torch draws random numbers: from a given generator, or from the default one of a device.

A generator has to be on the device of the result, see :func:`khot._validation.check_generator`. Inside a vmap all of
these follow its ``randomness``, also those of a generator. Kernels that make their own numbers get a seed from such a
generator, :func:`khot.kernels.philox.draw_seed`.
"""

import math
from typing import Any

import torch
from torch import Tensor

from khot._distributed.draws import RowsOfMany, draws_of_rows
from khot._validation import has_contents

from .philox import Place, uniform_rows

Generator = torch.Generator | None


def _given(generator: Generator) -> dict[str, Any]:
    """As a keyword, if there is one: with None for one torch's functions take no symbolic shapes."""
    return {} if generator is None else {"generator": generator}


def uniform(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, generator: Generator = None) -> Tensor:
    """Numbers uniform on [0, 1)."""
    if not torch.compiler.is_compiling() and (rows := draws_of_rows()) is not None:
        below_one = 1 - torch.finfo(dtype).eps / 2  # which rounding to the dtype may reach
        return _uniform_of_rows(rows, shape).to(device, dtype).clamp(max=below_one)
    return torch.rand(shape, dtype=dtype, device=device, **_given(generator))


def normal(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, generator: Generator = None) -> Tensor:
    """Standard normal numbers."""
    return torch.randn(shape, dtype=dtype, device=device, **_given(generator))


def exponential(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, generator: Generator = None
) -> Tensor:
    """Standard exponential numbers; also inside a vmap, which lets nobody fill what is the same for all of a batch."""
    filled = torch.rand(shape, dtype=dtype, device=device, **_given(generator))
    return filled.exponential_(generator=generator if has_contents(filled) else None)  # a fake one does not take it


def gamma(concentration: Tensor, generator: Generator = None) -> Tensor:
    """Gamma variables of scale 1, positive."""
    drawn = torch._standard_gamma(concentration, generator=generator)
    return drawn.clamp(min=torch.finfo(drawn.dtype).tiny)


def shuffled(shape: tuple[int, ...], device: torch.device, generator: Generator = None) -> Tensor:
    """Orders of the last axis, all equally likely: those of random 62-bit keys, which do not tie and sort fast."""
    if not torch.compiler.is_compiling() and (rows := draws_of_rows()) is not None:
        return _uniform_of_rows(rows, shape).to(device).argsort(-1)
    return torch.randint(2**62, shape, device=device, **_given(generator)).argsort(-1)


def _uniform_of_rows(rows: RowsOfMany, shape: tuple[int, ...]) -> Tensor:
    """float64 numbers (draws..., rows, units) of the places of these rows; of another shape those of one row."""
    draws, count, units = (1, 1, *shape)[-3:] if len(shape) < 3 else (math.prod(shape[:-2]), *shape[-2:])
    first = Place(row=rows.first)
    return uniform_rows(rows.next_seed(), draws, (count,), units, first).view(shape)
