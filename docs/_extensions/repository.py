"""Links to the repository, once `[project.urls]` in pyproject.toml has its address."""

from pathlib import Path

import tomllib


def address(pyproject: Path) -> str | None:
    return tomllib.loads(pyproject.read_text(encoding="utf-8"))["project"].get("urls", {}).get("Repository")


def theme_options(address: str | None) -> dict[str, str]:
    """The options of the theme that add links from each page to its source."""
    if address is None:
        return {}
    return {"source_repository": address, "source_branch": "main", "source_directory": "docs/"}


def install_cell(address: str | None) -> str:
    """The first cell of each notebook."""
    if address is None:
        return (
            "# khot has not been released yet: clone its repository, and write the path of the clone here.\n"
            '%pip install "/path/to/khot[examples]"'
        )
    return f'%pip install "khot[examples] @ git+{address}"'
