"""Writes a source distribution again, so that the same sources give the same bytes.

All times become ``SOURCE_DATE_EPOCH``, which setuptools heeds in wheels only. `make wheel` runs this.
"""

import gzip
import io
import os
import sys
import tarfile
from pathlib import Path


def rewrite(archive: Path, seconds: int) -> None:
    """Replaces an archive by one of the same files, in the order of their names and without owners and times."""
    content = io.BytesIO()
    with tarfile.open(archive) as source, tarfile.open(fileobj=content, mode="w", format=tarfile.PAX_FORMAT) as target:
        for member in sorted(source.getmembers(), key=lambda member: member.name):
            written = tarfile.TarInfo(member.name)
            written.type, written.size, written.mtime = member.type, member.size, seconds
            written.mode = 0o755 if member.isdir() or member.mode & 0o100 else 0o644
            target.addfile(written, source.extractfile(member))
    with archive.open("wb") as file, gzip.GzipFile(filename="", fileobj=file, mode="wb", mtime=seconds) as compressed:
        compressed.write(content.getvalue())


if __name__ == "__main__":
    for path in sys.argv[1:]:
        rewrite(Path(path), int(os.environ["SOURCE_DATE_EPOCH"]))
