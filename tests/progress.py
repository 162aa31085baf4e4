"""Prints a line of progress every few seconds instead of a dot for each test, for runs of many minutes."""

import time
from typing import Any

import pytest

SECONDS = 15  # between two lines


class Progress:
    """Counts the tests that have run, in this process or in those of pytest-xdist."""

    def __init__(self, config: pytest.Config) -> None:
        self.config, self.total, self.done = config, 0, 0
        self.start = self.shown = time.monotonic()

    def _expect(self, total: int) -> None:
        self.total, self.start = total, time.monotonic()

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        if session.items:
            self._expect(len(session.items))

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, node: Any, ids: list[str]) -> None:
        self._expect(len(ids))

    @pytest.hookimpl(tryfirst=True)
    def pytest_report_teststatus(self, report: pytest.TestReport) -> tuple[str, str, str] | None:
        """No letter for a test that passed or was skipped."""
        if report.failed or hasattr(report, "wasxfail"):
            return None
        return report.outcome if report.skipped or report.when == "call" else "", "", ""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.done += report.when == "teardown"
        now = time.monotonic()
        if self.total and now - self.shown > SECONDS:
            self.shown = now
            left = (now - self.start) * (self.total - self.done) / max(1, self.done) / 60
            terminal = self.config.pluginmanager.getplugin("terminalreporter")
            terminal.ensure_newline()
            line = f"{self.done / self.total:4.0%}  {self.done:,} of {self.total:,} tests"
            terminal.write_line(
                f"{line}, about {left:.0f} min left" if left >= 1 else f"{line}, less than a minute left"
            )
            terminal.flush()  # a pipe, as a build server's log is one, would keep the lines back
