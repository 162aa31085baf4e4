"""Every Triton kernel against its reference, on an accelerator or in a separate process in the interpreter."""

from collections import Counter
from dataclasses import replace
from itertools import product

import pytest
import torch

from tests.kernels.device import DEVICE, INTERPRETED, SPLIT, kernel_marks

pytestmark = kernel_marks()

import khot.kernels
from khot import (
    capped_softmax,
    lapsum_topk,
    log_lapsum_topk,
    log_sigmoid_topk,
    sigmoid_topk,
    sparse_topk,
)
from khot.kernels.links.clipped_power import clipped_power
from khot.kernels.links.logistic import LOGISTIC
from khot.kernels.threshold import solve_threshold, triton_backward, triton_forward
from khot.kernels.threshold.triton_forward import launch_forward
from khot.kernels.threshold.triton_rows import tile_of
from tests.fuzz.rows import make_rows
from tests.fuzz.test_masks import CASES, FOUND, TIER, check_row_that_was_wrong, run
from tests.kernels.kernel_case import KernelCase
from tests.kernels.kernel_cases import KERNELS
from tests.kernels.kernel_links import LINKS

MAPS = [sigmoid_topk, lapsum_topk, sparse_topk]
ROUNDING = {torch.float16: 2e-3, torch.bfloat16: 2e-2, torch.float32: 1e-5, torch.float64: 1e-11}


def reference(case: KernelCase, inputs):
    with khot.kernels.backend("torch"):
        return case.reference(*(v.double() for v in inputs))


def compare(case: KernelCase, inputs, tolerance):
    outputs = case.launch(*(v.to(DEVICE) for v in inputs))
    for output, expected in zip(outputs, reference(case, inputs), strict=True):
        assert output.device.type == DEVICE and output.shape == expected.shape
        error = (output.cpu().double() - expected).abs()
        assert (error <= tolerance * (1 + expected.abs())).logical_or(output.cpu() == expected).all(), error.max()


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch):
    """Fresh buffers hold NaN, so that an entry that no program writes shows."""
    empty, empty_like = torch.empty, torch.empty_like

    def poison(tensor):
        return tensor.fill_(torch.nan) if tensor.is_floating_point() else tensor

    monkeypatch.setattr(torch, "empty", lambda *a, **k: poison(empty(*a, **k)))
    monkeypatch.setattr(torch, "empty_like", lambda *a, **k: poison(empty_like(*a, **k)))


@pytest.mark.parametrize(
    ("case", "shape"), [pytest.param(c, s, id=f"{c.name}-{s[0]}x{s[1]}") for c in KERNELS for s in c.shapes]
)
def test_against_reference(case, shape):
    compare(case, case.make(shape, torch.float32, 0), case.tolerance)


def test_a_wrong_kernel_is_rejected():
    """One entry off by more than the tolerance, and one that no program writes."""
    case = next(case for case in KERNELS if case.name == "mask_logistic")

    def one_entry_off(*inputs):
        y, *others = case.launch(*inputs)
        y[0, 7] += 1e-4
        return y, *others

    def one_entry_unwritten(*inputs):
        y, *others = case.launch(*inputs)
        holes = torch.empty_like(y)
        holes[:, :-1] = y[:, :-1]
        return holes, *others

    inputs = case.make((2, 33), torch.float32, 0)
    compare(case, inputs, case.tolerance)
    for launch in (one_entry_off, one_entry_unwritten):
        with pytest.raises(AssertionError):
            compare(replace(case, launch=launch), inputs, case.tolerance)


@pytest.mark.parametrize(
    ("case", "dtype"), [pytest.param(c, dtype, id=f"{c.name}-{dtype}") for c in KERNELS for dtype in c.dtypes]
)
def test_dtypes(case, dtype):
    x, *others = case.make((2, 33), dtype, 1)
    compare(case, (x, *others), ROUNDING[dtype])


