"""The one place where torch draws random numbers: from a given generator, or from the default one of a device.

A generator must be on the device of the result, see :func:`khot._validation.check_generator`. Inside a vmap all of
these functions follow its ``randomness``, even with a generator. Kernels that make their own numbers get a seed from
such a generator, :func:`khot.kernels.random_numbers.philox.draw_seed`.
"""

from typing import Any

import torch
from torch import Tensor

from khot._contents import has_contents

Generator = torch.Generator | None

MOST = 2**63 - 1  # the largest int64


def _given(generator: Generator) -> dict[str, Any]:
    """The generator as a keyword, if there is one: with None in its place, torch's functions reject symbolic shapes."""
    return {} if generator is None else {"generator": generator}


def uniform(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, generator: Generator = None) -> Tensor:
    """Numbers uniform on [0, 1)."""
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
        integers = torch.randint(1, MOST, shape, device=device, **_given(generator))
        return log_exponential_of(integers, dtype)
    u = uniform(shape, torch.float64, device, generator)
    # An exact 0 would give infinity. In place, because new buffers would cost more.
    return u.clamp(min=torch.finfo(u.dtype).tiny).log_().neg_().log_().to(dtype)


def log_exponential_of(integers: Tensor, dtype: torch.dtype) -> Tensor:
    """``log(-log u)`` of u = ``integers / (2^63 - 1)``, with 0 < u < 1, to the accuracy of the dtype in both tails."""
    u, rest = (x.to(dtype) * 2.0**-63 for x in (integers, MOST - integers))  # each has all of its digits
    return torch.where(rest < 0.5, -torch.log1p(-rest), -u.log()).log()


def gamma(concentration: Tensor, generator: Generator = None) -> Tensor:
    """Gamma variables of scale 1, positive."""
    drawn = torch._standard_gamma(concentration, generator=generator)
    return drawn.clamp(min=torch.finfo(drawn.dtype).tiny)


def shuffled(shape: tuple[int, ...], device: torch.device, generator: Generator = None) -> Tensor:
    """Orders of the last axis, all equally likely, from random 62-bit keys, which hardly ever tie and sort fast."""
    return torch.randint(2**62, shape, device=device, **_given(generator)).argsort(-1)
