"""The site, as far as it needs no Sphinx: generated pages in step with the code, and the tools that make them."""

import importlib.util
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import khot
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
        assert f"   {name}\n" in page or f"``{name}`` is an alias of :py:obj:" in page
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


def test_pages_that_mislead_are_found(tmp_path, monkeypatch):
    """Of a correct page for each class, three are spoilt: a member, a signature and a heading."""
    monkeypatch.syspath_prepend(DOCS / "_extensions")
    spec = importlib.util.spec_from_file_location("check_api", DOCS / "check_api.py")
    check_api = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(check_api)
    pages = tmp_path / "api" / "names"
    pages.mkdir(parents=True)
    for page in check_api.members.listed():
        names = check_api.members.expected(page)
        entries = "".join(f'<dt class="sig" id="{page}.{name}">{name}</dt>' for name in names)
        (pages / f"{page}.html").write_text(entries, encoding="utf-8")
    assert check_api.problems(tmp_path) == []
    brewer, top_k = pages / "khot.distributions.Brewer.html", pages / "khot.nn.TopK.html"
    brewer.write_text(brewer.read_text().replace('id="khot.distributions.Brewer.log_prob"', ""))
    signature = '<dt class="sig"><span>(x: ~</span>torch.Tensor, by = &lt;function sigmoid_topk&gt;)</dt>'
    top_k.write_text(top_k.read_text() + signature + "<dl><dt>Returns: values</dt></dl>")
    assert check_api.problems(tmp_path) == [
        "khot.distributions.Brewer: nothing about log_prob",
        "khot.nn.TopK: a signature shows '~torch.'",
        "khot.nn.TopK: 'Returns:' is not a heading",
    ]
    for package in ("khot.nn", "khot.distributions"):
        monkeypatch.setitem(check_api.members.OF_PACKAGE, package, ())
    monkeypatch.setattr(check_api.members, "HIDE_NOTHING", {"khot.nn"})
    assert any("khot.nn.TopK: select is public but not listed" in problem for problem in check_api.members.unlisted())


def test_the_page_of_a_design_says_what_it_does_not_have(monkeypatch):
    monkeypatch.syspath_prepend(DOCS / "_extensions")
    members = load("members")
    assert [name for name in members.OF_DESIGNS if members.refusal(khot.Pivotal, name)] == [
        *("log_prob", "entropy", "mode", "pairwise_inclusion", "covariance_matrix")
    ]
    assert "Sampford" in members.refusal(khot.Pivotal, "log_prob")
    assert all(members.refusal(khot.ConditionalPoisson, name) is None for name in members.OF_DESIGNS)
    assert members.missing()["khot.distributions.PlackettLuce"] == ["pairwise_inclusion", "covariance_matrix"]


@pytest.mark.parametrize("page", ["coming_from.md", "guide/costs.md", "guide/mcmc.md", "guide/variable_selection.md"])
def test_tables_of_measurements(page):
    tables = load("result_tables")
    assert page in tables.PAGES
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
    pytest.importorskip("sphinx", reason="Sphinx is not installed")
    monkeypatch.setitem(sys.modules, "api_pages", load("api_pages"))
    for_sphinx = load("plain_markdown").for_sphinx
    page = "`sigmoid_topk`, `khot.nn`, `k`, [`TopK`](x.md)\n```python\n>>> `sigmoid_topk`\n```\n"
    assert for_sphinx(page, "../").splitlines() == [
        "{py:obj}`sigmoid_topk <khot.relaxations.sigmoid_topk>`, {py:mod}`khot.nn`, `k`, [`TopK`](x.md)",
        "```{doctest}",
        ">>> `sigmoid_topk`",
        "```",
    ]
    links = "[a](../../examples/a.py), [b](../../tutorials/1_b.py), [all](../../tutorials)"
    assert for_sphinx(links, "../") == "[a](../examples/a), [b](../tutorials/1_b), [all](../tutorials/index.rst)"


def broken_links(page):
    """As a repository page resolves them: relative to the file, with the anchors that headings have there."""
    text = re.sub(r"^ *```.*?^ *```|`[^`\n]*`", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r'<img src="([^"]*)".*?>', r"![](\1)", text)
    for address, anchor in re.findall(r"\]\(([^)#:\s]*)(?:#([^)\s]+))?\)", text):
        target = (page.parent / address).resolve() if address else page
        if not target.exists() and address != "api/index.rst":  # which Sphinx makes
            yield f"{page.name}: {address}"
        elif anchor and anchor not in anchors(target):
            yield f"{page.name}: {address}#{anchor}"


