"""Which backend runs, and how a kernel goes through rows."""

import logging
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from khot import capped_simplex_map, sigmoid_topk
from khot.kernels import backend, registry, threshold
from khot.kernels.call import call_of
from khot.kernels.gpu import plans
from khot.kernels.links.logistic import LOGISTIC, Logistic
from khot.kernels.links.normal import NORMAL
from khot.kernels.operators import platforms
from khot.kernels.operators.platforms import HAS_NUMBA
from khot.kernels.order_sampling import order_draw
from khot.kernels.threshold.kinds import LOG_MASK, MASK
from khot.relaxations.engine import ThresholdMap
from tests.backends import USUAL
from tests.processes import run_python


class Shifted(Logistic):
    def value(self, z):
        return super().value(z - 1)


def mask_arguments(x, link=LOGISTIC, log=False):
    row = torch.ones(x.shape[:-1], dtype=torch.float64)
    return x, row, row, *link.key, "log_mask" if log else "mask", "scale", False, True


def test_a_cpu_runs_numba_where_it_is():
    arguments = mask_arguments(torch.randn(2, 5))
    plain = threshold.mask.plain
    assert (threshold.mask.implementation(*arguments) is plain) == (USUAL == "torch")
    with backend("torch"):
        assert threshold.mask.implementation(*arguments) is plain
        assert not threshold.mask.is_fused(*threshold.mask.asks(*arguments))


def told(caplog, function, *args, **kwargs):
    caplog.clear()
    with caplog.at_level(logging.DEBUG, logger="khot"):
        function(*args, **kwargs)
    return caplog.messages


def test_a_line_says_which_backend_computes_a_call_and_why_not_one_before_it(caplog):
    x, elsewhere = torch.randn(2, 5), "it is for tensors on cuda"
    (line,) = told(caplog, sigmoid_topk, x, 2)
    assert line.startswith(f"threshold_mask runs on {USUAL}; not on triton: {elsewhere}")
    assert line.endswith(elsewhere if HAS_NUMBA else ": pip install numba")
    with backend("torch"):
        (line,) = told(caplog, sigmoid_topk, x, 2)
    reason = "the requested backend is torch"
    assert line == f"threshold_mask runs on torch; not on triton: {reason}; not on numba: {reason}"
    (line,) = told(caplog, order_draw, *order_arguments(x, 0))
    assert line.endswith("; not on triton: " + elsewhere + "; not on numba: there is nothing to draw") or not HAS_NUMBA
    sigmoid_topk(x, 2)
    assert caplog.messages == [line]  # nothing at the usual level


@pytest.mark.skipif(not HAS_NUMBA, reason="its reason would be that it is not installed")
def test_a_line_has_the_reason_of_the_operation(caplog):
    x = torch.randn(2, 5)
    for link, reason in ((Shifted(), "the link Shifted has no loops"), (NORMAL, "the link Normal has no loops")):
        (line,) = told(caplog, capped_simplex_map, x, 2, link=link)
        assert line.startswith("threshold_mask runs on torch; ") and line.endswith(f"; not on numba: {reason}")


def test_what_is_in_the_way_is_a_reason(caplog, monkeypatch):
    monkeypatch.setitem(platforms.DEVICES, "triton", "cpu")
    monkeypatch.setitem(platforms.OBSTACLES, "triton", lambda device: "it is at home")
    with backend("auto"):  # which forgets what is known
        (line,) = told(caplog, sigmoid_topk, torch.randn(2, 5), 2)
        assert line.startswith(f"threshold_mask runs on {USUAL}; not on triton: it is at home")
    with backend("triton"), pytest.raises(RuntimeError, match="backend 'triton' is forced, but it is at home"):
        sigmoid_topk(torch.randn(2, 5), 2)


def order_arguments(theta, draws):
    row = torch.ones(theta.shape[:-1], dtype=torch.long)
    return theta, row, row.double(), torch.tensor(0), draws, torch.float64, "logistic"


