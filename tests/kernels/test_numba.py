"""The rules of the loops that numba compiles: threads, forks, the folder of machine code, and math of their own."""

import itertools
import os
import shutil
import sys
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import khot
from khot import ConditionalPoisson, StraightThrough
from khot.kernels import backend
from khot.kernels.draws import pivotal_draw
from khot.kernels.order_sampling import order_draw
from khot.relaxations import sigmoid_topk, soft_permutation, sparse_topk_magnitude, sparse_topk_signed
from tests.inputs import normal
from tests.loops import for_each
from tests.processes import run_python

numba = pytest.importorskip("numba", reason="numba is not installed")

from numba.core.caching import IndexDataCacheFile  # noqa: E402 - skipped before it imports numba

from khot.kernels.cpu import cache, maths  # noqa: E402 - skipped before it imports numba
from khot.kernels.cpu import loops as cpu_loops  # noqa: E402 - skipped before it imports numba
from khot.kernels.draws.numba_tournament import _tournaments  # noqa: E402 - skipped before it imports numba
from khot.kernels.order_sampling.numba_draw import _loop as order_draw_loop  # noqa: E402 - skipped before it imports numba

SOURCE = Path(khot.__file__).parent


@pytest.fixture
def threads():
    """Gives the number of threads back."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


# ---- Threads


def results_of(function, x):
    x = x.detach().requires_grad_()
    y = function(x)
    return y.detach(), torch.autograd.grad(y.square().sum(), x)[0]


IN_LOOPS = {
    "mask": lambda x: sigmoid_topk(x, 30),
    "magnitude": lambda x: sparse_topk_magnitude(x, 7, 0.5, 1.7),
    "signed": lambda x: sparse_topk_signed(x, 30, 0.5),
    "permutation": lambda x: soft_permutation(x[:, :40]),
    "draws": lambda x: StraightThrough(ConditionalPoisson(logits=x, k=30)).rsample((2,), generator=torch.Generator()),
}


@pytest.mark.slow
@pytest.mark.parametrize("function", IN_LOOPS.values(), ids=IN_LOOPS)
def test_results_do_not_depend_on_the_number_of_threads(threads, function):
    x, results = normal(700, 100, dtype=torch.float32), []
    for number in (1, 3, 8):
        threads(number)
        results.append(results_of(function, x))
    for result in results[1:]:
        assert all(map(torch.equal, result, results[0]))


def test_many_threads_call_at_once(threads):
    threads(4)
    inputs = [normal(300, 400, seed=i) for i in range(8)]
    expected = [results_of(IN_LOOPS["mask"], x) for x in inputs]
    start = threading.Barrier(8)

    def call(i):
        start.wait()
        return [results_of(IN_LOOPS["mask"], inputs[i]) for _ in range(5)]

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(call, range(8)))
    for results, one in zip(found, expected, strict=True):
        assert all(torch.equal(a, b) for result in results for a, b in zip(result, one, strict=True))


# ---- Forks and the end of a process

PROCESS = """
    import atexit, os, threading
    import numba, torch
    from khot.relaxations import sigmoid_topk

    def add(number):
        return numba.njit(lambda i: i + number)(1)  # compiled anew each time

    torch.set_num_threads(2)
    x = torch.randn(2000, 300, generator=torch.Generator().manual_seed(0))
    expected = sigmoid_topk(x, 5)

    def keep_calling():
        while not stop.is_set():
            sigmoid_topk(x, 5)

    def keep_compiling():
        while not stop.is_set():
            add(1)

    for target in (keep_calling, keep_compiling):
        stop = threading.Event()
        other = threading.Thread(target=target)
        other.start()
        for _ in range(3):
            child = os.fork()
            if child == 0:
                torch.set_num_threads(2)
                equal = torch.equal(sigmoid_topk(x, 5), expected) and add(2) == 3
                os._exit(0 if equal else 3)
            _, status = os.waitpid(child, 0)
            assert status == 0, (target, status)
        stop.set()
        other.join()

    class Masks(torch.utils.data.Dataset):
        def __len__(self):
            return 8
        def __getitem__(self, i):
            torch.set_num_threads(2)
            return sigmoid_topk(torch.full((2000, 100), float(i)), 5)

    for batch in torch.utils.data.DataLoader(Masks(), batch_size=2, num_workers=2, multiprocessing_context="fork"):
        torch.testing.assert_close(batch, torch.full_like(batch, 0.05))
    atexit.register(lambda: print(round(float(sigmoid_topk(x, 5).sum()))))
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="there are no forks on this platform")
def test_forks_and_calls_at_the_end_of_a_process():
    """Forked beside a thread that calls or compiles, in workers of a data loader, and while the interpreter ends."""
    assert run_python(PROCESS) == "10000\n"


