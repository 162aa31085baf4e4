"""The threads of tests, which of them are slow because of what they are given, and whether every file ran."""

import gc
import itertools
import os
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

# Before torch is imported: threads that wait sleep. On as many processes as cores they take the cores from those that
# compute: small tensors on two threads cost ten to twenty times as much.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import pytest
import torch
from packaging.version import Version
from torch.distributions import Distribution

from khot.kernels import backend
from khot.kernels.operators.platforms import HAS_NUMBA
from tests import loops
from tests.backends import INTERPRETED, TESTED
from tests.durations import Durations
from tests.progress import Progress

# Tensors of tests are small, and threads that wait for each other cost more than they do.
torch.set_num_threads(1)
# One file in ten runs on two threads, as its user would: oracles, contracts and fuzz of each family.
ON_TWO_THREADS = {
    "distributions/test_conditional_poisson.py",
    "distributions/test_contract.py",
    "distributions/test_order_sampling.py",
    "distributions/test_sampford.py",
    "estimators/test_contract.py",
    "fuzz/test_magnitude.py",
    "fuzz/test_masks.py",
    "fuzz/test_order.py",
    "infer/test_khot_swap.py",
    "kernels/test_bernoulli_count.py",
    "kernels/test_selection.py",
    "nn/test_contract.py",
    "relaxations/test_contract.py",
    "relaxations/test_lapsum.py",
    "relaxations/test_magnitude.py",
    "relaxations/test_order.py",
    "relaxations/test_sigmoid.py",
    "relaxations/test_sparse.py",
    "test_losses.py",
    "test_readme.py",
}


# The longest files first, or one worker would wait for the other at the end. Tests that start processes come last,
# when the loops that these need are compiled.
ORDER = {
    "test_triton_interpreter.py": -1,
    "test_triton_aot.py": -1,
    "test_layering.py": 1,
    "test_export.py": 1,
    "test_ranks.py": 2,
}


MOST_CASES = 3  # of a test in a quick run, and of the values that a case loops over


@pytest.fixture(autouse=True, scope="module")
def _threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    if request.path.relative_to(Path(__file__).parent).as_posix() in ON_TWO_THREADS:
        torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def _validation_as_before() -> Iterator[None]:
    """torch.compile turns the validation of all distributions off, for good."""
    before = Distribution._validate_args
    yield
    Distribution.set_default_validate_args(before)


@pytest.fixture
def fresh_pyro() -> Iterator[None]:
    """Pyro without parameters, from seed 0, with all its checks: for files that ask for it by ``usefixtures``."""
    import pyro  # which tests on an accelerator do without

    pyro.clear_param_store()
    pyro.set_rng_seed(0)
    with pyro.validation_enabled(True):
        yield


