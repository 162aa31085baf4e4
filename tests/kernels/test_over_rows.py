"""Shares of the rows of a loop on several threads: each row once, by whoever comes, and errors where they belong."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

pytest.importorskip("numba", reason="the loops need numba, which is not installed")

from khot.kernels.cpu import loops
from khot.kernels.cpu.loops import ITEMS_A_ROW, ITEMS_TO_SHARE, kernel, over_rows

THREADS = 3
WORK = ITEMS_TO_SHARE  # items that are worth waking all threads for


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


def meet(first, last, rows, has_come):
    """In Python: who has the first row waits for the last one, and returns whether it has come."""
    if last == rows:
        has_come.set()
    return has_come.wait(10) if first == 0 else 0


def _visit_in_tuples(first, last, arrays, numbers):
    seen, weights = arrays
    factor, (doubled, offset) = numbers
    for row in range(first, last):
        seen[row, 0] += factor * weights[row] * (2 if doubled else 1) + offset
    return last - first


visit, refuse, visit_in_tuples = kernel(_visit), kernel(_refuse), kernel(_visit_in_tuples)


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


def test_tuples_of_arguments():
    for rows in (10, 1000):
        seen, weights = np.zeros((rows, 3)), np.arange(rows)
        assert over_rows(visit_in_tuples, rows, WORK, (seen, weights), (3, (True, 0.5))) == rows
        np.testing.assert_array_equal(seen[:, 0], 6 * weights + 0.5)


def test_rows_are_done_at_the_same_time():
    for _ in range(3):
        assert over_rows(meet, 100, WORK, 100, threading.Event()) == 1


def test_errors_are_those_of_the_loop():
    for row in (0, 500, 999):
        with pytest.raises(ValueError, match="this row is refused"):
            over_rows(refuse, 1000, WORK, row)
    assert over_rows(refuse, 1000, WORK, -1) == 1000


def test_integers_of_more_than_64_bits_are_an_error():
    assert over_rows(refuse, 1000, WORK, -1) == 1000
    with pytest.raises(OverflowError):
        over_rows(refuse, 1000, WORK, 2**63)


def test_a_caller_alone(monkeypatch):
    """When the interpreter has shut down the threads."""
    executor = ThreadPoolExecutor(1)
    executor.shutdown()
    monkeypatch.setattr(loops, "_executor", executor)
    check_visits(1000, doubled=True)


def test_no_more_helpers_than_threads_asked_for(monkeypatch):
    """And none for little work."""
    asked = []
    monkeypatch.setattr(loops, "_submitted", lambda function, times: asked.append(times) or [])
    assert over_rows(refuse, 1000, WORK, -1) == 1000
    torch.set_num_threads(2)
    assert over_rows(refuse, 1000, WORK, -1) == 1000
    for rows, items in ((2, 100), (1000, WORK - 1000 * ITEMS_A_ROW - 1)):
        assert over_rows(refuse, rows, items, -1) == rows
    assert asked == [THREADS - 1, 1]


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


def test_an_interrupted_caller_waits_for_the_shares_that_were_taken():
    """Or workers would write into arrays that are gone."""
    running, has_begun = [], threading.Event()

    def interrupt(first, last):
        if threading.current_thread() is threading.main_thread():
            has_begun.wait(10)
            raise KeyboardInterrupt
        running.append(first)
        has_begun.set()
        time.sleep(0.01)
        running.remove(first)
        return 0

    with pytest.raises(KeyboardInterrupt):
        over_rows(interrupt, 1000, WORK)
    assert has_begun.is_set() and not running
