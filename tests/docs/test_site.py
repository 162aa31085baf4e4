"""The site, as far as it needs no Sphinx: generated pages in step with the code, and the tools that make them."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.composition_table import PAGE, SECTION, tables
from tests.test_public_api import MODULES, PUBLIC

DOCS = Path(__file__).parents[2] / "docs"


def load(name):
    """A module of the site's own extensions, which are on nobody's path."""
    spec = importlib.util.spec_from_file_location(name, DOCS / "_extensions" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_composition_tables():
    assert SECTION.search(PAGE.read_text()).group() == tables(), "run `python -m tests.composition_table`"


def test_every_public_name_has_an_entry(tmp_path):
    pages = load("api_pages")
    pages.write(tmp_path)
    for package, name in PUBLIC:
        page = (tmp_path / f"khot.{package}.rst").read_text()
        assert f"   {name}\n" in page or f"``{name}`` is :py:obj:" in page
    index = (tmp_path / "index.rst").read_text()
    assert all(f"   khot.{package}\n" in index for package in MODULES)
    assert pages.home_of("RelaxedKHotStraightThrough") == "khot.distributions"  # which the estimators list, too
    assert pages.home_of("TopKCrossEntropyLoss") == "khot.nn" and pages.home_of("nothing") is None


def test_likelihoods_take_batches_of_vectors():
    """``inputs @ x`` fails under enumeration and vectorised particles; ``(inputs * x).sum(-1)`` broadcasts."""
    root = DOCS.parent
    files = [root / "README.md", *DOCS.glob("*.md"), *DOCS.glob("guide/*.md"), *root.glob("examples/*.py")]
    files += root.glob("src/khot/**/*.py")
    assert len(files) > 100
    wrong = r"\w+\([^()]*@ x\b.*obs="
    assert [file.name for file in files if re.search(wrong, file.read_text(encoding="utf-8"))] == []
    assert re.search(wrong, 'pyro.sample("y", dist.Normal(inputs @ x, 0.5), obs=seen)')


def test_broken_links_are_found(tmp_path):
    (tmp_path / "a.html").write_text(
        '<p id="here"><a href="#here"></a><a href="b.html#there"></a><img src="c.png"></p>'
    )
    (tmp_path / "b.html").write_text('<a href="a.html#here"></a><a href="https://elsewhere.example"></a>')
    command = [sys.executable, str(DOCS / "check_links.py"), str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert result.stdout.splitlines() == [
        "a.html: b.html#there",
        "a.html: c.png",
        "2 broken links in 2 pages",
    ]


@pytest.mark.parametrize("page", ["coming_from.md", "guide/costs.md", "guide/mcmc.md"])
def test_tables_of_measurements(page):
    tables = load("result_tables")
    assert page in {home for home, _ in tables.TABLES.values()}
    assert (DOCS / page).read_text(encoding="utf-8") == tables.filled(DOCS / page), (
        "run docs/_extensions/result_tables.py"
    )


def test_pages_are_plain_markdown():
    """A repository page shows roles and directives as they are written; Sphinx gets them from `plain_markdown`."""
    pages = [DOCS.parent / "README.md", DOCS / "coming_from.md", *DOCS.glob("guide/*.md")]
    assert len(pages) > 8
    assert [
        page.name for page in pages if re.search(r"\{[\w:-]+\}`|^ *```\{", page.read_text("utf-8"), re.MULTILINE)
    ] == []


def test_references_and_doctests_are_put_in(monkeypatch):
    monkeypatch.setitem(sys.modules, "api_pages", load("api_pages"))
    for_sphinx = load("plain_markdown").for_sphinx
    page = "`sigmoid_topk`, `khot.nn`, `k`, [`TopK`](x.md)\n```python\n>>> `sigmoid_topk`\n```\n"
    assert for_sphinx(page, "../examples").splitlines() == [
        "{py:obj}`sigmoid_topk <khot.relaxations.sigmoid_topk>`, {py:mod}`khot.nn`, `k`, [`TopK`](x.md)",
        "```{doctest}",
        ">>> `sigmoid_topk`",
        "```",
    ]
    assert for_sphinx("[a](../../examples/a.py)", "../examples") == "[a](../examples/a)"


@pytest.mark.parametrize(
    "page", [DOCS.parent / "README.md", *DOCS.glob("*.md"), *DOCS.glob("guide/*.md")], ids=lambda p: p.name
)
def test_links_lead_to_files_and_headings(page):
    """As a repository page resolves them: relative to the file, with the anchors that headings have there."""
    text = re.sub(r"^ *```.*?^ *```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    for address, anchor in re.findall(r"\]\(([^)#:\s]*)(?:#([^)\s]+))?\)", text):
        target = (page.parent / address).resolve() if address else page
        assert target.exists() or address in ("examples/index.rst", "api/index.rst"), f"{page.name}: {address}"
        if anchor:
            headings = re.findall(r"^#+ (.+)$", target.read_text(encoding="utf-8"), flags=re.MULTILINE)
            headings = [re.sub(r"\[(.*?)\]\(.*?\)", r"\1", heading) for heading in headings]
            slugs = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
            assert anchor in slugs, f"{page.name}: {anchor}"
