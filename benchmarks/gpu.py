"""Kernels on an accelerator: time and achieved bytes per second against softmax, topk, sort and a copy.

Run `python benchmarks/gpu.py`, or `make gpu`. It stops with a message if torch finds no accelerator.

Each operation is timed forward and forward + backward, n = 10 ... 10^7, in two ways: on the device alone, as a replayed
CUDA graph, and as wall time of eager calls. Its torch reference is the same operation with the backend "torch"; it is
left out for large x. Bytes are those it cannot do without: x and y forward; x, the cotangent and its result backward;
of a result (rows, n, n) only that and its cotangent. A new kernel joins by an entry in OPERATIONS. Correctness comes
first: an operation that disagrees with its float64 reference is not timed, nor one that draws vectors which are not
k-hot. Kernels are compiled in several processes before anything is timed.
"""

import contextlib
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from timing import RESULTS, arguments, write_csv
from torch import Tensor

import khot
import khot.kernels
from khot.kernels.draws import balance, pivotal_draw, tournament
from khot.kernels.order_sampling import draw_ranks, order_draw, rank_centre, rank_scale
from khot.kernels.random_numbers.philox import draw_seed
from khot.laws import conditional_poisson
from khot.laws.order_sampling import LOG_EXPONENTIAL, LOGISTIC, Noise

SHAPES = [
    (8192, 64),
    (128, 1000),
    (8192, 1000),
    (8192, 4096),
    (8192, 10),
    (1024, 16_384),
    (64, 10**5),
    (1, 10**6),
    (1, 10**7),
]
LARGEST_MATRIX = 2**29  # entries of all rows' matrices
LARGEST_REFERENCE = 2**23  # entries of x up to which torch versions are timed
COMPARED = 4  # rows that are compared with the reference
Call = Callable[[], object]


class Operation(NamedTuple):
    """A function of x (rows, n) and k.

    Attributes:
        function: The function.
        differentiable: Whether it is timed forward + backward too.
        reference: Whether there is a torch version of it to compare with.
        random: Whether it draws, so that there is only the size of the result to check.
        matrix: Whether the result is (rows, n, n), which is what counts then; too large ones are left out.
        columns: How many times the size of x the result has otherwise.
        longest: The longest rows for which it is timed.
    """

    function: Callable[[Tensor, int], Tensor]
    differentiable: bool = True
    reference: bool = True
    random: bool = False
    matrix: bool = False
    columns: int = 1
    longest: int = 10**7

    def fits(self, shape: tuple[int, int]) -> bool:
        rows, n = shape
        return n <= self.longest and (not self.matrix or rows * n * n <= LARGEST_MATRIX)

    def bytes_moved(self, x: Tensor, backward: bool) -> int:
        if self.matrix:
            return (2 if backward else 1) * x.nbytes * x.shape[1]
        return (3 + 2 * self.columns if backward else 1 + self.columns) * x.nbytes


def sizes(x: Tensor, k: int) -> Tensor:
    return torch.full(x.shape[:-1], k, device=x.device)


def order_sampling(x: Tensor, k: int, noise: Noise) -> Tensor:
    """A draw of a design whose positions are x, as the designs make it: here without Pyro."""
    centre = rank_centre(x, k)
    kernel = order_draw.kernel(x, 1)
    if kernel is not None:
        seed = draw_seed(x.device)
        return kernel(x, sizes(x, k), centre, seed, 1, x.dtype, noise.name)[0]
    return khot.topk_mask(-draw_ranks(noise, rank_scale(x, centre), x.shape), k).to(x.dtype)


def pivotal(x: Tensor, k: int) -> Tensor:
    """The same for inclusion probabilities sigmoid_topk(x, k)."""
    probs = khot.sigmoid_topk(x, k)
    kernel = pivotal_draw.kernel(probs, 1)
    if kernel is not None:
        return kernel(probs, sizes(x, k), draw_seed(x.device), 1, x.dtype)[0]
    return tournament(balance(probs, sizes(x, k)), 1)[0].to(x.dtype)


def log_partition(x: Tensor, k: int) -> Tensor:
    """log Z of conditional Poisson laws, from the probability of their first k units."""
    value = (torch.arange(x.shape[-1], device=x.device) < k).to(x.dtype)
    return (x * value).sum(-1) - conditional_poisson.log_prob(x, k, value)