def test_forced_triton_needs_the_interpreter_on_a_cpu(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    platforms._triton_obstacle.cache_clear()
    with backend("triton"):
        with pytest.raises(
            RuntimeError, match=r"'triton' is forced, but .*(TRITON_INTERPRET=1|not installed|need Triton)"
        ):
            sigmoid_topk(torch.randn(2, 5), 2)
        mask = threshold.mask
        assert mask.implementation(*mask_arguments(torch.zeros(2, 0))) is mask.plain  # nothing to do
        assert mask.implementation(*mask_arguments(torch.zeros(2, 5), NORMAL, log=True)) is mask.plain  # no kernel
    assert sigmoid_topk(torch.zeros(4), 2).tolist() == [0.5] * 4  # as before


def test_backends_are_asked_in_turn_and_imported_when_they_take_a_call(monkeypatch):
    loaded, taken = [], []
    choices = registry.Operation("khot.kernels", "f")

    def takes(name):
        return registry.only_if(lambda *_: taken.append(name) or name != "numba", "it has no loop")

    for name in ("numba", "other"):
        monkeypatch.setitem(platforms.DEVICES, name, "cpu")
        monkeypatch.setitem(platforms.OBSTACLES, name, lambda device: None)
    for name in ("triton", "numba", "other"):
        choices.backend(name, module=f".{name}", takes=takes(name))
    monkeypatch.setattr(registry.importlib, "import_module", lambda module, package: loaded.append(module))
    monkeypatch.setattr(registry, "getattr", lambda module, attribute: loaded[-1], raising=False)
    for _ in range(2):
        assert choices.find(torch.zeros(3)) == ".other"
        assert taken == ["numba", "other"] and loaded == [".other"]  # Triton is not for a CPU
    assert choices.find(torch.zeros(3).double()) == ".other" and len(taken) == 4
    assert choices.find(torch.zeros(0)) is None and len(taken) == 4
    with backend("numba"):
        assert choices.find(torch.zeros(3)) is None and len(taken) == 5
    for step in range(2 * registry.MOST_CHOICES):
        choices.find(torch.zeros(3), step)
    assert len(choices.known) <= registry.MOST_CHOICES


def test_an_accelerator_without_triton_runs_torch_and_warns_once(monkeypatch):
    monkeypatch.setitem(platforms.DEVICES, "triton", "meta")
    monkeypatch.setitem(platforms.OBSTACLES, "triton", lambda device: "it is not installed")
    monkeypatch.setitem(sys.modules, "triton", None)
    for cached in (platforms.lacks_triton, platforms.warn_without_triton):
        cached.cache_clear()
    choices = registry.Operation("khot.kernels", "f")
    choices.backend("triton", module=".triton")
    with pytest.warns(RuntimeWarning, match=r"plain torch.*not installed.*pip install triton") as caught:
        assert [choices.find(torch.zeros(3, device="meta"), fact) for fact in range(3)] == [None] * 3
    assert len(caught) == 1
    platforms.lacks_triton.cache_clear()


@pytest.mark.parametrize(("version", "is_new_enough"), [("3.3.1", False), ("3.4.0", True), ("3.10.0+git1a2b", True)])
def test_an_old_triton_is_refused_with_the_version_that_works(version, is_new_enough, monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", SimpleNamespace(__version__=version))
    for cached in (platforms.lacks_triton, platforms._triton_obstacle):
        cached.cache_clear()
    try:
        reason = platforms.OBSTACLES["triton"](torch.device("cpu"))
        assert ("need Triton 3.4 or newer" in (reason or "") and "2.8" in (reason or "")) != is_new_enough
    finally:
        for cached in (platforms.lacks_triton, platforms._triton_obstacle):
            cached.cache_clear()


def test_unknown_backends_are_refused():
    with (
        pytest.raises(ValueError, match="`name` must be one of auto, torch, numba, triton, but got 'cuda'"),
        backend("cuda"),
    ):
        pass


@pytest.mark.slow
def test_unknown_backends_in_the_environment_are_refused():
    code = "import os; os.environ['KHOT_BACKEND'] = 'fast'; import khot"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "KHOT_BACKEND must be one of auto, torch, numba, triton, but got 'fast'" in result.stderr


@pytest.mark.slow
def test_an_empty_variable_requests_no_backend():
    assert run_python("from khot.kernels import registry; print(registry._wanted)", KHOT_BACKEND="") == "auto\n"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_plans_cover_every_row(dtype):
    table = {torch.float32: ((512, 1), (16_384, 16)), torch.float64: plans.DOUBLE}
    for rows in (1, 7, 100, 10**5):
        for n in (1, 2, 32, 33, 1000, 1024, 1025, 16_384, 16_385, 10**5, 10**7):
            plan = plans.plan(rows, n, dtype, table)
            assert plan.block & (plan.block - 1) == 0 and plan.warps in (1, 2, 4, 8, 16)
            if plan.resident:
                assert n <= plan.block < 2 * max(n, 32) and plan.splits == 1
                continue
            assert n > plan.block  # so that a sample of a block can be taken
            parts, length = plan.chunks(n)
            assert length % plan.block == 0 and (parts - 1) * length < n <= parts * length
            assert rows * parts <= 2 * plans.PROGRAMS or plan.splits == 1


@pytest.mark.slow
def test_the_fused_operators_are_the_map_and_its_derivative():
    """The code for accelerators without Triton, and for compiled graphs on them."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(7, 3, generator=generator, dtype=torch.float64).T.requires_grad_()
    k, scale, grad = torch.tensor([1.0, 2.5, 6.0]).double(), torch.tensor([0.5, 1.0, 2.0]).double(), torch.ones(3, 7)
    for kind in (MASK, LOG_MASK):
        arguments = (x.detach(), k, scale, *LOGISTIC.key, kind.name, "temperature", True, True)
        y, anchor, offset = torch.ops.khot.threshold_mask(*arguments)
        torch.library.opcheck(torch.ops.khot.threshold_mask.default, arguments)
        z = (x - (anchor + offset)[:, None]) / scale[:, None]
        torch.testing.assert_close(y, LOGISTIC.log_value(z) if kind.log else LOGISTIC.value(z))
        arguments = (x.detach(), scale, anchor, offset, grad.double(), *LOGISTIC.key, kind.name, True)
        torch.library.opcheck(torch.ops.khot.threshold_mask_derivative.default, arguments)
        found = torch.ops.khot.threshold_mask_derivative(*arguments)
        with_grad = [v.clone().requires_grad_() for v in (x.detach(), k, scale)]
        value = ThresholdMap(LOGISTIC, "temperature", kind).apply(call_of(*with_grad), *with_grad, -1)
        for a, b in zip(found, torch.autograd.grad(value.sum(), with_grad), strict=True):
            torch.testing.assert_close(a, b)
