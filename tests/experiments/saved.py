"""What an experiment has left."""

import json
from pathlib import Path


def read_table(path: Path) -> str:
    """The text of a table, which was printed as well."""
    return str(json.loads(path.read_text(encoding="utf-8"))["markdown"])
