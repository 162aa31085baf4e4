"""Which backend runs, and how a kernel goes through rows."""

import subprocess
import sys

import pytest
import torch

from khot import sigmoid_topk
from khot.kernels import backend
from khot.kernels import registry as dispatch
from khot.kernels.links.clipped_power import ClippedPower, clipped_power
from khot.kernels.links.laplace import LAPLACE
from khot.kernels.links.logistic import LOGISTIC, Logistic
from khot.kernels.links.normal import NORMAL
from khot.relaxations.engine import _apply


class Shifted(Logistic):
    def value(self, z):
        return super().value(z - 1)


def test_only_links_with_a_copy_in_the_kernels_use_it():
    assert [link.kernel for link in (LOGISTIC, LAPLACE, NORMAL)] == ["logistic", "laplace", "normal"]
    assert clipped_power(2.0).kernel == "clip" and clipped_power(1.5).kernel == "clip_power"
    assert Shifted().kernel is None

    class Own(ClippedPower):
        pass

    assert Own(2.0).kernel is None


def test_a_cpu_runs_torch():
    x = torch.randn(2, 5)
    assert not dispatch.use_triton(x, LOGISTIC)
    with backend("torch"):
        assert not dispatch.use_triton(x, LOGISTIC) and not dispatch.fused(x, LOGISTIC)


def test_forced_triton_needs_the_interpreter_on_a_cpu(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    dispatch._obstacle.cache_clear()
    with backend("triton"):
        with pytest.raises(RuntimeError, match=r"'triton' is forced, but .*(TRITON_INTERPRET=1|not installed)"):
            sigmoid_topk(torch.randn(2, 5), 2)
        assert not dispatch.use_triton(torch.zeros(2, 0), LOGISTIC)  # nothing to do
        assert not dispatch.use_triton(torch.zeros(2, 5), NORMAL, log=True)  # no kernel
    assert sigmoid_topk(torch.zeros(4), 2).tolist() == [0.5] * 4  # as before


def test_unknown_backends_are_refused():
    with pytest.raises(ValueError, match="`name` must be one of auto, torch, triton, but got 'cuda'"), backend("cuda"):
        pass


@pytest.mark.slow
def test_unknown_backends_in_the_environment_are_refused():
    code = "import os; os.environ['KHOT_BACKEND'] = 'fast'; import khot"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "KHOT_BACKEND must be one of auto, torch, triton, but got 'fast'" in result.stderr


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_plans_cover_every_row(dtype):
    for rows in (1, 7, 100, 10**5):
        for n in (1, 2, 32, 33, 1000, 1024, 1025, 16_384, 16_385, 10**5, 10**7):
            plan = dispatch.plan(rows, n, dtype)
            assert plan.block & (plan.block - 1) == 0 and plan.warps in (1, 2, 4, 8, 16)
            if plan.resident:
                assert n <= plan.block < 2 * max(n, 32) and plan.splits == 1
                continue
            assert n > plan.block  # so that a sample of a block can be taken
            parts, length = plan.chunks(n)
            assert length % plan.block == 0 and (parts - 1) * length < n <= parts * length
            assert rows * parts <= 2 * dispatch.PROGRAMS or plan.splits == 1


def test_transport_plans():
    """Powers of 2, an item for each thread, and torch for what does not fit."""
    for n, k in ((2, 1), (5, 5), (64, 3), (300, 15), (10**5, 7)):
        plan = dispatch.transport_plan(n, k)
        assert plan.places == min(k + 1, n) <= plan.block_places and plan.block == 32 * plan.warps
        assert plan.block_places & (plan.block_places - 1) == 0


def test_which_transports_have_kernels(monkeypatch):
    monkeypatch.setattr(dispatch, "_obstacle", lambda device: None)
    with backend("triton"):
        runs = dispatch.use_triton_transport
        assert runs(torch.zeros(2, 100), 15) and not runs(torch.zeros(2, 100), 16) and not runs(torch.zeros(2, 1), 1)
        assert runs(torch.zeros(2, 100).double(), 7) and not runs(torch.zeros(2, 100).double(), 8)
        assert runs(torch.zeros(16, 10**5), 3) and not runs(torch.zeros(2, 10**5), 3)
    assert not dispatch.use_triton_transport(torch.zeros(2, 100), 3)  # a CPU


def test_forest_plans_cover_every_tree():
    for units in (2, 32, 33, 256, 257, 2**dispatch.FOREST_LEVELS):
        plan = dispatch.forest_plan(units)
        assert plan.block % plan.rows == 0 and plan.block & (plan.block - 1) == 0 and plan.programs > 0


def test_the_fused_operators_are_the_map_and_its_derivative():
    """What accelerators without Triton run, or compiled graphs on them."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(7, 3, generator=generator, dtype=torch.float64).T.requires_grad_()
    k, scale, grad = torch.tensor([1.0, 2.5, 6.0]).double(), torch.tensor([0.5, 1.0, 2.0]).double(), torch.ones(3, 7)
    for log in (False, True):
        arguments = (x.detach(), k, scale, LOGISTIC.key, log, "temperature", True)
        y, anchor, offset = torch.ops.khot.capped_simplex_mask(*arguments)
        torch.library.opcheck(torch.ops.khot.capped_simplex_mask.default, arguments)
        z = (x - (anchor + offset)[:, None]) / scale[:, None]
        torch.testing.assert_close(y, LOGISTIC.log_value(z) if log else LOGISTIC.value(z))
        arguments = (x.detach(), scale, anchor, offset, grad.double(), LOGISTIC.key, log)
        torch.library.opcheck(torch.ops.khot.capped_simplex_mask_derivative.default, arguments)
        found = torch.ops.khot.capped_simplex_mask_derivative(*arguments)
        with_grad = [v.clone().requires_grad_() for v in (x.detach(), k, scale)]
        value, *_ = _apply(*with_grad, LOGISTIC, log, "temperature", True)
        for a, b in zip(found, torch.autograd.grad(value.sum(), with_grad), strict=True):
            torch.testing.assert_close(a, b)
