"""Pages are Markdown that a repository page shows as well: no roles, no directives. Sphinx's forms are put in here.

What a page has           what Sphinx reads
`sigmoid_topk`            a reference to the entry of this public name
```python with >>>        a doctest, which is run
examples/NAME.py          the page on which the example is shown with its output
"""

import re

from sphinx.application import Sphinx

import api_pages

FENCED = re.compile(r"^( *)(```+).*?^\1\2 *$", flags=re.DOTALL | re.MULTILINE)
SESSION = re.compile(r"^( *```)python(?=\n *>>> )", flags=re.MULTILINE)
EXAMPLE = re.compile(r"\]\((?:\.\./)*examples/(\w+)\.py\)")
NAME = re.compile(r"(?<![`\[\w}])`((?:khot\.)?(?:\w+\.)?(\w+))`(?![`\w\]])")
MODULE = re.compile(r"khot\.\w+")
ORDINARY_WORDS = {"backend"}  # they mean something else where no `khot.kernels.` precedes them


def for_sphinx(text: str, examples: str) -> str:
    """The text of a page, with references, doctests and links that Sphinx understands.

    Args:
        text: The page as it is written.
        examples: The folder with the pages of the examples, as seen from this page.
    """
    parts, start = [], 0
    for block in FENCED.finditer(text):
        parts += [_prose(text[start : block.start()], examples), SESSION.sub(r"\1{doctest}", block[0])]
        start = block.end()
    return "".join([*parts, _prose(text[start:], examples)])


def _prose(text: str, examples: str) -> str:
    return NAME.sub(_reference, EXAMPLE.sub(rf"]({examples}/\1)", text))


def _reference(match: re.Match[str]) -> str:
    written, name = match.groups()
    if written in api_pages.PACKAGES and MODULE.fullmatch(written):
        return f"{{py:mod}}`{written}`"
    home = api_pages.home_of(name)
    prefix = written.removesuffix(name)
    if home is None or prefix not in ("", "khot.", f"{home}.") or (not prefix and name in ORDINARY_WORDS):
        return match[0]
    return f"{{py:obj}}`{written} <{home}.{name}>`"


def _read(app: Sphinx, page: str, content: list[str]) -> None:
    if app.env.doc2path(page).endswith(".md"):
        content[0] = for_sphinx(content[0], "../" * page.count("/") + "examples")


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("source-read", _read)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
