"""Python processes of their own, for what a test cannot show in the process of all tests."""

import os
import subprocess
import sys
import textwrap
from collections.abc import Iterable


def run_python(code: str, *arguments: str, without: Iterable[str] = (), **environment: str) -> str:
    """What a program prints, which has to succeed, with these variables of the environment and without some others."""
    return run_command("-c", textwrap.dedent(code), *arguments, without=without, **environment)


def run_command(*arguments: str, stderr: int = subprocess.PIPE, without: Iterable[str] = (), **environment: str) -> str:
    """What ``python`` with these arguments prints to standard output; ``stderr`` may be a file that is open."""
    inherited = {name: value for name, value in os.environ.items() if name not in without}
    result = subprocess.run(
        [sys.executable, *arguments],
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
        timeout=600,
        env=inherited | environment,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout
