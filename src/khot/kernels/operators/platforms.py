"""Libraries of backends: the devices that they are for, and the reasons why they cannot run somewhere."""

import functools
import importlib
import os
import sys
import warnings
from collections.abc import Callable
from importlib.util import find_spec

import torch

OLDEST_CUDA = (8, 0)  # compute capability that current Triton supports
OLDEST_TRITON = (3, 4)  # the first version in which a kernel can read attributes of a constant record
MAX_N = 2**31 - 2**15  # columns of a row, which Triton's kernels count in int32


def _is_installed(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except (ImportError, ValueError):  # raised when a test hides the library
        return False


HAS_NUMBA = _is_installed("numba")  # imported only at the first call that runs on it, which takes half a second


@functools.cache
def lacks_triton() -> str | None:
    """The reason why there is no Triton that can compile the kernels; None if there is one. Imports Triton."""
    try:
        triton = importlib.import_module("triton")
    except ImportError as error:
        return f"Triton is not installed ({error}): pip install triton"
    if tuple(int(part) for part in triton.__version__.split(".")[:2]) < OLDEST_TRITON:
        return f"the kernels need Triton 3.4 or newer, as in torch 2.8, but this is Triton {triton.__version__}"
    return None


@functools.cache  # so that it warns once in a process
def warn_without_triton() -> None:
    """Warns that an accelerator runs plain torch because Triton is missing or too old."""
    message = f"plain torch computes instead of the faster kernels: {lacks_triton()}"
    warnings.warn(message, RuntimeWarning, stacklevel=2)


@functools.cache
def _triton_obstacle(device: torch.device) -> str | None:
    if obstacle := lacks_triton():
        return obstacle
    if device.type == "cpu":
        if os.environ.get("TRITON_INTERPRET") == "1":
            return None
        return "a CPU tensor needs Triton's interpreter: set TRITON_INTERPRET=1 before Python starts"
    if device.type != "cuda" or not torch.cuda.is_available():
        return f"Triton's kernels run on CUDA and ROCm devices, and {device} is none that is here"
    capability = torch.cuda.get_device_capability(device)
    if torch.version.hip is None and capability < OLDEST_CUDA:
        return f"{device} has compute capability {capability}, and Triton needs {OLDEST_CUDA}"
    return None


@functools.cache
def _numba_obstacle(device: torch.device) -> str | None:
    if device.type != "cpu":
        return f"numba's loops run on a CPU, and the tensor is on {device}"
    if not getattr(sys, "_is_gil_enabled", lambda: True)():
        return "numba's loops are not tested in a Python without the global interpreter lock"
    try:
        numba = importlib.import_module("numba")
    except ImportError as error:
        return f"numba is not installed ({error}): pip install numba"
    if numba.config.DISABLE_JIT:
        return "numba's compiler is turned off, by NUMBA_DISABLE_JIT=1 in the environment"
    return None


# For each library the type of device on which it is chosen unless it is requested by name, and the reason why it cannot
# run on a device, or None.
DEVICES = {"numba": "cpu", "triton": "cuda"}
OBSTACLES: dict[str, Callable[[torch.device], str | None]] = {"numba": _numba_obstacle, "triton": _triton_obstacle}
