"""What docstrings and the code need to become pages: references to names and papers, and only what is public."""

import re
import sys
from typing import Any

from docutils.nodes import Element
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.util import inspect

import api_pages
import khot
import members

PAPER = re.compile(r"^(\s*)(\[\d+\] )")
CALLABLE = re.compile(r"<(?:function|class|built-in function) '?([\w.]+)'?(?: at \w+)?>")  # as Python shows a default
CONSTANT = re.compile(r"(?<= = )[A-Z][A-Z_]+\b")  # a default that is a name in the module of the code
HIDDEN = re.compile(r"\(\*args(: ~?[\w.]+)?, \*\*kwargs(: ~?[\w.]+)?\)")  # of `__new__`
OTHER_CLASS = re.compile(r"\b([A-Z]\w+)(\(.*?\))?")
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


def show_defaults(
    app: Sphinx, what: str, name: str, obj: Any, options: Any, signature: str | None, returns: str | None
) -> tuple[str | None, str | None]:
    """Shows default functions by their names, since Sphinx cannot parse their repr, and constants by their values."""
    if what == "class" and HIDDEN.fullmatch(signature or ""):  # which Sphinx prefers
        app.emit("autodoc-before-process-signature", obj.__init__, True)
        found = inspect.signature(obj.__init__, bound_method=True)
        signature = inspect.stringify_signature(found, show_return_annotation=False, unqualified_typehints=True)
    if signature:
        signature = CALLABLE.sub(lambda shown: shown.group(1).rpartition(".")[2], signature)
        signature = CONSTANT.sub(lambda shown: _constant(obj, shown.group()), signature)
    return signature, returns


def _constant(obj: Any, name: str) -> str:
    """The value of a constant in the module of a function, or of the class from which a class has its arguments."""
    modules = [sys.modules[thing.__module__] for thing in (obj.__mro__ if inspect.isclass(obj) else [obj])]
    return next((repr(getattr(module, name)) for module in modules if hasattr(module, name)), name)


def say_what_is_missing(app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Replaces the text of a member that a distribution does not have by its own error message."""
    path, _, member = name.rpartition(".")
    package, _, cls = path.rpartition(".")
    if what in ("method", "property") and package in members.OF_PACKAGE and member in members.OF_DESIGNS:
        said = members.refusal(getattr(api_pages.module(package), cls), member)
        if said is not None:
            said = OTHER_CLASS.sub(_as_reference, said)
            lines[:] = [f"Raises NotImplementedError{': ' if said else ''}{said}."]


def _as_reference(shown: re.Match[str]) -> str:
    """A public class that an error message names, as a reference; with its arguments, as code."""
    name, arguments = shown.groups()
    if api_pages.home_of(name) is None:
        return shown.group()
    return f"``{shown.group()}``" if arguments else f":class:`~khot.{name}`"


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
    app.connect("autodoc-process-signature", show_defaults)
    app.connect("autodoc-process-docstring", say_what_is_missing, priority=300)
    for prepare in (list_papers, read_as_text):
        app.connect("autodoc-process-docstring", prepare, priority=400)  # before napoleon, which has 500
    app.connect("autodoc-skip-member", skip)
    app.connect("autodoc-process-bases", show_public_bases)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
