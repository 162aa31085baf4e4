"""The Triton kernels under test: a new one joins by one entry in ``KERNELS``.

Every entry is checked against its reference, in the interpreter and on a device (test_triton.py), and compiled ahead of
time at the sizes that dispatch uses (test_triton_aot.py).
"""

from functools import partial

import torch
from torch import Tensor

from khot.kernels.exact.rows import Threshold
from khot.kernels.links.base import Link
from khot.kernels.links.logistic import LOGISTIC
from khot.kernels.threshold import exact
from khot.kernels.threshold.kinds import KINDS
from khot.kernels.threshold.triton_backward import launch_backward
from khot.kernels.threshold.triton_forward import launch_forward
from tests.kernels.cases_draws import draws
from tests.kernels.cases_selection import selections
from tests.kernels.cases_tree import trees
from tests.kernels.device import INTERPRETED, SPLIT
from tests.kernels.kernel_case import DOUBLE, HALF, SINGLE, Inputs, KernelCase, Outputs
from tests.kernels.kernel_links import LINKS

# One of each way through a row; 1000 and 1500 leave lanes unused, 1 and 33 most of them.
SHAPES = [(3, 1), (2, 33), (1, 1000), (1, SPLIT), *([] if INTERPRETED else [(1, 1500)])]
OF_LINKS = [(2, 33), *([] if INTERPRETED else [(1, 1500)])]


def scores(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Inputs:
    """x, with a masked and a selected entry in long rows, k and scale, and a cotangent."""
    generator = torch.Generator().manual_seed(seed)
    x, grad = torch.randn(2, *shape, generator=generator, dtype=DOUBLE).to(dtype)
    n = shape[-1]
    if n > 30:
        x[0, 3], x[0, 5] = -torch.inf, torch.inf
    k = 1 + 0.3 * (n - 2) * torch.rand(shape[:-1], generator=generator, dtype=DOUBLE) if n > 2 else x[..., 0] * 0 + 0.4
    scale = 0.5 + torch.rand(shape[:-1], generator=generator, dtype=DOUBLE)
    return x, k.double(), scale, grad


def threshold_of(x: Tensor, k: Tensor, scale: Tensor, link: Link) -> Threshold:
    return Threshold(*torch.ops.khot.threshold_mask(x, k, scale, *link.key, "mask", "scale", True, False)[1:])


def mask_kernel(x: Tensor, k: Tensor, scale: Tensor, grad: Tensor, link: Link, kind: str) -> Outputs:
    y, anchor, offset, _ = launch_forward(x, k, scale, link, kind)
    assert y is not None
    return y, anchor + offset * scale


def mask_reference(x: Tensor, k: Tensor, scale: Tensor, grad: Tensor, link: Link, kind: str) -> Outputs:
    at = threshold_of(x, k, scale, link)
    return exact.values(x, scale, at, link, KINDS[kind]), at.anchor + at.offset * scale


def gradient_kernel(x: Tensor, k: Tensor, scale: Tensor, grad: Tensor, link: Link, kind: str) -> Outputs:
    return launch_backward(x, scale, *threshold_of(x, k, scale, link), grad, link, kind)


def gradient_reference(x: Tensor, k: Tensor, scale: Tensor, grad: Tensor, link: Link, kind: str) -> Outputs:
    return exact.mask_derivative(x, scale, *threshold_of(x, k, scale, link), grad, *link.key, kind, True)


def masks() -> list[KernelCase]:
    everywhere = [((64, n), SINGLE) for n in (300, 1000, 2000, 2001, 4096, 16_384)]
    long_rows = [((512, 100_000), SINGLE), ((1, 10**7), SINGLE)]
    double = [((64, n), DOUBLE) for n in (100, 500, 1000, 2000, 5000)]
    largest: list[tuple[tuple[int, ...], torch.dtype]] = [((64, 16_384), SINGLE)]
    entries: list[KernelCase] = []
    for link, kind in [(v, kind) for v in LINKS for kind in ("mask", "log_mask") if v.has_kernel(kind == "log_mask")]:
        name = f"{link.kernel}{'_log' if kind == 'log_mask' else ''}"
        whole = link is LOGISTIC and kind == "mask"
        compiled = [*everywhere, ((64, 4096), HALF), *long_rows, *double] if whole else largest
        options = (link, kind)
        for what, kernel, reference, launch in (
            ("mask", mask_kernel, mask_reference, lambda x, k, s, o=options: launch_forward(x, k, s, *o)),
            (
                "gradient",
                gradient_kernel,
                gradient_reference,
                lambda x, s, t, o=options: launch_backward(x, s, t, t, x, *o),
            ),
        ):
            entries.append(
                KernelCase(
                    f"{what}_{name}",
                    partial(kernel, link=link, kind=kind),
                    partial(reference, link=link, kind=kind),
                    scores,
                    SHAPES if whole else OF_LINKS,
                    launch,
                    compiled,
                    dtypes=(DOUBLE, HALF, torch.bfloat16) if whole else (DOUBLE,),
                    alike=not whole,
                )
            )
    return entries


KERNELS = [*masks(), *draws(), *selections(), *trees()]
