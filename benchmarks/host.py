"""The host's part of eager calls on a GPU, measured without one: everything except the kernels.

Run `python benchmarks/host.py --threads 1`. It needs Triton, and no GPU.

khot is made to treat CPU tensors as if they were on a GPU, and every kernel as compiled. A launch goes through Triton's
own code up to the driver, which does nothing. So a call includes all of its Python and its allocations, but neither the
driver's launches (some 3 µs each; the table counts them) nor the choice of a device. Softmax gets CPU tensors without
rows, for which torch does everything but compute; a real one has a launch for each pass. Target: at most 3 times
softmax, forward and backward. Times are medians, in microseconds of this process.
"""

import contextlib
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from unittest import mock

import torch
from timing import arguments, interleaved, write_csv
from torch import Tensor

import khot
from khot.kernels import backend
from khot.kernels.operators import platforms

SHAPES = [(8192, 64), (128, 1000), (8192, 1000), (8192, 4096)]
K = 5
MAPS: dict[str, Callable[..., Tensor]] = {
    "sigmoid_topk": khot.sigmoid_topk,
    "log_sigmoid_topk": khot.log_sigmoid_topk,
    "sparse_topk": khot.sparse_topk,
    "topk_mask": khot.topk_mask,
}
TARGET = 3.0


class Launches:
    """Stands for the driver: it counts launches, and does nothing."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, *arguments: object) -> None:
        self.count += 1

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget  # here, so that --help needs no Triton

        return GPUTarget("cuda", 90, 32)


@contextlib.contextmanager
def as_on_a_gpu() -> Iterator[Launches]:
    """In this context khot launches its kernels for tensors on the CPU, and the driver does nothing."""
    from triton.compiler import CompiledKernel
    from triton.runtime import JITFunction, driver

    from khot.kernels.selection import triton_backend
    from khot.kernels.threshold import triton_backward as masks
    from khot.relaxations import engine, hard

    launches = Launches()
    compiled = CompiledKernel.__new__(CompiledKernel)
    known = {"_run": launches, "function": 0, "name": "", "src": None, "packed_metadata": ()}
    patches = [
        mock.patch.dict(platforms.DEVICES, triton="cpu", numba="none"),
        mock.patch.dict(platforms.OBSTACLES, triton=lambda device: None),
        mock.patch.object(JITFunction, "run", lambda self, *args, **options: compiled),
        mock.patch.object(type(driver), "active", launches),
        backend("auto"),  # which forgets what was chosen before
    ]
    # On a GPU contents are not looked at unless validation is on.
    blind = [module for module in (engine, hard, masks, triton_backend) if hasattr(module, "checks_contents")]
    patches += [mock.patch.object(module, "checks_contents", lambda x: False) for module in blind]
    with contextlib.ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patch)
        vars(compiled).update(known, _init_handles=lambda: None)
        yield launches


def gradient(function: Callable[[Tensor], Tensor], x: Tensor, g: Tensor) -> Tensor:
    return torch.autograd.grad(function(x), x, g)[0]


def launches_of(call: Callable[[], object], launches: Launches) -> int:
    """How often a call launches a kernel of khot, the second time."""
    call()
    before = launches.count
    call()
    return launches.count - before


def main() -> None:
    options = arguments(__doc__, "host.csv")
    softmax = partial(torch.softmax, dim=-1)
    rows: list[dict[str, object]] = []
    with as_on_a_gpu() as launches:
        for shape in SHAPES:
            here, empty = torch.zeros(shape), torch.zeros(0, shape[-1])
            for name, map_ in MAPS.items():
                mask = partial(map_, k=K)
                leaf, g = here.clone().requires_grad_(), torch.ones(shape)
                calls: dict[str, dict[str, Callable[[], object]]] = {
                    "forward": {"khot": partial(mask, here), "softmax": partial(softmax, empty)}
                }
                if mask(leaf).requires_grad:
                    theirs = empty.clone().requires_grad_()
                    calls["forward + backward"] = {
                        "khot": partial(gradient, mask, leaf, g),
                        "softmax": partial(gradient, softmax, theirs, g[:0]),
                    }
                for passes, pair in calls.items():
                    number = launches_of(pair["khot"], launches)
                    ours, base = (
                        1e6 * timing.median
                        for timing in interleaved(pair, options.seconds, clock=time.process_time).values()
                    )
                    row: dict[str, object] = {
                        "map": name, "shape": "x".join(map(str, shape)), "passes": passes, "launches": number,
                        "khot_us": f"{ours:.1f}", "softmax_us": f"{base:.1f}", "ratio": f"{ours / base:.2f}",
                        "target": TARGET if passes != "forward" else "",
                    }  # fmt: skip
                    print("  ".join(f"{value!s:>18}" for value in row.values()))
                    rows.append(row)
    write_csv(options.csv, rows)


if __name__ == "__main__":
    main()
