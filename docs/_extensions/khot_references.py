"""What docstrings and the code need to become pages: references to names and papers, and only what is public."""

import re
from typing import Any

from docutils.nodes import Element
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment

import api_pages
import khot

PAPER = re.compile(r"^(\s*)(\[\d+\] )")
# Methods that a reader meets only through torch or Pyro, unless they have a text of their own.
FILLED_IN = {"apply", "expand", "extra_repr", "forward", "infer_shapes", "update"}


def find(app: Sphinx, env: BuildEnvironment, node: pending_xref, content: Element) -> Element | None:
    """The entry of a public name that is called `khot.X` for `khot.package.X`, or X from within another package."""
    if node.get("refdomain") != "py":
        return None
    name = node["reftarget"].removeprefix("khot.")
    home = api_pages.home_of(name.partition(".")[0])
    if home is None:
        return None
    domain = env.get_domain("py")
    return domain.resolve_xref(env, node["refdoc"], app.builder, node["reftype"], f"{home}.{name}", node, content)


def list_papers(app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Makes the papers under `References:` items of a list; what continues one is indented by 4 already."""
    inside = False
    for i, line in enumerate(lines):
        if line.strip() == "References:":
            inside = True
        elif inside and line.strip() and not line.startswith(" "):
            inside = False
        elif inside:
            lines[i] = PAPER.sub(r"\1-   \2", line)


def read_as_text(app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Keeps napoleon from taking the text before a colon in the first line of a property for its type."""
    if what == "property":
        lines.insert(0, "\\ ")  # which shows nothing


def skip(app: Sphinx, what: str, name: str, obj: Any, leaves_out: bool, options: Any) -> bool | None:
    return True if name in FILLED_IN and getattr(obj, "__doc__", None) is None else None


def show_public_bases(app: Sphinx, name: str, obj: type, options: Any, bases: list[type]) -> None:
    bases[:] = dict.fromkeys(public for base in bases for public in public_bases(base))


def public_bases(base: type) -> list[type]:
    """A class, or the nearest above it that have entries here or elsewhere."""
    if not base.__module__.startswith("khot.") or api_pages.home_of(base.__name__):
        return [base]
    return [public for above in base.__bases__ for public in public_bases(above)]


def name_constraints() -> None:
    """Lets autodoc show the classes of constraints, which go by a lower-case alias, as torch's do."""
    for name in khot.constraints.__all__:
        constraint = getattr(khot.constraints, name)
        constraint.__name__ = constraint.__qualname__ = name


def setup(app: Sphinx) -> dict[str, bool]:
    name_constraints()
    app.connect("missing-reference", find)
    for prepare in (list_papers, read_as_text):
        app.connect("autodoc-process-docstring", prepare, priority=400)  # before napoleon, which has 500
    app.connect("autodoc-skip-member", skip)
    app.connect("autodoc-process-bases", show_public_bases)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
