"""Inventories of other projects' sites, as text that a reviewer can read, packed for intersphinx.

A line is ``name domain:role priority address title``, with ``$`` for the name and ``-`` for a title that is the name.
They hold the names that this site refers to; a reference to another one is an error that says what to add.
"""

import zlib
from pathlib import Path

SITES = {
    "python": "https://docs.python.org/3/",
    "torch": "https://docs.pytorch.org/docs/stable/",
    "pyro": "https://docs.pyro.ai/en/stable/",
    "sklearn": "https://scikit-learn.org/stable/",
}


def compressed(source: Path, folder: Path) -> Path:
    """Packs an inventory into the form that Sphinx reads (version 2), and returns where it is."""
    lines = [line for line in source.read_text().splitlines() if line and not line.startswith("#")]
    header = f"# Sphinx inventory version 2\n# Project: {source.stem}\n# Version: \n"
    header += "# The remainder of this file is compressed using zlib.\n"
    folder.mkdir(parents=True, exist_ok=True)
    packed = folder / f"{source.stem}.inv"
    packed.write_bytes(header.encode() + zlib.compress("".join(f"{line}\n" for line in lines).encode()))
    return packed
