"""Shares of the rows of a loop on several threads: each row once, by whoever comes, and errors where they belong."""

import threading

import numpy as np
import pytest
import torch

pytest.importorskip("numba", reason="the loops need numba, which is not installed")

from khot.kernels.cpu.loops import ITEMS_A_WAKING, kernel, over_rows
from khot.kernels.cpu.pool import shares
from khot.kernels.cpu.pool import workers as pool
from khot.kernels.cpu.pool.entries import entry_of

THREADS = 3
WORK = 2 * ITEMS_A_WAKING  # items that are worth waking threads for


@pytest.fixture(autouse=True)
def threads():
    before = torch.get_num_threads()
    torch.set_num_threads(THREADS)
    yield
    torch.set_num_threads(before)


def _visit(first, last, seen, weights, factor, doubled, offset):
    for row in range(first, last):
        seen[row, 0] += factor * weights[row] * (2 if doubled else 1) + offset
    return last - first


def _refuse(first, last, row):
    if first <= row < last:
        raise ValueError("this row is refused")
    return last - first


def _meet(first, last, flags, rows, turns):
    """Marks its rows; who has the first one waits for the last, and returns whether it has come."""
    for row in range(first, last):
        shares.store(flags + 8 * row, 1)
    if first > 0:
        return 0
    while turns > 0 and shares.load(flags + 8 * (rows - 1)) == 0:
        turns -= 1
    return 1 if turns > 0 else 0


def _visit_in_tuples(first, last, arrays, numbers):
    seen, weights = arrays
    factor, (doubled, offset) = numbers
    for row in range(first, last):
        seen[row, 0] += factor * weights[row] * (2 if doubled else 1) + offset
    return last - first


visit, refuse, meet, visit_in_tuples = kernel(_visit), kernel(_refuse), kernel(_meet), kernel(_visit_in_tuples)


def check_visits(rows: int, doubled: bool) -> None:
    """An array with gaps and one that may only be read, an integer, a float and a truth value."""
    seen, weights = np.zeros((2 * rows, 3))[::2], np.arange(rows)
    weights.flags.writeable = False
    assert over_rows(visit, rows, WORK, seen, weights, 3, doubled, 0.5) == rows
    np.testing.assert_array_equal(seen[:, 0], 3 * weights * (2 if doubled else 1) + 0.5)
    assert not seen[:, 1:].any()


def test_each_row_is_done_once():
    for turn in range(100):
        check_visits(2 + 17 * turn, doubled=turn % 2 == 0)


@pytest.mark.parametrize("doubled", [2, True], ids=["words", "truth_value"])
def test_tuples_of_arguments(doubled):
    """Also nested ones; one with a truth value, which is no word in memory, is for the caller alone."""
    for rows in (10, 1000):
        seen, weights = np.zeros((rows, 3)), np.arange(rows)
        assert over_rows(visit_in_tuples, rows, WORK, (seen, weights), (3, (doubled, 0.5))) == rows
        np.testing.assert_array_equal(seen[:, 0], 6 * weights + 0.5)
        entry = entry_of(visit_in_tuples, ((seen, weights), (3, (doubled, 0.5))))
        assert (entry is None) == (doubled is True)


def test_rows_are_done_at_the_same_time():
    """Here and on another thread, which has gone to sleep before."""
    for _ in range(3):
        flags = np.zeros(100, np.int64)
        assert over_rows(meet, 100, WORK, flags.ctypes.data, 100, 10**10) == 1


def test_errors_are_those_of_the_loop():
    for row in (0, 500, 999):
        with pytest.raises(ValueError, match="this row is refused"):
            over_rows(refuse, 1000, WORK, row)
    assert over_rows(refuse, 1000, WORK, -1) == 1000


def test_integers_of_more_than_64_bits_are_an_error():
    assert over_rows(refuse, 1000, WORK, -1) == 1000
    with pytest.raises(OverflowError):
        over_rows(refuse, 1000, WORK, 2**63)


def test_a_caller_alone():
    """While another thread leads the workers, and when the interpreter shuts down."""
    with pool._workers.lock:
        check_visits(1000, doubled=False)
    workers = pool._Workers()
    workers.start(THREADS - 1)
    started = list(workers.threads)
    assert len(started) == THREADS - 1 and all(thread.is_alive() for thread in started)
    workers.close()
    assert not any(thread.is_alive() for thread in started)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pool, "_workers", workers)
        check_visits(1000, doubled=True)
    assert not workers.threads


def test_few_rows_wake_nobody():
    workers = pool._Workers()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pool, "_workers", workers)
        assert over_rows(refuse, 2, 100, -1) == 2
    assert not workers.threads


def test_no_more_workers_than_threads_asked_for():
    """After a call with more of them."""
    over_rows(refuse, 1000, WORK, -1)
    torch.set_num_threads(2)
    over_rows(refuse, 1000, WORK, -1)
    assert pool._workers.job[shares.WORKERS // 8] == 1


def test_many_callers_at_once():
    failures = []

    def call():
        try:
            for rows in range(2, 100):
                check_visits(rows, doubled=rows % 2 == 0)
        except AssertionError as failure:
            failures.append(failure)

    callers = [threading.Thread(target=call) for _ in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert not failures


def test_an_interrupted_caller_waits_for_the_shares_that_were_taken(monkeypatch):
    """Or workers would write into arrays that are gone."""
    seen, weights = np.zeros((1000, 3)), np.arange(1000)

    def interrupt(workers, count):
        raise KeyboardInterrupt

    monkeypatch.setattr(pool._Workers, "wake", interrupt)
    with pytest.raises(KeyboardInterrupt):
        over_rows(visit, 1000, WORK, seen, weights, 1, False, 1.0)
    np.testing.assert_array_equal(seen[:, 0], weights + 1.0)