@pytest.mark.parametrize("case", [case for case in KERNELS if not case.alike], ids=lambda case: case.name)
def test_strided_rows(case):
    inputs = case.make((4, 24), torch.float32, 2)
    slices = tuple(v[::2, 1:] if v.dim() == 2 else v[::2] for v in inputs)
    compare(case, slices, case.tolerance)
    columns = tuple(v.mT.contiguous().mT if v.dim() == 2 else v for v in inputs)  # unit stride the other way round
    compare(case, columns, case.tolerance)


EXTREMES = {
    "steep": lambda x: 1e4 * x,
    "flat": lambda x: 1e-8 * x,
    "offset": lambda x: x + 1e4,
    "ties": lambda x: x.round(),
    "constant": lambda x: 0 * x,
    "huge": lambda x: 1e30 * x,
    "outlier": lambda x: torch.cat([x[:, 1:], 1e6 + x[:, :1]], 1),
    "clusters": lambda x: 1e3 * x.sign() + 1e-3 * x,
}


# The smooth links share all of the code but their formulas.
@pytest.mark.parametrize("relaxation", [sigmoid_topk, sparse_topk], ids=lambda function: function.__name__)
def test_extreme_rows(relaxation):
    base = torch.randn(1, 50, generator=torch.Generator().manual_seed(3))
    x = torch.cat([extreme(base) for extreme in EXTREMES.values()]).repeat(2, 1).to(DEVICE).requires_grad_()
    sizes = torch.tensor([9.0, 49.999]).repeat(len(EXTREMES) // 2)
    k = torch.cat([sizes, sizes.flip(0)]).to(DEVICE).requires_grad_()
    y = relaxation(x, k, torch.tensor([1e-3, 1.0], device=DEVICE).repeat_interleave(len(x) // 2))
    grads = torch.autograd.grad((y * base.to(DEVICE)).sum(), (x, k))
    assert ((y >= 0) & (y <= 1)).all() and all(grad.isfinite().all() for grad in grads)
    torch.testing.assert_close(y.double().sum(-1), k.double(), rtol=2e-6, atol=0)


@pytest.mark.parametrize("relaxation", MAPS, ids=lambda function: function.__name__)
def test_limits_of_k_and_masks(relaxation):
    x = torch.tensor([[0.3, -torch.inf, 1.0, -0.5], [torch.inf, 0.2, 0.4, 0.0]], device=DEVICE, requires_grad=True)
    finite = x.isfinite()
    for k, ones in (((0, 1), [[0] * 4, [1, 0, 0, 0]]), ((3, 4), [[1, 0, 1, 1], [1] * 4])):
        size = torch.tensor(k, dtype=torch.float32, device=DEVICE, requires_grad=True)
        y = relaxation(x, size, 0.5)
        torch.testing.assert_close(y.cpu(), torch.tensor(ones).float(), rtol=0, atol=1e-20)
        grads = torch.autograd.grad((y * torch.arange(4.0, device=DEVICE)).sum(), (x, size))
        assert all(grad.isfinite().all() for grad in grads) and (grads[0][~finite] == 0).all()
    y = relaxation(x, torch.tensor([1.2, 2.0], device=DEVICE))
    assert torch.equal(y[~finite], (x[~finite] > 0).float())


def test_gap_and_kink():
    """Where nothing but underflowed tails, or nothing at all, fixes the threshold."""
    x = torch.tensor([[0.0, 2000.0]], device=DEVICE)
    assert solve_threshold(x, 1.0, 1.0, LOGISTIC).item() == pytest.approx(1000)
    x = torch.tensor([[0.0, 1.0, 5.0, 6.0]], device=DEVICE)
    t = solve_threshold(x, 2.0, 0.5, clipped_power(2.0)).item()
    assert 1 < t < 4.5
    k = torch.tensor([2.0], device=DEVICE, requires_grad=True)
    assert torch.autograd.grad(sparse_topk(x, k, 0.5).square().sum(), k)[0] == 0


WIDE_GAPS = [*MAPS[:2], capped_softmax, log_sigmoid_topk, log_lapsum_topk]


@pytest.mark.parametrize(
    ("relaxation", "layout"),
    [
        *((function, "whole") for function in WIDE_GAPS),
        *((function, "split") for function in (sigmoid_topk, log_sigmoid_topk)),
    ],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_gradients_in_wide_gaps(relaxation, layout, monkeypatch):
    """Shares of slopes that underflow, in a gap that takes the digits of the scores from z; with masked entries."""
    if layout == "split":
        monkeypatch.setattr(triton_backward, "is_split", lambda *_: True)
    far = torch.tensor([-1e9, 0.0637, 0.9967, -0.7975]).repeat_interleave(10)
    x = torch.stack([far, -far, far, far.clamp(min=-2.0)])
    x[0, :8] -= torch.arange(8) * 64  # not all at the edge of the gap
    x[2, 7:9] = -torch.inf
    sizes = torch.tensor([30.0, 10.0, 30.0, 12.0], dtype=torch.float64)
    g = torch.linspace(-1, 2, 40).masked_fill(x == -torch.inf, 0)

    def gradients(device):
        at = x.to(device).requires_grad_(), *(v.to(device).requires_grad_() for v in (sizes, torch.ones_like(sizes)))
        y = relaxation(*at).masked_fill(x.to(device) == -torch.inf, 0)
        return [v.cpu() for v in torch.autograd.grad((y * g.to(device)).sum(), at)]

    found = gradients(DEVICE)
    with khot.kernels.backend("torch"):
        expected = gradients("cpu")
    for value, known in zip(found, expected, strict=True):  # d log y / dk below a gap is as good as infinite
        torch.testing.assert_close(value.clamp(-1e20, 1e20), known.clamp(-1e20, 1e20), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("relaxation", MAPS, ids=lambda function: function.__name__)
def test_bad_contents_are_refused(relaxation):
    for x, k, match in (
        ([[1.0, 2.0], [1.0, torch.nan]], [1.0, 1.0], "`x` must not contain NaN.*row 1"),
        ([[1.0, 2.0], [1.0, 3.0]], [1.0, 2.5], "0 <= k <= n.*k=2.5 with n=2.*row 1"),
        ([[1.0, -torch.inf], [1.0, 3.0]], [1.5, 1.0], "entries above -inf, 1"),
    ):
        with pytest.raises(ValueError, match=match):
            relaxation(torch.tensor(x, device=DEVICE), torch.tensor(k, device=DEVICE))


@pytest.mark.parametrize(
    ("case", "dtype"),
    product([case for case in CASES if not case.link.bare], (torch.float32, torch.float64))
    if not INTERPRETED
    else [(CASES[0], torch.float32), (next(case for case in CASES if case.name == "sparse_2"), torch.float64)],
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_fuzz_rows(case, dtype):
    """Thresholds as exact as the reference's; a gradient that cancels is right relative to what cancels."""
    rows = make_rows(7, 6 if INTERPRETED else 4000, 5, dtype, integers=case.integers)
    run(case, rows, True, Counter(), TIER * torch.finfo(dtype).eps, DEVICE)


@pytest.mark.parametrize("name", [name for name, found in FOUND.items() if found[0] != "cauchy"])
def test_rows_that_were_wrong(name):
    check_row_that_was_wrong(name, TIER * torch.finfo(FOUND[name][1]).eps, DEVICE)


def test_numbers_and_tensors_agree():
    x = torch.randn(2, 50, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(DEVICE).requires_grad_()
    k, scale = (torch.full((2,), v, dtype=torch.float64, device=DEVICE) for v in (7.3, 0.7))
    first, second = sigmoid_topk(x, 7.3, 0.7), sigmoid_topk(x, k, scale)
    assert torch.equal(first, second)
    assert torch.equal(*(torch.autograd.grad(y.square().sum(), x)[0] for y in (first, second)))


def test_second_derivatives():
    x = torch.randn(6, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(DEVICE)

    def loss(x):
        return sigmoid_topk(x, 2.2, 0.5).square().sum()

    found = torch.func.hessian(loss)(x)
    with khot.kernels.backend("torch"):
        torch.testing.assert_close(found, torch.func.hessian(loss)(x))


def test_operators():
    x, k, scale, grad = (v.to(DEVICE) for v in KERNELS[0].make((2, 33), torch.float64, 0))
    arguments = (x, k, scale, *LOGISTIC.key, "mask", "temperature", False, True)
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(torch.ops.khot.threshold_mask.default, arguments, test_utils=checks)
    _, anchor, offset = torch.ops.khot.threshold_mask(*arguments)
    arguments = (x, scale, anchor, offset, grad, *LOGISTIC.key, "mask", True)
    torch.library.opcheck(torch.ops.khot.threshold_mask_derivative.default, arguments, test_utils=checks)


def test_long_rows_sum_to_k():
    """Also where the unguarded steps give up, and one program finishes a split row."""
    x = torch.randn(1, SPLIT, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    for row, softness in ((x, 1.0), (x.exp().pow(4), 1e-2)):
        k = torch.tensor([1000.25], dtype=torch.float64, device=DEVICE)
        y, _, _, _ = launch_forward(row, k, torch.full_like(k, softness), LOGISTIC)
        assert abs(y.double().sum().item() - 1000.25) <= 1e-6 * 1000.25


def test_few_flagged_rows_among_many():
    """Wherever their flags are among those that a program looks at."""
    rows = 40 if INTERPRETED else 2000  # of which a program looks at several
    x = torch.randn(40, 5, generator=torch.Generator().manual_seed(0)).repeat(rows // 40, 1)
    places = [11, rows - 1]
    x[places] = 1e38 * x[0]
    leaf, k, scale = x.to(DEVICE).requires_grad_(), torch.full((rows,), 2.0), torch.full((rows,), 1.0)
    k, scale = (v.double().to(DEVICE) for v in (k, scale))
    _, _, _, flags = launch_forward(leaf.detach(), k, scale, LOGISTIC)
    assert flags[:-1].nonzero().flatten().tolist() == places
    k.requires_grad_()
    found = []
    for name in ("triton", "torch"):
        with khot.kernels.backend(name):
            y = sigmoid_topk(leaf, k, scale)
            found.append((y, *torch.autograd.grad(y[:, 0].sum(), (leaf, k))))
    for value, expected in zip(*found, strict=True):
        torch.testing.assert_close(value, expected, rtol=1e-5, atol=1e-6)


SOFTNESSES = (1e-3, 1e-2, 0.1, 1.0, 10.0)
SAMPLES = 16 if INTERPRETED else 400  # rows for each softness and k


@pytest.mark.parametrize("n", [64] if INTERPRETED else [64, 1000, 4096])
@pytest.mark.parametrize("link", LINKS, ids=lambda link: link.kernel)
def test_few_ordinary_rows_are_flagged(link, n, monkeypatch):
    """The fast path leaves at most one of a hundred to the slow one, at any softness."""
    if INTERPRETED:  # it takes about as long for a tile that holds all rows
        width = max(8, 2 ** (n - 1).bit_length() // 8)
        whole = {"rows": 256, "unroll": 8, "width": width, "aligned": False}
        monkeypatch.setattr(triton_forward, "tile_of", lambda *x, double: replace(tile_of(*x, double=double), **whole))
    sizes = torch.tensor([1, n // 10, n // 2], dtype=torch.float64)
    k, scale = (v.repeat_interleave(SAMPLES) for v in torch.cartesian_prod(sizes, torch.tensor(SOFTNESSES).double()).T)
    x = torch.randn(len(k), n, generator=torch.Generator().manual_seed(n))
    _, _, _, flags = launch_forward(x.to(DEVICE), k.to(DEVICE), scale.to(DEVICE), link, "threshold")
    assert flags[:-1].sum() <= 0.01 * len(k)
