"""Looks for pages of the API reference that show a class as its users cannot use it.

    python docs/check_api.py docs/_build/html

Signatures and headings must be readable; the page of a design must list the members that users look for, or say that
it lacks them; the page of a module must list the attributes that may be assigned, and all of its public members.
"""

import re
import sys
from html import unescape
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "_extensions"))

import members

HEAD = re.compile(r'<dt class="sig.*?</dt>', flags=re.DOTALL)
HEADING = re.compile(
    r"<(?:p|dt)>((?:Args|Returns|Raises|Attributes|References|Example):)"
)  # which napoleon did not read
UNREADABLE = re.compile(r"~\w+\.|<(?:function|class|built-in|bound) | at 0x[0-9a-f]+|^\s*class [^(]*\(\*args: Any")


def problems(root: Path) -> list[str]:
    """What is wrong in the pages of the names, each with the page it is on."""
    texts = {path.stem: path.read_text(encoding="utf-8") for path in sorted((root / "api" / "names").glob("*.html"))}
    found = [f"{page}: no such page" for page in members.listed() if page not in texts]
    for page, text in texts.items():
        for head in HEAD.findall(text):
            shown = unescape(re.sub(r"<[^>]+>", "", head))
            if unreadable := UNREADABLE.search(shown):
                found.append(f"{page}: a signature shows {unreadable.group()!r}")
        found += [f"{page}: {heading!r} is not a heading" for heading in HEADING.findall(text)]
        found += [f"{page}: nothing about {name}" for name in members.expected(page) if not _mentions(text, page, name)]
    return found + members.unlisted()


def _mentions(text: str, page: str, name: str) -> bool:
    """Whether a page has an entry for a member, or says that there is none."""
    missing = re.search(r"<p>It has no .*?</p>", text, flags=re.DOTALL)
    return f'id="{page}.{name}"' in text or (missing is not None and f">{name}<" in missing.group())


def main() -> None:
    found = problems(Path(sys.argv[1]))
    print(*found, sep="\n")
    print(f"{len(found)} problems in the API reference")
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
