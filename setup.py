"""Makes the README's links absolute for the page of a package index. All metadata is in pyproject.toml."""

import re
from pathlib import Path
from typing import Any

from setuptools import setup

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    from setuptools.compat.py310 import tomllib


def with_absolute_links(text: str, project: dict[str, Any]) -> str:
    """The README as a package index shows it: links lead to the repository's files of this version.

    Without an address of the repository in pyproject.toml, the text stays as it is.
    """
    address = project.get("urls", {}).get("Repository")
    if address is None:
        return text
    version = project["version"]
    tree = "HEAD" if ".dev" in version else f"v{version}"
    text = re.sub(r"(!\[[^\]]*\]\()(?!\w+:)", rf"\g<1>{address}/raw/{tree}/", text)
    return re.sub(r"(?<!!)(\[[^\[\]]*\]\()(?!\w+:|#)", rf"\g<1>{address}/blob/{tree}/", text)


if __name__ == "__main__":
    folder = Path(__file__).parent
    project = tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    readme = (folder / "README.md").read_text(encoding="utf-8")
    setup(long_description=with_absolute_links(readme, project), long_description_content_type="text/markdown")
