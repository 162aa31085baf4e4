"""The one place where torch draws random numbers: from a given generator, or from the default one of a device.

A generator must be on the device of the result, see :func:`khot._validation.check_generator`. Inside a vmap all of
these functions follow its ``randomness``, even with a generator. Kernels that make their own numbers get a seed from
such a generator, :func:`khot.kernels.random_numbers.philox.draw_seed`.
"""

import math
from typing import Any

import torch
from torch import Tensor

from khot._contents import has_contents
from khot._distributed.draws import RowsOfMany, draws_of_rows

from .philox import Place, uniform_rows, words_of_rows

Generator = torch.Generator | None

MOST = 2**63 - 1  # the largest int64


def _given(generator: Generator) -> dict[str, Any]:
    """The generator as a keyword, if there is one: with None in its place, torch's functions reject symbolic shapes."""
    return {} if generator is None else {"generator": generator}


def uniform(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, generator: Generator = None) -> Tensor:
    """Numbers uniform on [0, 1)."""
    if not torch.compiler.is_compiling() and (rows := draws_of_rows()) is not None:
        below_one = 1 - torch.finfo(dtype).eps / 2  # rounding to the dtype may give 1
        return _uniform_of_rows(rows, shape).to(device, dtype).clamp(max=below_one)
    return torch.rand(shape, dtype=dtype, device=device, **_given(generator))


def normal(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, generator: Generator = None) -> Tensor:
    """Standard normal numbers."""
    return torch.randn(shape, dtype=dtype, device=device, **_given(generator))


def exponential(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, generator: Generator = None
) -> Tensor:
    """Standard exponential numbers; works inside a vmap, which forbids filling a tensor that the batch shares."""
    filled = torch.rand(shape, dtype=dtype, device=device, **_given(generator))
    return filled.exponential_(generator=generator if has_contents(filled) else None)  # fake tensors reject generators


def log_exponential(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, generator: Generator = None
) -> Tensor:
    """Logarithms of standard exponential numbers, which are negated Gumbel noise, accurate far into both tails.

    On a CPU they come from float64 numbers next to 0 and 1; on an accelerator, where such numbers may be slow or
    missing, from random integers.
    """
    if device.type != "cpu" and dtype == torch.float32:
        return log_exponential_of(_integers(shape, device, generator), dtype)
    u = uniform(shape, torch.float64, device, generator)
    # An exact 0 would give infinity. In place, because new buffers would cost more.
    return u.clamp(min=torch.finfo(u.dtype).tiny).log_().neg_().log_().to(dtype)


def log_exponential_of(integers: Tensor, dtype: torch.dtype) -> Tensor:
    """``log(-log u)`` of u = ``integers / (2^63 - 1)``, with 0 < u < 1, to the accuracy of the dtype in both tails."""
    u, rest = (x.to(dtype) * 2.0**-63 for x in (integers, MOST - integers))  # each has all of its digits
    return torch.where(rest < 0.5, -torch.log1p(-rest), -u.log()).log()


def _integers(shape: tuple[int, ...], device: torch.device, generator: Generator) -> Tensor:
    """Integers uniform on 1, ..., 2^63 - 2."""
    if not torch.compiler.is_compiling() and (rows := draws_of_rows()) is not None:
        high, low = words_of_rows(rows.next_seed(), *_layout(shape), Place(row=rows.first))
        return ((high << 31) | (low >> 1)).clamp(1, MOST - 1).view(shape).to(device)
    return torch.randint(1, MOST, shape, device=device, **_given(generator))


def gamma(concentration: Tensor, generator: Generator = None) -> Tensor:
    """Gamma variables of scale 1, positive."""
    drawn = torch._standard_gamma(concentration, generator=generator)
    return drawn.clamp(min=torch.finfo(drawn.dtype).tiny)


def shuffled(shape: tuple[int, ...], device: torch.device, generator: Generator = None) -> Tensor:
    """Orders of the last axis, all equally likely, from random 62-bit keys, which hardly ever tie and sort fast."""
    if not torch.compiler.is_compiling() and (rows := draws_of_rows()) is not None:
        return _uniform_of_rows(rows, shape).to(device).argsort(-1)
    return torch.randint(2**62, shape, device=device, **_given(generator)).argsort(-1)


def _uniform_of_rows(rows: RowsOfMany, shape: tuple[int, ...]) -> Tensor:
    """float64 numbers (draws..., rows, units) for the places of these rows; for another shape, those of one row."""
    return uniform_rows(rows.next_seed(), *_layout(shape), Place(row=rows.first)).view(shape)


def _layout(shape: tuple[int, ...]) -> tuple[int, tuple[int], int]:
    """The numbers of draws, of rows and of units in a shape."""
    draws, rows, units = (1, 1, *shape)[-3:] if len(shape) < 3 else (math.prod(shape[:-2]), *shape[-2:])
    return draws, (rows,), units
