"""Looks for broken links within the built site.

    python docs/check_links.py docs/_build/html

Sphinx checks the references that it resolves itself. This script follows every address in the finished pages, also of
pictures, scripts and styles, but none on other sites, because the build needs no network.
"""

import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit


class Page(HTMLParser):
    """The addresses that a page refers to, and the places in it that one can refer to."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.addresses: list[str] = []
        self.places: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name in ("href", "src") and value:
                self.addresses.append(value)
            elif name in ("id", "name") and value:
                self.places.add(value)


def broken(root: Path) -> list[str]:
    """The addresses that lead nowhere, with the pages that they are on."""
    pages = {path: Page(path.read_text()) for path in sorted(root.rglob("*.html"))}
    found = []
    for path, page in pages.items():
        for address in page.addresses:
            parts = urlsplit(address)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path.resolve()
            other = pages.get(root.resolve() / target.relative_to(root.resolve())) if target.exists() else None
            if not target.exists() or (other and parts.fragment and unquote(parts.fragment) not in other.places):
                found.append(f"{path.relative_to(root)}: {address}")
    return found


def main() -> None:
    root = Path(sys.argv[1]).resolve()
    found = broken(root)
    print(*found, sep="\n")
    print(f"{len(found)} broken links in {len(list(root.rglob('*.html')))} pages")
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
