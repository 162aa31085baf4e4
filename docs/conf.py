"""How Sphinx builds the site: `make docs`. It needs no network: inventories are committed, and MathJax is installed."""

import doctest
import shutil
import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE / "_extensions"), str(HERE.parent / "experiments")]

import api_pages  # noqa: E402 - lies in the folder above, like the other extensions
import benchmark_plots  # noqa: E402
import build_readme  # noqa: E402
import entries  # noqa: E402
import inventories  # noqa: E402
import khot  # noqa: E402
import members  # noqa: E402
import repository  # noqa: E402
import search_words  # noqa: E402

BUILD = HERE / "_build"
REPOSITORY = repository.address(HERE.parent / "pyproject.toml")
api_pages.write(HERE / "api")
for folder in ("examples", "tutorials"):
    shutil.rmtree(BUILD / folder, ignore_errors=True)
    unused = shutil.ignore_patterns("README.md", "pictures")  # which introduce the folder in the repository
    shutil.copytree(HERE.parent / folder, BUILD / folder, ignore=unused)  # where scripts may leave figures
    shutil.copy(HERE / "_templates" / f"{folder}.rst", BUILD / folder / "GALLERY_HEADER.rst")
experiments = HERE.parent / "experiments"
(HERE / "experiments.md").write_text(build_readme.page(experiments, experiments / "results", HERE), encoding="utf-8")
benchmark_plots.draw(HERE.parent / "benchmarks" / "results", BUILD / "plots")

project = "khot"
author = "The khot authors"
copyright = "The khot authors, Apache-2.0"
version = release = khot.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.doctest",
    "sphinx.ext.intersphinx",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
    "sphinx_gallery.gen_gallery",
    "khot_references",
    "entries",
    "plain_markdown",
    "mathjax_files",
    "timings",
]
exclude_patterns = ["_build", "_extensions", "inventories", "api/template*"]
nitpicky = True  # a reference that leads nowhere is a warning, and `make docs` makes warnings errors
nitpick_ignore = [  # of docstrings that classes have from scikit-learn and Pyro
    ("py:meth", "transform"),
    ("py:class", "string"),
    ("py:class", "pyro.infer.mcmc.mcmc_kernel.MCMCKernel"),
    ("py:class", "pyro.infer.autoguide.guides.AutoGuide"),
]
nitpick_ignore_regex = [
    ("py:(mod|class)", r"khot\.kernels\..*"),  # modules that are reachable, but not promised
    ("py:class", r"(collections|numpy|khot\._distributed)\..*|ProcessGroup"),  # types of signatures
    ("py:class", r"torch\.(_C\.Generator|dtype|device)|pyro\.distributions\.torch\.Categorical"),
]

myst_enable_extensions = ["colon_fence", "dollarmath"]
myst_heading_anchors = 3
myst_links_external_new_tab = False

autosummary_ignore_module_all = False
autosummary_context = {
    "search_words": search_words.OF,
    "search_phrases": search_words.ENTRIES,
    "top_level": set(khot.__all__),
    "with_example": entries.with_example(),
    "listed_members": members.listed(),
    "missing_members": members.missing(),
}
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
maximum_signature_line_length = 100
autodoc_preserve_defaults = True
autodoc_member_order = "bysource"
autodoc_default_options = {
    "members": True,
    "show-inheritance": True,
    "exclude-members": "set_fit_request, set_score_request",  # scikit-learn adds them, with its own references
}
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False
templates_path = ["_templates"]
add_module_names = False
default_role = "code"  # single backticks in docstrings and examples, as in Markdown
toc_object_entries = False

intersphinx_mapping = {
    name: (url, str(inventories.compressed(HERE / "inventories" / f"{name}.txt", BUILD / "inventories")))
    for name, url in inventories.SITES.items()
}

doctest_default_flags = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS  # as in the tests
doctest_test_doctest_blocks = ""  # docstrings run with the tests; here the pages do, which import what they use
doctest_global_cleanup = """
import pyro
pyro.clear_param_store()
"""

copybutton_prompt_text = r">>> |\.\.\. "  # which are not copied, nor is what is printed
copybutton_prompt_is_regexp = True

sphinx_gallery_conf = {
    "examples_dirs": [str(BUILD / "examples"), str(BUILD / "tutorials")],
    "gallery_dirs": ["examples", "tutorials"],  # results stay there, and unchanged scripts are not run again
    "first_notebook_cell": repository.install_cell(REPOSITORY),
    "reset_modules": ("matplotlib", "timings.example"),  # a name, which Sphinx can save
    "reset_modules_order": "both",
    "filename_pattern": r".*\.py$",
    "abort_on_example_error": True,
    "remove_config_comments": True,
    "capture_repr": (),  # shows what a script prints, not the value of its last expression
    "show_memory": False,
    "write_computation_times": False,
    "within_subsection_order": "FileNameSortKey",
    "download_all_examples": False,
}

html_theme = "furo"
html_theme_options = repository.theme_options(REPOSITORY)
html_title = f"khot {release}"
html_static_path = ["_static"]
html_css_files = ["khot.css"]
html_show_sourcelink = False