def anchors(page):
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    headings = [re.sub(r"\[(.*?)\]\(.*?\)", r"\1", heading) for heading in headings]
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_links_lead_to_files_and_headings(tmp_path):
    root = DOCS.parent
    pages = [
        page
        for folder in (".", "docs", "docs/guide", "examples", "tutorials", "experiments", "benchmarks")
        for page in root.glob(f"{folder}/*.md")
    ]
    assert len(pages) > 15
    assert [link for page in pages for link in broken_links(page)] == []
    (tmp_path / "a.md").write_text('# A heading\n[](#a-heading) [](#another) [](b.md) <img src="c.png">')
    assert list(broken_links(tmp_path / "a.md")) == ["a.md: #another", "a.md: b.md", "a.md: c.png"]


@pytest.mark.parametrize("folder", ["examples", "tutorials"])
def test_every_script_has_its_line_and_a_small_picture(folder):
    path = DOCS.parent / folder
    lines = (path / "README.md").read_text(encoding="utf-8").splitlines()
    for script in path.glob("*.py"):
        (line,) = (line for line in lines if f"({script.name})" in line)
        if "matplotlib" in script.read_text(encoding="utf-8"):
            assert f'src="pictures/{script.stem}.png"' in line
    assert all(picture.stat().st_size <= 30_000 for picture in path.glob("pictures/*"))


def test_entries_import_what_their_examples_use(monkeypatch):
    pytest.importorskip("sphinx", reason="Sphinx is not installed")
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    monkeypatch.syspath_prepend(DOCS / "_extensions")
    entries = load("entries")
    public = {name for _, name in PUBLIC}
    assert {name for group in entries.GROUPS for name in group.split()} | entries.pictures.FIGURES.keys() <= public
    for package, name in PUBLIC:
        thing = getattr(MODULES[package], name)
        entries.arranged(name, thing.__module__, inspect.getdoc(thing).splitlines())  # KeyError: a name without origin
    lines = ["What.", "", "Law.", "", "Example:", "    >>> torch.ones(TopK(2).k)", "    tensor([1., 1.])"]
    assert [line for line in entries.arranged("Anneal", "khot.nn", lines) if line and "image" not in line][2:] == [
        *(".. rubric:: Example", ">>> import torch", ">>> from khot.nn import TopK", ">>> torch.ones(TopK(2).k)"),
        *("tensor([1., 1.])", "Law.", ".. rubric:: See also", ":obj:`~khot.TopK`, :obj:`~khot.TopKMask`"),
    ]


def test_recommended_members_and_search_words_are_public():
    public = {name for _, name in PUBLIC}
    words = load("search_words").OF
    assert words.keys() <= public
    assert {"top", "k", "mask"} <= set(words["sigmoid_topk"].split(", "))  # Sphinx splits a query, not a keyword
    entries = load("search_words").ENTRIES  # a name is found first by a phrase that no other name has
    assert [name for name, phrases in entries.items() if "top-k mask" in phrases] == ["sigmoid_topk"]
    assert {"sigmoid_topk", "topk_mask"} <= {name for name, phrases in entries.items() if "mask" in phrases}
    assert [name for name, phrases in entries.items() if "router" in phrases] == [
        "ExpertChoice",
        "TokenChoice",
        "route",
    ]
    assert "nosearch: true" in (DOCS / "changelog.md").read_text()  # it has every word
    assert all("! single: {{ phrase }}" in page.read_text() for page in (DOCS / "_templates/autosummary").iterdir())
    pages = load("api_pages")
    assert all(name in pages.names()[package] for package, first in pages.RECOMMENDED.items() for name in first)


def test_the_address_of_the_repository_has_one_place(tmp_path):
    pytest.importorskip("tomllib", reason="the site is built by Python 3.11 or newer")
    repository = load("repository")
    pyproject = tmp_path / "pyproject.toml"
    pyproject.write_text('[project]\nname = "khot"\n')
    assert repository.address(pyproject) is None
    assert repository.theme_options(None) == {} and "/path/to/khot[examples]" in repository.install_cell(None)
    pyproject.write_text('[project]\nname = "khot"\n[project.urls]\nRepository = "https://forge.example/a/khot"\n')
    address = repository.address(pyproject)
    assert repository.theme_options(address)["source_repository"] == address
    assert repository.install_cell(address) == '%pip install "khot[examples] @ git+https://forge.example/a/khot"'


def test_slow_pages_are_listed_and_quick_ones_summed_up(tmp_path):
    pytest.importorskip("docutils", reason="Sphinx is not installed")
    timings = load("timings")
    timings.reading.update({"a": 1.0, "b": 0.1, "c": 0.2})
    timings.running.update({"a": 2.5})
    assert [line.split() for line in timings.table().splitlines()] == [
        ["seconds", "read", "run", "page"],
        ["3.5", "1.0", "2.5", "a"],
        ["0.3", "2", "other", "pages"],
    ]
    (tmp_path / "examples").mkdir()
    (tmp_path / "examples" / "d.py").touch()
    gallery = {"examples_dirs": [str(tmp_path / "tutorials"), str(tmp_path / "examples")]}
    timings.example(gallery, None, "before")
    for when in ("before", "after"):
        timings.example(gallery, "d.py", when)
    assert 0 <= timings.running["examples/d"] < 1
