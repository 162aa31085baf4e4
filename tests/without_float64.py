"""Every map on a device that has no float64, one of Python: run by tests/test_without_float64.py as a process.

The device is torch's PrivateUse1, its tensors a subclass whose numbers lie on the host; a dispatch mode refuses each
float64 tensor on it. Registering such a device changes a process for good, which is why this has one of its own.
"""

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map, tree_map_only
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from khot import _tracing, topk_mask, topk_threshold
from khot.nn import BatchTopK, TopK
from tests.every_map import MAPS
from tests.inputs import normal

DEVICE = "single"


class OnDevice(Tensor):
    """A tensor of the device."""

    __torch_function__ = torch._C._disabled_torch_function_impl
    host: Tensor

    @staticmethod
    def __new__(cls, host):
        made = Tensor._make_wrapper_subclass(cls, host.shape, host.stride(), dtype=host.dtype, device=f"{DEVICE}:0")
        made.host = host
        return made

    @classmethod
    def __torch_dispatch__(cls, operation, types, args=(), kwargs=None):
        return run(operation, args, kwargs or {})


def run(operation, args, kwargs):
    """An operation on the host, with results on the device unless it is the way to the host."""
    target = torch.device(kwargs.get("device") or DEVICE)
    kwargs = {**kwargs, "device": "cpu"} if "device" in kwargs else kwargs
    args, kwargs = tree_map_only(OnDevice, lambda x: x.host, (args, kwargs))
    result = operation(*args, **kwargs)
    return result if target.type == "cpu" else tree_map_only(Tensor, OnDevice, result)


class RefusesFloat64(TorchDispatchMode):
    """Runs what makes tensors on the device, and fails where one is of double precision."""

    def __init__(self):
        super().__init__()
        self.seen = 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        device = kwargs.get("device")
        makes = device is not None and torch.device(device).type == DEVICE
        result = run(operation, args, kwargs) if makes else operation(*args, **kwargs)
        tree_map(self.check, result)
        return result

    def check(self, x):
        if isinstance(x, Tensor) and x.device.type == DEVICE:
            self.seen += 1
            assert x.dtype != torch.float64, "float64 on a device that has none"


def on_device(x):
    with torch.no_grad():
        return x.to(f"{DEVICE}:0")


def both(function, *values):
    """What a function makes of tensors on the host and on the device, with gradients where there are any."""
    found = []
    for move in (lambda x: x, on_device):
        leaves = [move(x.clone()).requires_grad_() for x in values]
        y = function(*leaves)
        assert y.device == leaves[0].device and y.dtype == torch.float32
        grads = torch.autograd.grad((y * y.detach()).sum(), leaves) if y.requires_grad else ()
        assert all(grad.device == leaves[0].device for grad in grads)
        found.append([part.detach().cpu() for part in (y, *grads)])
    return found


def main():
    _setup_privateuseone_for_python_backend(DEVICE)
    _tracing.WITHOUT_FLOAT64.add(DEVICE)
    x, softness = normal(3, 6, dtype=torch.float32), torch.tensor([0.5, 1.0, 2.0])
    calls = {case.name: case.call for case in MAPS}
    calls["threshold"] = lambda x, softness: topk_threshold(x, 2, softness).float()
    calls["hard threshold"] = lambda x, softness: topk_threshold(x, 2, relaxation=topk_mask).float()
    calls["k"] = lambda x, softness: calls["sigmoid_topk"](x, softness)
    calls["module"] = lambda x, softness: TopK(2)(x)
    calls["relaxed module"] = lambda x, softness: TopK(2.5, 0.5)(x)
    calls["batch module"] = lambda x, softness: BatchTopK(2)(x)
    mode = RefusesFloat64()
    with mode:
        for name, call in calls.items():
            before = mode.seen
            for expected, y in zip(*both(lambda x: call(x, 1.5), x), strict=True):
                torch.testing.assert_close(y, expected, msg=lambda text: f"{name}: {text}")
            assert mode.seen > before, name
        try:
            on_device(x.double())
        except AssertionError:
            return
    raise AssertionError("the mode refuses nothing")


if __name__ == "__main__":
    main()
