r"""Formulas as MathML, which browsers draw without a script; the site brings the font, which a machine may lack.

docutils translates them. Of what the docstrings use it lacks three commands of TeX: ``\big`` and ``\Big`` before a
bracket (it has ``\bigl`` and ``\bigr``), and ``\dots``. The sign of ``\setminus`` is missing in common fonts.
"""

import re
from typing import Any

from docutils.nodes import Element, SkipNode
from docutils.utils.math import MathError
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx.application import Sphinx
from sphinx.errors import ExtensionError

OTHER_COMMANDS = (
    (re.compile(r"\\([bB]ig)(?=[(\[])"), r"\\\1l"),
    (re.compile(r"\\([bB]ig)(?=[)\]])"), r"\\\1r"),
    (re.compile(r"\\dots\b"), r"\\ldots"),
    (re.compile(r"\\setminus\b"), r"\\backslash"),
)


def translated(node: Element, as_block: bool) -> str:
    formula = node.astext()
    for pattern, replacement in OTHER_COMMANDS:
        formula = pattern.sub(replacement, formula)
    try:
        return tex2mathml(formula, as_block=as_block)
    except MathError as error:
        raise ExtensionError(f"docutils cannot translate the formula {formula!r}: {error}") from error


def inline(writer: Any, node: Element) -> None:
    writer.body.append(translated(node, as_block=False))
    raise SkipNode


def block(writer: Any, node: Element) -> None:
    writer.body.append(writer.starttag(node, "div", CLASS="math"))
    writer.body.append(translated(node, as_block=True))
    writer.body.append("</div>\n")
    raise SkipNode


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_html_math_renderer("mathml", (inline, None), (block, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
