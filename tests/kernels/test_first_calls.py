"""What a first call costs a person: loops that are kept, and what is told meanwhile."""

import gc
import io
import os
import textwrap
import time
from types import SimpleNamespace

import pytest

from tests.processes import run_command

pytest.importorskip("numba", reason="numba is not installed")

from numba.core.errors import TypingError

from khot.kernels.cpu import cache
from khot.kernels.cpu.loops import kernel

# ---- Machine code on disk

REPORTED = textwrap.dedent("""
    import logging, sys, torch, khot
    from khot.kernels.cpu import cache
    found = []
    load = cache._Cache.load_overload
    def report(self, *arguments):
        result = load(self, *arguments)
        found.append(result is not None)
        return result
    cache._Cache.load_overload = report
    cache.notice.patience = 0.05
    x = torch.randn(3, 5, requires_grad=True)
    khot.soft_rank(x).sum().backward()  # two loops that take little time to compile
    print(sum(found), len(found))
""")


@pytest.mark.slow
def test_a_second_process_finds_all_machine_code_on_disk_and_is_told_of_none(tmp_path):
    pty = pytest.importorskip("pty", reason="there are no pseudo-terminals on this platform")
    found, told = [], []
    for _ in range(2):
        ours, theirs = pty.openpty()
        found.append(run_command("-c", REPORTED, stderr=theirs, KHOT_CACHE_DIR=str(tmp_path), KHOT_QUIET=""))
        os.write(theirs, b"end\n")  # or there is nothing to read
        told.append(os.read(ours, 4096).decode())
        os.close(theirs)
        os.close(ours)
    assert found == ["0 2\n", "2 2\n"]
    assert [text.count("khot is compiling loops for this CPU") for text in told] == [1, 0]


# ---- Garbage


def _last(first, last):
    return last


def _wrong(first, last):
    return last.name


@pytest.mark.parametrize("collects", [True, False])
def test_a_compilation_leaves_the_collection_of_garbage_as_it_was(collects):
    before = gc.isenabled()
    (gc.enable if collects else gc.disable)()
    frozen = gc.get_freeze_count() > 0
    try:
        assert kernel(_last)(0, 3) == 3
        with pytest.raises(TypingError):
            kernel(_wrong)(0, 3)
        assert gc.isenabled() == collects and (gc.get_freeze_count() > 0) == frozen
    finally:
        (gc.enable if before else gc.disable)()


# ---- What a person at a terminal is told


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def terminal(monkeypatch):
    """Standard error that is a terminal, and a notice that waits for an instant only."""
    monkeypatch.delenv("KHOT_QUIET", raising=False)
    stderr = Terminal()
    monkeypatch.setattr(cache, "sys", SimpleNamespace(stderr=stderr))  # pytest replaces that of sys itself once more
    notice = cache._Notice()
    notice.patience = 0.01
    yield notice, stderr
    notice.end()


def compile_past_patience(notice):
    """A compilation that ends only when the notice has waited long enough, however busy the machine is."""
    notice.begin()
    if notice.timer is not None:
        notice.timer.join(60)
    notice.end()


def test_a_long_compilation_is_told_once(terminal):
    notice, stderr = terminal
    for _ in range(3):
        compile_past_patience(notice)
    shown = stderr.getvalue()
    assert shown.count("\n") == 1 and shown.startswith("khot is compiling loops for this CPU, once; it keeps them in ")
    assert str(cache._base()) in shown and "KHOT_QUIET=1" in shown


def test_many_compilations_are_long_together(terminal):
    """A loop takes a fraction of the time, and the first call of a design compiles several."""
    notice, stderr = terminal
    notice.patience = 1000.0
    notice.begin()
    time.sleep(0.2)
    notice.end()
    assert notice.patience < 999.81 and stderr.getvalue() == ""
    notice.patience = 0.01  # what is left after some more
    compile_past_patience(notice)
    assert stderr.getvalue().count("\n") == 1


def test_the_line_waits_for_two_seconds():
    assert cache._Notice().patience == 2


@pytest.mark.parametrize("stderr", [Terminal(), io.StringIO(), None], ids=["KHOT_QUIET", "no terminal", "no stderr"])
def test_nothing_is_told_if_nobody_is_there_or_wants_it(terminal, monkeypatch, stderr):
    notice, _ = terminal
    monkeypatch.setattr(cache, "sys", SimpleNamespace(stderr=stderr))
    if isinstance(stderr, Terminal):
        monkeypatch.setenv("KHOT_QUIET", "1")
    compile_past_patience(notice)
    assert notice.timer is None and (stderr is None or stderr.getvalue() == "")
