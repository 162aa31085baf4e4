"""Examples as sphinx-gallery reads them, which wants the first line of a docstring to be underlined."""

import ast
import shutil
from pathlib import Path

MOST_LINES = 80  # of a script that people copy; a longer one is no example
WELCOME = """Examples
========

Scripts to copy, each self-contained and run by the build of this site, with what they print and draw. They are the
files of ``examples/`` in the repository.
"""


def stage(source: Path, folder: Path) -> None:
    """Puts the examples into a folder of the build, with their titles underlined."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    (folder / "GALLERY_HEADER.rst").write_text(WELCOME)
    for script in sorted(source.glob("*.py")):
        text = script.read_text()
        if len(text.splitlines()) <= MOST_LINES:
            (folder / script.name).write_text(with_title(text))


def with_title(text: str) -> str:
    """The script with the first sentence of its docstring as a title."""
    docstring = ast.get_docstring(ast.parse(text))
    if not docstring:
        raise ValueError("an example must begin with a docstring, whose first line is the title of its page")
    first, _, rest = docstring.partition("\n")
    title = first.rstrip(".")
    if not set(rest.partition("\n")[0]) <= set("=-"):
        raise ValueError("an example has its title in the first line of its docstring, not underlined")
    after = text.split('"""', 2)[2]
    return f'"""{title}\n{"=" * len(title)}\n{rest}\n"""{after}'
