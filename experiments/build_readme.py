"""Writes experiments/README.md: what each experiment shows, its figures and its tables, from the results that it left.

    python experiments/build_readme.py --results experiments/results

`make experiments` runs every one before. A result belongs to the experiment whose name it starts with:
vae_ten_exact.md, .json and .png are of vae.py, and so is mnist/vae_ten_exact.md.
"""

import argparse
import ast
import json
import os
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

NAMES = {
    "digits": "scikit-learn's digits",
    "mnist": "MNIST",
    "fashion-mnist": "Fashion-MNIST",
    "cifar10": "CIFAR-10",
    "cifar100": "CIFAR-100",
}
K_HOT, SOFT, SANDER, LAPSUM = "the k-hot paper", "Xie et al. (2020)", "Sander et al. (2023)", "LapSum"
SIMPLE, SFESS = "SIMPLE", "SFESS"
FRENCH = "translation from English to French"
GERMAN = "translation from English to German"
PAPERS = {
    K_HOT: "“Differentiable top-k: from one-hot to k-hot” (2025), https://openreview.net/forum?id=HxLmtJYfBi",
    SOFT: "Xie, Dai, Chen, Dai, Zhao, Zha, Wei, Pfister, “Differentiable top-k with optimal transport”",
    SANDER: "“Fast, differentiable and sparse top-k: a convex analysis perspective”, arXiv:2302.01425",
    LAPSUM: "Struski, Bednarczyk, Podolak, Tabor (2025), “LapSum – one method to differentiate them all”, "
    "arXiv:2503.06242",
    SIMPLE: "Ahmed, Zeng, Niepert, Van den Broeck (2023), “SIMPLE: a gradient estimator for k-subset sampling”",
    SFESS: "Wijk, Vinuesa, Azizpour (2025), “SFESS: score function estimators for k-subset sampling”",
    "NCPSS": "Pervez et al. (2023), “Scalable subset sampling with neural conditional Poisson networks”",
    "Xie & Ermon": "(2019), “Reparameterizable subset sampling via continuous relaxations”",
    "ReinMax": "Liu et al. (2023), “Bridging discrete and backpropagation: straight-through and beyond”",
}
VERDICTS = "holds", "open", "open (one seed)", "does not hold"
HEADER = """# Experiments

The papers' comparisons again, to be read; scripts to copy are in [`examples/`](../examples). Each is a script with
`--help` and seeds that says how far it has come; `--smoke` takes seconds on every data set, to see that it works. `make
experiments` runs all with their defaults, on data that ship with scikit-learn or are generated, and builds this page
from the tables and figures that they write as Markdown, JSON and PNG to [`results/`](results). `make experiments
DATA=mnist DATA_DIR=folder` runs those that know MNIST on its standard files, can be cut and resumed, and writes to
`results/mnist`, each run to `results/mnist/runs`: more seeds train what is not there yet. All rows of a table have the
same data and optimiser, and end their training by the same rule. The findings were stated before the runs that test
them: one holds, or does not hold, where Student's 95 % interval of the paired difference over the seeds lies on one
side of zero (or of the margin that its text names), and is open otherwise.
"""


class Source(NamedTuple):
    """The part of a paper that an experiment is after, and the paper's data unless generated: of NAMES, or in words."""

    part: str
    data: tuple[str, ...] = ()


SOURCES = {
    "compare_estimators": Source(f"the toys of {SIMPLE} and {SFESS}"),
    "feature_selection_methods": Source(f"table 3 of {K_HOT}", ("mnist",)),
    "knn": Source(f"table 1 of {SOFT} and table 3 of {LAPSUM}", ("mnist", "cifar10")),
    "learned_k": Source(f"figure 5 of {K_HOT}", ("mnist",)),
    "permutation": Source(f"table 4 and figure 9 of {LAPSUM}", ("mnist",)),
    "beam_search": Source(f"algorithm 2 of {SOFT}", (FRENCH,)),
    "moe_router": Source(f"the router of {SANDER}", ("photographs",)),
    "polynomial_programming": Source(f"figure 9 of {K_HOT}"),
    "pruning": Source(f"figure 5 of {SANDER}", ("mnist",)),
    "simple_slopes": Source(f"the code of {SIMPLE}", ("mnist",)),
    "topk_loss": Source(f"figure 6 of {SANDER} and table 1 of {LAPSUM}", ("cifar100",)),
    "topk_attention": Source(f"figure 6 of {SOFT}", (GERMAN,)),
    "vae": Source(f"table 4 of {K_HOT}", ("mnist",)),
}


class Experiment(NamedTuple):
    """A script and the results that it left."""

    name: str
    summary: str
    usage: str
    shown: list[Path]  # figures and tables, each figure before its table
    documents: list[dict[str, Any]]

    @property
    def findings(self) -> list[dict[str, Any]]:
        return [finding for document in self.documents for finding in document.get("findings", ())]


