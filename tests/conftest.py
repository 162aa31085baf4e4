"""One thread for all tests, which of them are slow because of what they are given, and whether every file ran."""

import gc
import os
from collections.abc import Iterator

import pytest
import torch
from torch.distributions import Distribution

from khot.kernels import backend
from tests.backends import BACKENDS, USUAL

torch.set_num_threads(1)  # their tensors are small, and threads that wait for each other cost more than they do


# The longest first, or one process would wait for the other; what runs processes of its own last, when loops that are
# compiled for a CPU lie on disk.
ORDER = {
    "test_triton_interpreter.py": -1,
    "test_triton_aot.py": -1,
    "test_layering.py": 1,
    "test_export.py": 1,
    "test_ranks.py": 2,
}


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


IN_TURN = [name if name == USUAL else pytest.param(name, marks=pytest.mark.slow) for name in BACKENDS]


@pytest.fixture(params=["triton"] if os.environ.get("TRITON_INTERPRET") == "1" else IN_TURN)
def cpu_backend(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each backend of a CPU in its turn, for what is computed in all of them; plain `pytest` takes the usual one."""
    with backend(request.param):
        yield request.param


def pytest_collection_finish() -> None:
    gc.freeze()  # a million objects of the tests themselves, at which every later collection would look


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--each-file-runs",
        action="store_true",
        help="fail unless a test passes in every file named, and none is skipped",
    )
    group = parser.getgroup("khot")
    group.addoption("--fuzz-rows", type=int, default=0, help="rows of the long fuzz tests, instead of a few thousand")
    group.addoption("--fuzz-seed", type=int, default=10**6, help="seed of the rows of the long fuzz tests")


def pytest_configure(config: pytest.Config) -> None:
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
    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        for file in sorted(self.idle):
            terminalreporter.write_line(f"FAILED: no test passed in {file}", red=True)
        for name in self.skipped:
            terminalreporter.write_line(f"FAILED: skipped {name}", red=True)


INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # a run of chosen files, of which all cases count
MOST_CASES = 10  # of a test in plain `pytest`


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A test of a member that calls itself slow is slow; of many cases, all but some spread evenly over them are."""
    items.sort(key=lambda item: ORDER.get(item.path.name, 0))
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        parameters = item.callspec.params.values() if hasattr(item, "callspec") else ()
        if any(getattr(value, "slow", False) for value in parameters):
            item.add_marker(pytest.mark.slow)
        if not item.get_closest_marker("slow"):
            cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for of_one_test in cases.values():
        mark = of_one_test[0].get_closest_marker("one_of")
        evenly = 1 if INTERPRETED else 1 + (len(of_one_test) - 1) // MOST_CASES
        step = mark.args[0] if mark else evenly
        for i, item in enumerate(of_one_test):
            if i % step:
                item.add_marker(pytest.mark.slow)
