"""Rows sorted by NumPy are those of torch's stable sort: ties, zeros of both signs, infinities and NaN."""

import pytest
import torch

from khot.kernels import backend, order
from khot.kernels.call import call_of
from tests.inputs import normal

pytest.importorskip("numba", reason="numba is not installed")


@pytest.mark.parametrize("descending", [False, True])
def test_same_as_torch(descending, monkeypatch):
    monkeypatch.setattr(order, "FEW", 0)
    for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
        x = normal(12, 300).mul(8).round().div(8)
        x[:, ::7], x[:, 1::9] = -0.0, 0.0
        x[1, [5, 50]], x[2, [7, 70]] = -torch.inf, torch.inf
        x[3, 8], x[3, 9], x[3, 200] = torch.nan, torch.inf, -torch.tensor(torch.nan)
        x[4], x[5], x[6] = normal(300), 0.0, torch.nan
        x[7], x[8] = normal(300) * torch.finfo(dtype).tiny, normal(300) * torch.finfo(dtype).max
        for rows in (x.to(dtype), x.to(dtype)[:, ::2], x.to(dtype)[:, :1], x.to(dtype).view(3, 4, 300)):
            values, places = rows.sort(dim=-1, stable=True, descending=descending)
            with backend("numba"):
                found = order.sorted_rows(call_of(), rows, descending)
            assert torch.equal(found[1], places)
            torch.testing.assert_close(found[0], values, rtol=0, atol=0, equal_nan=True)
            zero = values == 0
            assert torch.equal(found[0][zero].signbit(), values[zero].signbit())


def test_threads_and_blocks(monkeypatch):
    """More rows than one block has, and shares of several threads."""
    x = normal(700, 100, dtype=torch.float32)
    x.requires_grad_()
    for threads in (1, 2):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        values, places = order.sorted_rows(call_of(), x)
        assert torch.equal(places, x.sort(dim=-1, stable=True).indices) and not values.requires_grad