def experiment_names(folder: Path) -> list[str]:
    """The scripts in the folder, but for this one."""
    scripts = [path for path in sorted(folder.glob("*.py")) if "\nif __name__" in path.read_text(encoding="utf-8")]
    return [path.stem for path in scripts if path.stem != Path(__file__).stem]


def owner(stem: str, names: list[str]) -> str | None:
    """The experiment with the longest name that a result's begins with."""
    fitting = [name for name in names if stem == name or stem.startswith(f"{name}_")]
    return max(fitting, key=len, default=None)


def read_experiment(name: str, names: list[str], folder: Path, results: Path) -> Experiment:
    doc = ast.get_docstring(ast.parse((folder / f"{name}.py").read_text(encoding="utf-8"))) or ""
    summary, _, rest = doc.partition("\n")
    usage = next((line.split("  ")[0] for line in map(str.strip, rest.splitlines()) if line.startswith("python ")), "")
    mine = [path for path in (*results.glob("*"), *results.glob("*/*")) if owner(path.stem, names) == name]
    # Those of a data set of its own lie in a folder of its name, and come after the others.
    mine.sort(key=lambda path: (path.parent, path.stem, path.suffix != ".png"))
    shown = [path for path in mine if path.suffix in (".png", ".md")]
    documents = [json.loads(path.read_text(encoding="utf-8")) for path in mine if path.suffix == ".json"]
    return Experiment(name, summary, usage, shown, documents)


def provenance(experiment: Experiment) -> str:
    """Where the experiment comes from, whether the data are the paper's, and whether its numbers stand in the table."""
    source = SOURCES.get(experiment.name)
    if source is None:
        return ""
    sentences = [f"After {source.part}."]
    used = sorted(
        {str(document["settings"]["data"]) for document in experiment.documents if "data" in document["settings"]}
    )
    theirs = " and ".join(NAMES.get(name, name) for name in source.data)
    if same := [NAMES[name] for name in used if name in source.data]:
        sentences.append(f"Data: {', '.join(same)}, as in the paper.")
    other = [NAMES.get(name, name) for name in used if name not in source.data] if used else ["generated"]
    if experiment.documents and source.data and other:
        sentences.append(
            f"**Other data than the paper's**: {', '.join(other)} here, {theirs} there, so that these numbers cannot "
            "be compared, only what they say of the methods."
        )
    has_numbers = any(row.get("paper") for document in experiment.documents for row in document["rows"].values())
    if experiment.documents and not has_numbers:
        sentences.append("The paper's own numbers are not repeated here.")
    return " ".join(sentences)


def section(experiment: Experiment, folder: Path, results: Path) -> str:
    parts = [f"## [{experiment.name}.py]({experiment.name}.py)", experiment.summary]
    if experiment.usage:
        parts.append(f"    {experiment.usage}")
    parts.append(provenance(experiment))
    place = results
    for path in experiment.shown:
        if path.parent != place:
            place = path.parent
            parts.append(f"### {NAMES.get(place.name, place.name)}")
        if path.suffix == ".png":
            parts.append(f"![{path.stem}]({Path(os.path.relpath(path, folder)).as_posix()})")
        else:
            parts.append(path.read_text(encoding="utf-8").strip())
    if not experiment.shown:
        parts.append("Not run yet.")
    return "\n\n".join(part for part in parts if part)


def overview(experiments: list[Experiment]) -> str:
    lines = ["| experiment | what it shows | findings |", "| --- | --- | --- |"]
    for experiment in experiments:
        verdicts = Counter(finding["verdict"] for finding in experiment.findings)
        count = ", ".join(f"{verdict}: {verdicts[verdict]}" for verdict in VERDICTS if verdicts[verdict])
        lines.append(
            f"| [{experiment.name}](#{experiment.name}py) | {experiment.summary.replace('|', '/')} | {count} |"
        )
    return "\n".join(lines)


def build(folder: Path, results: Path) -> str:
    """The text of the page about the experiments in ``folder``."""
    names = experiment_names(folder)
    experiments = [read_experiment(name, names, folder, results) for name in names]
    papers = "\n".join(f"- {name}: {reference}" for name, reference in PAPERS.items())
    sections = [section(one, folder, results) for one in experiments]
    return "\n\n".join([HEADER.strip(), overview(experiments), *sections, f"## Papers\n\n{papers}"]) + "\n"


def main(arguments: list[str] | None = None) -> None:
    here = Path(__file__).parent
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=here, help="folder of the experiments and of the page")
    parser.add_argument("--results", type=Path, default=here / "results", help="folder of their results")
    args = parser.parse_args(arguments)
    page = args.folder / "README.md"
    page.write_text(build(args.folder, args.results), encoding="utf-8")
    print(page)


if __name__ == "__main__":
    main()
