"""Turns pages of plain Markdown, which a repository can show as well, into what Sphinx reads.

What a page has           what Sphinx reads
`sigmoid_topk`            a reference to the entry of this public name
```python with >>>        a doctest, which is run
examples/NAME.py          the page on which the example, or the tutorial, is shown with its output
examples                  the list of these pages
"""

import re
from pathlib import Path

from sphinx.application import Sphinx

import api_pages

FENCED = re.compile(r"^( *)(```+).*?^\1\2 *$", flags=re.DOTALL | re.MULTILINE)
SESSION = re.compile(r"^( *```)python(?=\n *>>> )", flags=re.MULTILINE)
EXAMPLE = re.compile(r"\]\((?:\.\./)+(examples|tutorials)(?:/(\w+)\.py)?\)")
NAME = re.compile(r"(?<![`\[\w}])`((?:khot\.)?(?:\w+\.)?(\w+))`(?![`\w\]])")
MODULE = re.compile(r"khot\.\w+")
ORDINARY_WORDS = {"backend"}  # they mean something else where no `khot.kernels.` precedes them


def for_sphinx(text: str, up: str) -> str:
    """The text of a page, with references, doctests and links that Sphinx understands.

    Args:
        text: The page as it is written.
        up: The way from the folder of this page to that of the site.
    """
    parts, start = [], 0
    for block in FENCED.finditer(text):
        parts += [_prose(text[start : block.start()], up), SESSION.sub(r"\1{doctest}", block[0])]
        start = block.end()
    return "".join([*parts, _prose(text[start:], up)])


def _prose(text: str, up: str) -> str:
    def link(match: re.Match[str]) -> str:
        folder, page = match.groups()
        return f"]({up}{folder}/{page or 'index.rst'})"

    return NAME.sub(_reference, EXAMPLE.sub(link, text))


def _reference(match: re.Match[str]) -> str:
    written, name = match.groups()
    if written in api_pages.PACKAGES and MODULE.fullmatch(written):
        return f"{{py:mod}}`{written}`"
    entry = api_pages.entry_of(name)
    prefix = written.removesuffix(name)
    packages = ("", "khot.", *(f"{package}." for package in api_pages.PACKAGES))
    if entry is None or prefix not in packages or (not prefix and name in ORDINARY_WORDS):
        return match[0]
    return f"{{py:obj}}`{written} <{entry}>`"


def _read(app: Sphinx, page: str, content: list[str]) -> None:
    if Path(app.env.doc2path(page)).suffix == ".md":
        content[0] = for_sphinx(content[0], "../" * page.count("/"))


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("source-read", _read)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