# ---- The folder of machine code


@pytest.mark.slow
def test_layouts_compile_no_loop_again():
    """Values that are expanded or transposed and cotangents of a sum, which have stride 0, count as contiguous ones."""
    found = run_python("""
        import sys, torch
        from khot import ConditionalPoisson, GumbelTopK, Sampford, sigmoid_topk
        probs = sigmoid_topk(torch.randn(4, 6), 3).requires_grad_()
        value = torch.tensor([1.0, 1, 1, 0, 0, 0])
        for design in (ConditionalPoisson, Sampford, GumbelTopK):
            of_design = {"logits": probs} if design is GumbelTopK else {"probs": probs}
            for x in (value.repeat(4, 1), value.expand(4, 6), value.repeat(4, 1).T.contiguous().T):
                for weight in (torch.ones(4), torch.ones(()).expand(4)):
                    design(**of_design, k=3).log_prob(x).backward(weight)
        loops = [
            (module.__name__, name, len(loop.signatures))
            for module in list(sys.modules.values())
            if module.__name__.startswith("khot.kernels.")
            for name, loop in vars(module).items()
            if "log_prob" in name and hasattr(loop, "signatures")
        ]
        print(len(loops), [loop for loop in loops if loop[-1] > 1])
    """)
    count, _, again = found.partition(" ")
    assert int(count) >= 2 and again == "[]\n"


