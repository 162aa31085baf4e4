"""Ships MathJax and its fonts with the site, so that formulas look the same everywhere and need no other server.

The package sphinx-mathjax-offline brings the files. Its own extension copies all 24 MB of them; formulas need two.
"""

import shutil
from importlib.util import find_spec
from pathlib import Path

from sphinx.application import Sphinx
from sphinx.errors import ExtensionError

SCRIPT, FONTS = "tex-chtml.js", "output/chtml/fonts/woff-v2"


def folder() -> Path:
    found = find_spec("sphinx-mathjax-offline")
    if found is None or found.origin is None:
        raise ExtensionError("formulas need the package sphinx-mathjax-offline: pip install '.[docs]'")
    return Path(found.origin).parent / "static" / "mathjax"


def _copy(app: Sphinx, error: Exception | None) -> None:
    if error is None and app.builder.format == "html":
        target = Path(app.outdir) / "_static" / "mathjax"
        shutil.copytree(folder() / FONTS, target / FONTS, dirs_exist_ok=True)
        shutil.copy(folder() / SCRIPT, target)


def setup(app: Sphinx) -> dict[str, bool]:
    folder()  # raises its error before the build rather than after it
    app.setup_extension("sphinx.ext.mathjax")
    app.config.mathjax_path = f"mathjax/{SCRIPT}"
    app.connect("build-finished", _copy)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
