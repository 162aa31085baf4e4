"""Prints the seconds that each page took: to read, and to run its example or its doctests.

    seconds   read    run  page
       12.3    0.4   11.9  examples/khot_vae

`make docs` runs Sphinx quietly, which hides the times that Sphinx's own extensions report.
"""

import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from docutils.nodes import Node, document
from sphinx.application import Sphinx
from sphinx.ext.doctest import DocTestBuilder

SHORTEST = 0.5  # seconds; quicker pages share a line
reading: dict[str, float] = defaultdict(float)
running: dict[str, float] = defaultdict(float)
started: dict[str, float] = {}


def example(gallery_conf: dict[str, Any], file: str | None, when: str) -> None:
    """Sphinx-Gallery calls this before and after each example that it runs, which are those that have changed."""
    if file is None:  # it calls this when it begins and ends a gallery, too
        return
    page = f"{Path(file).parent.name}/{Path(file).stem}"
    if when == "before":
        started[page] = time.perf_counter()
    else:
        running[page] += time.perf_counter() - started.pop(page)


def table() -> str:
    """The slow pages, slowest first, and the sum of the others."""
    pages = reading.keys() | running.keys()
    spent = sorted(((reading[page] + running[page], page) for page in pages), reverse=True)
    slow = [(seconds, page) for seconds, page in spent if seconds >= SHORTEST]
    rest = sum(seconds for seconds, _ in spent[len(slow) :])
    lines = [f"{seconds:9.1f} {reading[page]:6.1f} {running[page]:6.1f}  {page}" for seconds, page in slow]
    lines.append(f"{rest:9.1f}{'':16}{len(spent) - len(slow)} other pages")
    return "\n".join(["  seconds   read    run  page", *lines])


def _starts_reading(app: Sphinx, page: str, content: list[str]) -> None:
    started[page] = time.perf_counter()


def _has_read(app: Sphinx, doctree: document) -> None:
    page = app.env.docname
    if page in started:  # included files have no start of their own
        reading[page] += time.perf_counter() - started.pop(page)


def _timed(test_doc: Any) -> Any:
    def timed(builder: DocTestBuilder, page: str, doctree: Node) -> Any:
        start = time.perf_counter()
        try:
            return test_doc(builder, page, doctree)
        finally:
            running[page] += time.perf_counter() - start

    return timed


def _report(app: Sphinx, error: Exception | None) -> None:
    if error is None:
        print(f"{app.builder.name}:\n{table()}", flush=True)


def setup(app: Sphinx) -> dict[str, bool]:
    DocTestBuilder.test_doc = _timed(DocTestBuilder.test_doc)  # type: ignore[method-assign]
    app.connect("source-read", _starts_reading, priority=0)
    app.connect("doctree-read", _has_read, priority=1000)
    app.connect("build-finished", _report)
    return {"parallel_read_safe": False, "parallel_write_safe": True}