@pytest.fixture
def copied_kernels(tmp_path, monkeypatch):
    """A copy of the sources to edit, and a function that finds the folder as a new process would."""
    copy = tmp_path / "kernels"
    shutil.copytree(SOURCE / "kernels", copy, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(cache, "PACKAGE", copy)
    monkeypatch.setenv("KHOT_CACHE_DIR", str(tmp_path / "cache"))

    def folder():
        for cached in (cache.source_stamp, cache._folder):
            cached.cache_clear()
        return cache._folder()

    yield copy, folder
    for cached in (cache.source_stamp, cache._folder):
        cached.cache_clear()


def edit(copy):
    link = copy / "links" / "laplace_numba.py"
    link.write_text(link.read_text().replace("tail = half * exp(-a)", "tail = half * exp(-two * a)"))


def test_an_edited_link_is_compiled_anew(copied_kernels):
    """Its file is not that of the loop that is kept, where numba's own cache looks."""
    copy, folder = copied_kernels
    before = folder()
    assert before.is_dir() and folder() == before
    edit(copy)
    assert folder() != before and not before.exists()


def test_a_new_archive_is_compiled_anew(tmp_path, copied_kernels, monkeypatch):
    """Python imports packages from zip files, too, in which no source can be listed."""
    _, folder = copied_kernels
    archive = tmp_path / "khot.zip"
    monkeypatch.setattr(cache, "PACKAGE", archive / "khot" / "kernels")
    found = []
    for content in (b"a", b"b", b"b"):
        archive.write_bytes(content)
        found.append(folder())
    assert found[0] != found[1] == found[2]


def test_processes_that_start_together_keep_the_folder_of_each_other(copied_kernels, monkeypatch):
    """While one process removes the loops of older sources, another has made the folder of the new ones already."""
    copy, folder = copied_kernels
    before, kept = folder(), []
    edit(copy)

    def remove_beside_another_process(path, **options):
        current = before.parent / cache.source_stamp()[:16]
        current.mkdir(parents=True, exist_ok=True)
        kept.append(current / "loop")
        kept[-1].touch()
        remove(path, **options)

    remove = shutil.rmtree
    monkeypatch.setattr(shutil, "rmtree", remove_beside_another_process)
    assert folder() != before and not before.exists()
    assert kept and all(path.exists() for path in kept)


def test_the_folder_is_none_of_the_working_directory(tmp_path, monkeypatch):
    monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    for relative in ("", "cache"):
        monkeypatch.setenv("XDG_CACHE_HOME", relative)
        assert cache._base().is_absolute()


def test_without_a_folder_that_can_be_written_there_is_one_warning(tmp_path, monkeypatch):
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("KHOT_CACHE_DIR", str(blocked))
    for cached in (cache._folder, cache._warn_of):
        cached.cache_clear()
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            kernels = [cpu_loops.kernel(_count), cpu_loops.kernel(_count)]
            assert [kernel(0, 3) for kernel in kernels] == [3, 3]
        assert len(caught) == 1 and caught[0].category is RuntimeWarning
        assert str(caught[0].message).endswith("set KHOT_CACHE_DIR to a writable folder")
    finally:
        for cached in (cache._folder, cache._warn_of):
            cached.cache_clear()


def _count(first, last):
    return last - first


def _twice(first, last):
    return 2 * (last - first)


@pytest.fixture
def new_folder(tmp_path, monkeypatch):
    """An empty folder for machine code, and no memory of other folders or of warnings."""
    monkeypatch.setenv("KHOT_CACHE_DIR", str(tmp_path))
    for cached in (cache._folder, cache._warn_of):
        cached.cache_clear()
    yield tmp_path
    for cached in (cache._folder, cache._warn_of):
        cached.cache_clear()


def _found_on_disk(function):
    """Whether a new process would find the machine code of a kernel on disk; runs the kernel."""
    loop = cpu_loops.kernel(function)
    assert loop(0, 3) == function(0, 3)
    return sum(loop.stats.cache_hits.values()) == 1


def test_a_folder_that_cannot_be_written_gives_what_it_has(new_folder, monkeypatch):
    """Another user has filled it, as in a container image."""

    def refuse(*arguments, **options):
        raise PermissionError(13, "Permission denied")

    assert [_found_on_disk(_count), _found_on_disk(_count)] == [False, True]
    for function in ("open", "mkdir"):  # of temporary files and of folders; they refuse root, too
        monkeypatch.setattr(os, function, refuse)
    monkeypatch.setattr(IndexDataCacheFile, "_open_for_write", refuse)
    cache._folder.cache_clear()
    assert _found_on_disk(_count)
    with pytest.warns(RuntimeWarning, match=r"again in every process.*PermissionError: Permission denied"):
        assert not _found_on_disk(_twice)


def test_a_damaged_file_is_written_anew(new_folder):
    """A power failure leaves files empty or cut off."""
    assert not _found_on_disk(_count)
    for kind, length in itertools.product(("nbi", "nbc"), (0, 20, 1000)):
        (path,) = new_folder.rglob(f"*.{kind}")
        path.write_bytes(path.read_bytes()[:-1][:length])
        assert [_found_on_disk(_count), _found_on_disk(_count)] == [False, True], (kind, length)


@for_each("written", ["loops", os.path.join("~", "loops")])
def test_a_folder_is_found_from_another_working_directory(tmp_path, monkeypatch, written):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    monkeypatch.setenv("KHOT_CACHE_DIR", written)
    monkeypatch.chdir(tmp_path)
    assert cache._base() == tmp_path / "loops"


def test_a_user_without_a_home_gets_one_warning(new_folder, monkeypatch):
    """As in a container that runs under a number without a name."""

    def no_home():
        raise RuntimeError("Could not determine home directory.")

    for variable in ("KHOT_CACHE_DIR", "NUMBA_CACHE_DIR"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(cache, "AppDirs", lambda *names, **options: SimpleNamespace(user_cache_dir="~/.cache/khot"))
    monkeypatch.setattr(Path, "home", no_home)
    with pytest.warns(RuntimeWarning, match=r"Could not determine home directory.*set KHOT_CACHE_DIR"):
        assert not _found_on_disk(_count)


def test_functions_of_a_factory_have_names_of_their_own():
    """Machine code is found by the name: two of one name would be taken for each other."""

    def factory(number):
        def add(first, last):
            return first + last + number

        return cpu_loops.kernel(add)

    with pytest.raises(RuntimeError, match="comes from a factory: compile it inside `specialised`"):
        factory(1)
    found = []
    for number in (1, 2):
        with cpu_loops.specialised(f"number {number}"):
            found.append(factory(number))
    assert [add(0, 0) for add in found] == [1, 2]
    assert len({add.py_func.__qualname__ for add in found}) == 2


# ---- Python without the interpreter lock, other devices


def test_where_numba_cannot_run_torch_does(monkeypatch):
    from khot.kernels.operators import platforms

    obstacle = platforms._numba_obstacle
    obstacle.cache_clear()
    assert obstacle(torch.device("cpu")) is None
    assert "run on a CPU" in obstacle(torch.device("meta"))
    obstacle.cache_clear()
    monkeypatch.setattr(sys, "_is_gil_enabled", lambda: False, raising=False)
    try:
        assert "global interpreter lock" in obstacle(torch.device("cpu"))
        assert torch.equal(sigmoid_topk(torch.zeros(4), 2), torch.full((4,), 0.5))
        with pytest.raises(RuntimeError, match="backend 'numba' is forced, but"), backend("numba"):
            sigmoid_topk(torch.zeros(4), 2)
    finally:
        obstacle.cache_clear()


@pytest.mark.slow
def test_torch_computes_while_the_compiler_of_numba_is_off():
    """As programs set it that debug or measure the coverage of their own loops."""
    program = """
        import logging, sys, torch, khot
        logging.basicConfig(stream=sys.stdout)
        logging.getLogger("khot").setLevel(logging.DEBUG)
        print(khot.sigmoid_topk(torch.zeros(4), 2).tolist())
    """
    reason, values = run_python(program, NUMBA_DISABLE_JIT="1", KHOT_BACKEND="auto").splitlines()
    assert values == "[0.5, 0.5, 0.5, 0.5]" and "NUMBA_DISABLE_JIT=1" in reason


@pytest.mark.slow
def test_expanded_sizes_need_no_other_machine_code():
    theta, k, seed = normal(2, 6), torch.tensor(2), torch.tensor([1])
    found = []
    for sizes in (torch.tensor([2, 2]), k.expand(2)):
        draws = (
            order_draw(theta, sizes, 0.0 * sizes, seed, 3, torch.float64, "log_exponential"),
            pivotal_draw(torch.full((2, 6), 1 / 3).double(), sizes, seed, 3, torch.float64),
        )
        loops = order_draw_loop("log_exponential"), _tournaments
        found.append((draws, [len(loop.signatures) for loop in loops]))
    assert found[0][1] == found[1][1]
    assert all(map(torch.equal, found[0][0], found[1][0]))


# ---- exp and log

each_real = pytest.mark.parametrize("real", [np.float32, np.float64])


def columns_of(real, x):
    """exp, log and log1p of each number."""
    with cpu_loops.specialised(f"test {real.__name__}"):
        exp, log, log1p = maths.EXP[real], maths.LOG[real], maths.LOG1P[real]

        def run(first, last, x, out):
            for i in range(first, last):
                out[i, 0], out[i, 1], out[i, 2] = exp(x[i]), log(x[i]), log1p(x[i])
            return 0

        loop = cpu_loops.kernel(run)
    out = np.empty((len(x), 3), real)
    loop(0, len(x), x.astype(real), out)
    return out.T


@each_real
def test_functions_are_right_to_two_units_in_the_last_place(real):
    generator = np.random.default_rng(0)
    small = 1e-3 * generator.normal(size=20_000)
    inputs = (
        np.concatenate([generator.uniform(-80, 80, 20_000), small]),
        np.concatenate([np.exp(generator.uniform(-80, 80, 20_000)), 1 + small]),
        np.concatenate([generator.uniform(-0.9, 1.0, 20_000), small]),
    )
    for i, (exact, x) in enumerate(zip((np.exp, np.log, np.log1p), inputs, strict=True)):
        expected, found = exact(x.astype(real).astype(np.longdouble)), columns_of(real, x)[i]
        unit = np.spacing(np.abs(expected).astype(real)).astype(np.longdouble)
        assert (np.abs(found - expected) / unit).max() < 2, exact


@each_real
def test_functions_underflow_gradually_and_end_where_they_should(real):
    limits = np.finfo(real)
    smallest = np.array(limits.smallest_subnormal)
    exp, log, _ = columns_of(real, np.array([-np.inf, 0, np.log(smallest) + 2, smallest], real))
    assert exp[0] == 0 and exp[1] == 1 and log[1] == -np.inf
    assert 0 < exp[2] < limits.tiny
    np.testing.assert_allclose(log[3], np.log(np.longdouble(smallest)), 1e-6)
