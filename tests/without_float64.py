"""Every map on a device that has no float64, one of Python: run by tests/test_without_float64.py as a process.

The device is torch's PrivateUse1, its tensors a subclass whose numbers lie on the host; a dispatch mode refuses each
float64 tensor on it. Registering such a device changes a process for good, which is why this has one of its own.
"""

import pytest
import torch
from torch import Tensor
from torch.utils import backend_registration
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map, tree_map_only

from khot import Pivotal, _host, sigmoid_topk, topk_mask, topk_threshold
from khot.nn import BatchTopK, KHotGate, TopK
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


def outcome(function, x):
    """A value and its gradient, on the host."""
    x.requires_grad_()
    y = function(x)
    assert y.device == x.device
    grads = torch.autograd.grad((y * y.detach()).sum(), x) if y.requires_grad else ()
    assert all(grad.device == x.device for grad in grads)
    return [part.detach().cpu() for part in (y, *grads)]


def compare(name, function, x):
    """The same on the device as on the host, in single precision."""
    for expected, found in zip(outcome(function, x.clone()), outcome(function, on_device(x)), strict=True):
        assert found.dtype == (torch.float32 if found.is_floating_point() else torch.int64), name
        torch.testing.assert_close(found, expected.to(found.dtype), msg=lambda text: f"{name}: {text}")


def same_draws(gate):
    torch.manual_seed(0)
    return gate


def main():
    backend_registration._setup_privateuseone_for_python_backend(DEVICE)
    _host.WITHOUT_FLOAT64.add(DEVICE)
    x = normal(3, 6, dtype=torch.float32)
    calls = {case.name: case.call for case in MAPS}
    calls |= {
        "softness of each row": lambda x, softness: sigmoid_topk(x, 2, x[:, 0].detach().exp()),
        "threshold": lambda x, softness: topk_threshold(x, 2, softness),
        "hard threshold": lambda x, softness: topk_threshold(x, 2, relaxation=topk_mask),
        "module": lambda x, softness: TopK(2)(x),
        "relaxed module": lambda x, softness: TopK(2.5, softness=softness)(x),
        "batch module": lambda x, softness: BatchTopK(2)(x),
        "gate": lambda x, softness: same_draws(KHotGate(6, 2).to(x.device))(x),
        "gate of a learned size": lambda x, softness: same_draws(KHotGate(6).to(x.device))(x),
        "divergence of a gate": lambda x, softness: x[0, 0] * KHotGate(6, 2).to(x.device).kl(),
    }
    with RefusesFloat64() as mode:
        for name, call in calls.items():
            before = mode.seen
            compare(name, lambda x, call=call: call(x, 1.5), x)
            assert mode.seen > before, name
        with pytest.raises(NotImplementedError, match=r"pass logits.cpu\(\)"):
            Pivotal(logits=on_device(x), k=2)
        with pytest.raises(AssertionError, match="float64 on a device that has none"):
            on_device(x.double())


if __name__ == "__main__":
    main()
