"""The one place where torch draws random numbers: from a given generator, or from the default one of a device.

A generator has to be on the device of the result, see :func:`khot._validation.check_generator`. Inside a vmap all of
these follow its ``randomness``, also those of a generator. Kernels that make their own numbers get a seed from such a
generator, :func:`khot.kernels.philox.draw_seed`.
"""

from typing import Any

import torch
from torch import Tensor

from khot._validation import has_contents

Generator = torch.Generator | None


def _given(generator: Generator) -> dict[str, Any]:
    """As a keyword, if there is one: with None for one torch's functions take no symbolic shapes."""
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
    """Standard exponential numbers; also inside a vmap, which lets nobody fill what is the same for all of a batch."""
    filled = torch.rand(shape, dtype=dtype, device=device, **_given(generator))
    return filled.exponential_(generator=generator if has_contents(filled) else None)  # a fake one does not take it


def gamma(concentration: Tensor, generator: Generator = None) -> Tensor:
    """Gamma variables of scale 1, positive."""
    drawn = torch._standard_gamma(concentration, generator=generator)
    return drawn.clamp(min=torch.finfo(drawn.dtype).tiny)


def shuffled(shape: tuple[int, ...], device: torch.device, generator: Generator = None) -> Tensor:
    """Orders of the last axis, all equally likely: those of random 62-bit keys, which do not tie and sort fast."""
    return torch.randint(2**62, shape, device=device, **_given(generator)).argsort(-1)