OPERATIONS = {
    "softmax": Operation(lambda x, k: torch.softmax(x, -1), reference=False),
    "topk": Operation(lambda x, k: torch.topk(x, k).values, reference=False),
    "sort": Operation(lambda x, k: torch.sort(x).values, reference=False),
    "topk_mask": Operation(khot.topk_mask, differentiable=False),
    "sigmoid_topk": Operation(khot.sigmoid_topk),
    "log_sigmoid_topk": Operation(khot.log_sigmoid_topk),
    "lapsum_topk": Operation(khot.lapsum_topk),
    "normal_topk": Operation(khot.normal_topk),
    "capped_softmax": Operation(khot.capped_softmax),
    "sparse_topk p=2": Operation(khot.sparse_topk),
    "sparse_topk p=4/3": Operation(partial(khot.sparse_topk, p=4 / 3)),
    "conditional_poisson log Z": Operation(log_partition, longest=4096),
    "conditional_poisson mean": Operation(conditional_poisson.inclusion_probabilities, longest=4096),
    "draw ConditionalPoisson": Operation(conditional_poisson.sample, differentiable=False, random=True, longest=4096),
    "draw GumbelTopK": Operation(partial(order_sampling, noise=LOG_EXPONENTIAL), differentiable=False, random=True),
    "draw ParetoSampling": Operation(partial(order_sampling, noise=LOGISTIC), differentiable=False, random=True),
    "draw Pivotal": Operation(pivotal, differentiable=False, random=True),
    "soft_rank": Operation(lambda x, k: khot.soft_rank(x, 0.1)),
    "soft_sort": Operation(lambda x, k: khot.soft_sort(x, 0.1)),
    "soft_permutation": Operation(lambda x, k: khot.soft_permutation(x, 0.1), matrix=True),
    "sorted_transport_topk k=10": Operation(
        lambda x, k: khot.sorted_transport_topk(x, 10, 0.1), columns=10, longest=10**5
    ),
}


def forward_backward(function: Callable[[Tensor, int], Tensor], x: Tensor, k: int) -> Call:
    leaf = x.detach().requires_grad_()
    grad = torch.randn_like(function(x, k))
    return lambda: torch.autograd.grad(function(leaf, k), leaf, grad)


