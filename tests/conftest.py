"""One thread for all tests, which of them are slow because of what they are given, and whether every file ran."""

import gc
import itertools
import os
from collections.abc import Iterator
from contextlib import ExitStack, nullcontext
from typing import Any

import pytest
import torch
from torch.distributions import Distribution

from khot.kernels import backend
from tests.backends import BACKENDS
from tests.pairwise import covering

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


INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # a run of chosen files, of which all cases count


@pytest.fixture(params=["triton"] if INTERPRETED else BACKENDS)
def cpu_backend(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each backend of a CPU in its turn, for what is computed in all of them.

    Cases of such tests are ``pairwise``: each value of another parameter meets each backend. Plain `pytest` takes those
    in plain torch, and others that are marked ``loops``.
    """
    with backend(request.param):
        yield request.param


@pytest.fixture(autouse=True)
def _backend_of_a_user(request: pytest.FixtureRequest) -> Iterator[None]:
    """For a test marked ``loops``, what a user has without asking, also in plain `pytest`."""
    with backend("auto") if request.node.get_closest_marker("loops") and not INTERPRETED else nullcontext():
        yield


in_torch = ExitStack()  # plain torch computes while tests are collected, and in plain `pytest` to the end


def pytest_collection_finish(session: pytest.Session) -> None:
    if not is_quick(session.config):
        in_torch.close()
    gc.freeze()  # a million objects of the tests themselves, at which every later collection would look


def is_quick(config: pytest.Config) -> bool:
    """Whether this is plain `pytest`, which shall compile few loops."""
    return "not slow" in config.getoption("markexpr") and not INTERPRETED


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
    in_torch.enter_context(backend("torch"))
    config.add_cleanup(in_torch.close)
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


MOST_CASES = 10  # of a test in plain `pytest`


def parameters_of(item: pytest.Item) -> dict[str, Any]:
    """What a case of a test was given, by name."""
    return dict(item.callspec.params) if hasattr(item, "callspec") else {}


def test_of(item: pytest.Item) -> str:
    """The name of the test that it is a case of."""
    return item.nodeid.partition("[")[0]


def not_in_pairs(items: list[pytest.Item]) -> set[pytest.Item]:
    """Of ``pairwise`` tests, the cases that show no two values together which other cases do not."""
    left_out = set[pytest.Item]()
    given = {item: parameters_of(item) for item in items}
    paired = [i for i in items if given[i] and (i.get_closest_marker("pairwise") or "cpu_backend" in given[i])]
    for _, group in itertools.groupby(sorted(paired, key=test_of), test_of):
        of_one_test = list(group)
        values = [
            {name: value if isinstance(value, str | float) else id(value) for name, value in given[item].items()}
            for item in of_one_test
        ]
        left_out |= {*of_one_test} - {of_one_test[i] for i in covering(values)}
    return left_out


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out cases of tests in pairs; marks as slow what a member calls so, and of many quick cases all but some.

    These are spread evenly over all cases of their test.
    """
    if left_out := not_in_pairs(items):
        config.hook.pytest_deselected(items=[item for item in items if item in left_out])
        items[:] = [item for item in items if item not in left_out]
    items.sort(key=lambda item: ORDER.get(item.path.name, 0))
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        values = parameters_of(item)
        needs_loops = values.get("cpu_backend") == "numba" and not item.get_closest_marker("loops")
        if needs_loops or any(getattr(value, "slow", False) for value in values.values()):
            item.add_marker(pytest.mark.slow)
        if not item.get_closest_marker("slow"):
            cases.setdefault(test_of(item), []).append(item)
    for of_one_test in cases.values():
        mark = of_one_test[0].get_closest_marker("one_of")
        evenly = 1 if INTERPRETED else 1 + (len(of_one_test) - 1) // MOST_CASES
        step = mark.args[0] if mark else evenly
        for i, item in enumerate(of_one_test):
            if i % step:
                item.add_marker(pytest.mark.slow)
