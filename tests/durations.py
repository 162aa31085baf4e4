"""Writes how long the tests of each file took, and names the single cases that take long: `make durations`."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

LONG = 2.0  # seconds of one case


class Durations:
    """Adds up the seconds of tests, in this process or in those of pytest-xdist, and writes them at the end.

    The first case of a process that calls a loop compiles it, so that cases at the limit differ between runs.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.long = path, dict[str, float]()
        self.seconds, self.cases = Counter[str](), Counter[str]()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        file = report.nodeid.partition("::")[0]
        self.seconds[file] += report.duration
        self.cases[file] += report.when == "call"
        if report.when == "call" and report.duration > LONG:
            self.long[report.nodeid] = report.duration

    def pytest_sessionfinish(self) -> None:
        lines = [f"{file},{seconds:.1f},{self.cases[file]}" for file, seconds in self.seconds.most_common()]
        self.path.write_text("\n".join(["file,seconds,cases", *lines]) + "\n", encoding="utf-8")

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        terminalreporter.write_line(f"{len(self.long)} cases took more than {LONG:g} s:")
        for name, seconds in sorted(self.long.items(), key=lambda item: -item[1]):
            terminalreporter.write_line(f"{seconds:8.1f}  {name}")