class Pace(NamedTuple):
    """How often a call is timed: ``rounds`` times, ``repeats`` calls each."""

    rounds: int
    repeats: int

    @classmethod
    def of(cls, call: Call, seconds: float) -> "Pace":
        """So that all calls take about ``seconds``, but at least one call is timed."""
        call()
        torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        torch.cuda.synchronize()
        calls = int(seconds / (time.perf_counter() - start))
        return cls(rounds := max(1, min(7, calls)), max(1, min(20, calls // rounds)))


def eager_seconds(call: Call, pace: Pace) -> float:
    """Median wall time of a call among many in a row."""
    samples = []
    for _ in range(pace.rounds):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(pace.repeats):
            call()
        torch.cuda.synchronize()
        samples.append((time.perf_counter() - start) / pace.repeats)
    return statistics.median(samples)


def device_seconds(call: Call, pace: Pace) -> float:
    """Median time of a call inside a replayed graph; NaN where it cannot be captured."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            for _ in range(pace.repeats):
                call()
    except RuntimeError:  # looks at contents, or allocates what a graph cannot
        torch.cuda.synchronize()
        return float("nan")
    graph.replay()
    samples = []
    for _ in range(pace.rounds):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        samples.append(1e-3 * start.elapsed_time(end) / pace.repeats)
    return statistics.median(samples)


def copy_bandwidth() -> float:
    """Bytes read and written per second by a copy of 1 GiB."""
    source = torch.empty(2**28, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.nbytes / device_seconds(lambda: target.copy_(source), Pace(rounds=7, repeats=5))


def without_validation() -> None:
    """Turns off what looks at contents, which stalls the device."""
    torch.distributions.Distribution.set_default_validate_args(False)


def compile_kernels(job: tuple[str, tuple[int, int]]) -> None:
    """Runs an operation on a few rows, once as it is timed and once as it is compared. Errors will occur again."""
    name, (rows, n) = job
    operation, k = OPERATIONS[name], max(1, n // 10)
    for count in (min(rows, 512), min(rows, COMPARED)):
        x = torch.randn(count, n, device="cuda")
        with contextlib.suppress(Exception):
            forward_backward(operation.function, x, k)() if operation.differentiable else operation.function(x, k)
    torch.cuda.empty_cache()


def agrees(operation: Operation, x: Tensor, k: int) -> bool:
    rows = x[:COMPARED]
    if operation.random:
        y = operation.function(rows, k)
        return bool(((y == 0) | (y == 1)).all() and (y.sum(-1) == k).all())
    with khot.kernels.backend("torch"):
        exact = operation.function(rows.double(), k)
    return torch.allclose(operation.function(rows, k).double(), exact, rtol=1e-4, atol=1e-5)


def measure(
    name: str, operation: Operation, x: Tensor, k: int, bandwidth: float, seconds: float
) -> list[dict[str, object]]:
    rows = []
    compared = operation.reference and x.numel() <= LARGEST_REFERENCE
    backends = ["auto", "torch"][: 1 + compared] if operation.reference else ["torch"]
    for backend in backends:
        for what in ("forward", "forward+backward")[: 1 + operation.differentiable]:
            both = what == "forward+backward"
            with khot.kernels.backend(backend):
                try:
                    call = forward_backward(operation.function, x, k) if both else partial(operation.function, x, k)
                    pace = Pace.of(call, seconds)
                    device, eager = device_seconds(call, pace), eager_seconds(call, pace)
                except torch.cuda.OutOfMemoryError:
                    torch.cuda.empty_cache()
                    continue
            speed = operation.bytes_moved(x, both) / device
            rows.append(
                {
                    "operation": name,
                    "backend": "triton" if backend == "auto" else "torch",
                    "rows": x.shape[0],
                    "n": x.shape[1],
                    "k": k,
                    "what": what,
                    "device_us": round(1e6 * device, 2),
                    "eager_us": round(1e6 * eager, 2),
                    "GB_per_s": round(1e-9 * speed, 1),
                    "of_copy": round(speed / bandwidth, 3),
                    "device": torch.cuda.get_device_name(),
                }
            )
    return rows


def plot(table: list[dict[str, object]]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(12, 5), sharey=True)
    for axis, what in zip(axes, ("forward", "forward+backward"), strict=True):
        for name in OPERATIONS:
            points = [r for r in table if r["operation"] == name and r["what"] == what and r["backend"] == "triton"]
            points = points or [r for r in table if r["operation"] == name and r["what"] == what]
            axis.plot(range(len(points)), [r["of_copy"] for r in points], "o-", label=name)
            axis.set_xticks(range(len(points)), [f"{r['rows']}×{r['n']}" for r in points], rotation=45)
        axis.set(title=what, ylabel="bytes per second, as a share of a copy's", yscale="log")
        axis.grid(alpha=0.3)
    axes[1].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(RESULTS / "gpu.png", dpi=150)


def main() -> None:
    options = arguments("Kernels on an accelerator.", "gpu.csv", seconds=0.1)
    if not torch.cuda.is_available():
        print("torch finds no accelerator here: nothing measured")
        return
    without_validation()
    bandwidth = copy_bandwidth()
    print(f"{torch.cuda.get_device_name()}: a copy moves {1e-9 * bandwidth:.0f} GB/s")
    jobs = [(name, shape) for shape in SHAPES for name in OPERATIONS if OPERATIONS[name].fits(shape)]
    processes = min(12, os.cpu_count() or 1)
    with multiprocessing.get_context("spawn").Pool(processes, without_validation) as pool:
        pool.map(compile_kernels, jobs, chunksize=1)
    table: list[dict[str, object]] = []
    wrong: list[str] = []
    for shape in SHAPES:
        x, k = torch.randn(shape, device="cuda"), max(1, shape[1] // 10)
        for name, operation in OPERATIONS.items():
            if not operation.fits(shape):
                continue
            if operation.reference and not agrees(operation, x, k):
                wrong.append(f"{name} is wrong at {shape}: not timed")
                print(wrong[-1], flush=True)
                continue
            for row in measure(name, operation, x, k, bandwidth, options.seconds):
                table.append(row)
                print(*(f"{value!s:>18}" for value in list(row.values())[:-1]), flush=True)
            write_csv(options.csv, table)
    plot(table)
    if wrong:
        sys.exit("\n".join(wrong))


if __name__ == "__main__":
    main()