@pytest.fixture(params=TESTED)
def cpu_backend(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each backend of a CPU: for contracts, reference values and fuzz tests, which show what all of them compute."""
    with backend(request.param):
        yield request.param


in_torch = ExitStack()  # plain torch computes while tests are collected


def pytest_collection_finish(session: pytest.Session) -> None:
    in_torch.close()
    gc.freeze()  # a million objects of the tests themselves, at which every later collection would look


def takes_all(config: pytest.Config) -> bool:
    """Whether nothing is left out, as ``--all`` is given or tests are named, by their names or by a marker."""
    named = any("::" in argument for argument in config.args) or bool(config.getoption("markexpr"))
    return named or bool(config.getoption("all"))


def is_quick(config: pytest.Config) -> bool:
    """Whether this run leaves out all that takes long."""
    return not (takes_all(config) or config.getoption("most"))


def pytest_report_header(config: pytest.Config) -> str | None:
    if takes_all(config):
        return None
    if not is_quick(config):
        return "khot: no test that is marked exhaustive; --all runs them, too"
    return "khot: some parameter sets of each test, and no test that takes long; --most runs more, --all everything"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--each-file-runs",
        action="store_true",
        help="fail unless a test passes in every file named, and none is skipped",
    )
    group = parser.getgroup("khot")
    group.addoption("--most", action="store_true", help="all parameter sets of all tests but those marked exhaustive")
    group.addoption("--all", action="store_true", help="all parameter sets of all tests, also those that take long")
    group.addoption("--progress", action="store_true", help="a line every few seconds instead of a dot for each test")
    group.addoption("--durations-file", type=Path, help="where to write the seconds that each file of tests took")
    group.addoption("--fuzz-rows", type=int, default=0, help="rows of the long fuzz tests, instead of a few thousand")
    group.addoption("--fuzz-seed", type=int, default=10**6, help="seed of the rows of the long fuzz tests")


def pytest_configure(config: pytest.Config) -> None:
    loops.most = MOST_CASES if is_quick(config) and not INTERPRETED else None
    in_torch.enter_context(backend("torch"))
    config.add_cleanup(in_torch.close)
    if config.getoption("progress") and not hasattr(config, "workerinput"):  # of the process that has the terminal
        config.pluginmanager.register(Progress(config))
    if config.getoption("durations_file") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Durations(config.getoption("durations_file")))
    if config.getoption("each_file_runs"):
        config.pluginmanager.register(EachFileRuns(config))


class EachFileRuns:
    """Fails a run in which a file has nothing to show: a selection by markers that selects no test is no success."""

    def __init__(self, config: pytest.Config) -> None:
        self.root, here = config.rootpath, config.invocation_params.dir
        self.idle = {(here / argument.partition("::")[0]).resolve() for argument in config.args}
        self.skipped: list[str] = []

    @pytest.hookimpl
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" and report.passed:
            self.idle.discard((self.root / report.location[0]).resolve())
        if report.skipped:
            self.skipped.append(report.nodeid)

    @pytest.hookimpl
    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.skipped:
            self.skipped.append(report.nodeid)

    @pytest.hookimpl
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if (self.idle or self.skipped) and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    @pytest.hookimpl
    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        for file in sorted(self.idle):
            terminalreporter.write_line(f"FAILED: no test passed in {file}", red=True)
        for name in self.skipped:
            terminalreporter.write_line(f"FAILED: skipped {name}", red=True)


MOST_SECONDS = 5.0  # processor time that a case may take unless it is marked `slow`
COMPILATIONS = None
if HAS_NUMBA:
    from numba.core import event

    COMPILATIONS = event.TimingListener()
    event.register("numba:compiler_lock", COMPILATIONS)


def processor_time() -> float:
    """Seconds of this process, without those in which numba compiled: what is compiled first depends on the order."""
    return time.process_time() - (COMPILATIONS.duration if COMPILATIONS and COMPILATIONS.done else 0.0)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """A case that takes long is an error unless it is marked so. A busy machine fails none: no clock counts."""
    before = processor_time()
    yield
    seconds = processor_time() - before
    if seconds > MOST_SECONDS and not INTERPRETED and not item.get_closest_marker("slow"):
        pytest.fail(
            f"{seconds:.1f} s of the processor: fewer or smaller values, or `slow` with the reason in a comment"
        )


TORCH = Version(Version(torch.__version__).base_version)


def parameters_of(item: pytest.Item) -> dict[str, Any]:
    """What a case of a test was given, by name."""
    return dict(item.callspec.params) if hasattr(item, "callspec") else {}


def test_of(item: pytest.Item) -> str:
    """The name of the test that it is a case of."""
    return item.nodeid.partition("[")[0]


def by_test(items: Iterable[pytest.Item]) -> list[list[pytest.Item]]:
    """The cases of each test."""
    return [list(group) for _, group in itertools.groupby(sorted(items, key=test_of), test_of)]


def takes_long(item: pytest.Item) -> bool:
    """Whether a test is marked ``slow``, or is one of a member of a registry that says so."""
    return bool(item.get_closest_marker("slow")) or any(
        getattr(value, "slow", False) for value in parameters_of(item).values()
    )


def some_of(items: Iterable[pytest.Item]) -> set[pytest.Item]:
    """At most ``MOST_CASES`` of each test, of which each is the first that has the most values that were not met.

    Registries begin with their most common members. If every test took others, all loops would be compiled: minutes.
    """
    chosen = set[pytest.Item]()
    for cases in by_test(items):
        values = [{(name, id(value)) for name, value in parameters_of(item).items()} for item in cases]
        met = set[tuple[str, int]]()
        for _ in range(MOST_CASES):
            best = max(range(len(cases)), key=lambda i: len(values[i] - met))
            if met >= values[best] and met:
                break
            chosen.add(cases[best])
            met |= values[best]
    return chosen


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out tests for an accelerator, and of a quick run most cases of each test."""
    for item in items:
        if takes_long(item):
            item.add_marker(pytest.mark.slow)
        for needed in item.iter_markers("needs_torch"):
            if Version(needed.args[0]) > TORCH:
                item.add_marker(pytest.mark.skip(reason=f"needs torch {needed.args[0]}"))
    wanted = {*items}
    if "gpu" not in config.getoption("markexpr"):
        wanted -= {item for item in items if item.get_closest_marker("gpu")}
    if not takes_all(config):
        wanted -= {item for item in items if item.get_closest_marker("exhaustive")}
    if is_quick(config):
        wanted -= {item for item in items if item.get_closest_marker("slow")}
        if not INTERPRETED:
            wanted = some_of([item for item in items if item in wanted])
    if left_out := [item for item in items if item not in wanted]:
        config.hook.pytest_deselected(items=left_out)
    items[:] = sorted((item for item in items if item in wanted), key=lambda item: ORDER.get(item.path.name, 0))
