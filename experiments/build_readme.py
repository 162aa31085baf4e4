"""Writes experiments/README.md: one table of what each experiment shows. The site has a page with all results.

    python experiments/build_readme.py --results experiments/results

`make experiments` runs all experiments first. A result belongs to the experiment whose name it starts with:
vae_ten_exact.json and .png belong to vae.py, and so does mnist/vae_ten_exact.json.
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
    "multi30k": "Multi30k",
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

These scripts repeat the comparisons of the papers, and are meant to be read. Scripts to copy are in
[`examples/`](../examples). `--help` explains a script and its arguments. Every script takes seeds and reports its
progress. `--smoke` runs it within seconds to show that it works; the numbers then mean nothing.

`make experiments` runs all scripts with their defaults, on generated data or on data that come with scikit-learn. They
write tables and figures to [`results/`](results) as JSON and PNG, from which this page is built; the site
shows all of them on its page *Experiments*. `make experiments DATA=mnist DATA_DIR=folder` runs the scripts that support
MNIST on its standard files, and writes to `results/mnist`. You can interrupt and resume it: finished runs are kept in
`results/mnist/runs`, so that additional seeds train only what is missing.

All rows of a table use the same data and the same optimiser, and the same rule ends their training. The findings were
stated before the runs that test them. A finding **holds** or **does not hold** if Student's 95 % interval of the paired
difference over the seeds lies on one side of zero, or of the margin in its text; otherwise it is **open**.
"""
# Why the numbers of a table are not the paper's, by the beginning of its name; on other data all of them differ.
DIFFERENCES = {
    "feature_selection_methods": "minibatches, epochs, scaling of pixels and the drawing of masks are ours: the paper "
    "does not give them",
    "knn": "network, minibatches and epochs are ours",
    "knn_as_published": "at most 20 of the papers' 200 epochs",
    "permutation": "network, minibatches and epochs are ours",
    "topk_loss": "data, network",
    "vae": "minibatches, epochs and temperatures are ours: the paper does not give them",
    "vae_ten_exact": "the prior term is that of a distribution over k-hot vectors",
    "vae_single_exact": "the prior term is that of a distribution over k-hot vectors",
    "vae_ten_softmax_averaged": "the prior term is averaged over the ten codes: the paper's order, its numbers not",
}
COLUMNS = {  # of our tables, those that the paper's number is about, if it is not the first
    "permutation": ("sorted, % (n = 3)", "sorted, % (n = 5)", "sorted, % (n = 7)"),
    "topk_loss": ("top 1, %", "top 5, %"),
    "permutation_peers_long": (),  # the paper has no number for these lengths
    "permutation_peers_longest": (),
}
NOT_RUN = {
    f"kNN on CIFAR-10 ({SOFT}, {LAPSUM})": "needs the data and days on a CPU; `knn.py --data cifar10` runs it",
    f"top-k losses on CIFAR-100 ({SANDER}, {LAPSUM})": "the same; `topk_loss.py --data cifar100` runs them",
    f"top-k losses on ImageNet ({LAPSUM})": "needs the data and a GPU",
    f"translation of WMT ({SOFT})": "needs the data and a large translator; Multi30k takes their place",
    f"the router of a vision transformer ({SANDER})": "the data are not public; digits and MNIST take their place",
    f"times and memory on a GPU ({LAPSUM}, {SANDER})": "`benchmarks/` has khot's own",
}


class Source(NamedTuple):
    """The part of a paper that an experiment repeats, and the paper's data unless generated: of NAMES, or in words."""

    part: str
    data: tuple[str, ...] = ()


SOURCES = {
    "compare_estimators": Source(f"the toy problems of {SIMPLE} and {SFESS}"),
    "feature_selection_methods": Source(f"table 3 of {K_HOT}", ("mnist",)),
    "knn": Source(f"table 1 of {SOFT} and table 3 of {LAPSUM}", ("mnist", "cifar10")),
    "knn_as_published": Source(f"table 1 of {SOFT}", ("mnist",)),
    "learned_k": Source(f"figure 5 of {K_HOT}", ("mnist",)),
    "permutation": Source(f"table 4 and figure 9 of {LAPSUM}", ("mnist",)),
    "permutation_peers": Source(f"table 4 of {LAPSUM}", ("mnist",)),
    "beam_search": Source(f"algorithm 2 of {SOFT}", (FRENCH,)),
    "moe_router": Source(f"the router of {SANDER}", ("photographs",)),
    "polynomial_programming": Source(f"figure 9 of {K_HOT}"),
    "pruning": Source(f"figure 5 of {SANDER}", ("mnist",)),
    "simple_slopes": Source(f"the code of {SIMPLE}", ("mnist",)),
    "topk_loss": Source(f"figure 6 of {SANDER} and table 1 of {LAPSUM}", ("cifar100",)),
    "topk_attention": Source(f"figure 6 of {SOFT}", (GERMAN,)),
    "vae": Source(f"table 4 of {K_HOT}", ("mnist",)),
    "vit_experts": Source(f"the router of {SANDER}", ("photographs",)),
}


class Experiment(NamedTuple):
    """A script and the results that it left."""

    name: str
    summary: str
    usage: str
    shown: list[Path]  # figures and tables, each figure before its table
    tables: dict[str, dict[str, Any]]  # by name


def experiment_names(folder: Path) -> list[str]:
    """The scripts in the folder, except this one."""
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
    # Results on another data set lie in a folder with its name, and come after the others.
    mine.sort(key=lambda path: (path.parent, path.stem, path.suffix != ".png"))
    shown = [path for path in mine if path.suffix in (".png", ".json")]
    written = [path for path in mine if path.suffix == ".json"]
    return Experiment(
        name,
        summary,
        usage,
        shown,
        {_name(path, results): json.loads(path.read_text(encoding="utf-8")) for path in written},
    )


def provenance(experiment: Experiment) -> str:
    """Where the experiment comes from, whether the data are the paper's, and whether the table has its numbers."""
    source = SOURCES.get(experiment.name)
    if source is None:
        return ""
    sentences = [f"Based on {source.part}."]
    used = sorted({str(document["settings"].get("data", "generated")) for document in experiment.tables.values()})
    theirs = " and ".join(NAMES.get(name, name) for name in source.data)
    if same := [NAMES[name] for name in used if name in source.data]:
        sentences.append(f"Data: {' and '.join(same)}, as in the paper.")
    other = [NAMES.get(name, name) for name in used if name not in source.data]
    if experiment.tables.values() and source.data and other:
        what = "The data of the other tables differ" if same else "The data differ from the paper's"
        sentences.append(
            f"**{what}**: {' and '.join(other)} here, {theirs} in the paper. "
            "Compare the order of the methods, not the numbers."
        )
    has_numbers = any(row.get("paper") for document in experiment.tables.values() for row in document["rows"].values())
    if experiment.tables.values() and not has_numbers:
        sentences.append("The table does not repeat the numbers of the paper.")
    return " ".join(sentences)


def section(experiment: Experiment, place: Path, folder: Path, results: Path) -> str:
    script = _way(folder / f"{experiment.name}.py", place)
    parts = [f"## {experiment.name}", f"[{experiment.name}.py]({script}): {experiment.summary}"]
    if experiment.usage:
        parts.append(f"    {experiment.usage}")
    parts.append(provenance(experiment))
    data = results
    for path in experiment.shown:
        if path.parent != data:
            data = path.parent
            parts.append(f"### {experiment.name}: {NAMES.get(data.name, data.name)}")
        if path.suffix == ".png":
            parts.append(f"![{path.stem}]({_way(path, place)})")
        else:
            parts.append(experiment.tables[_name(path, results)]["markdown"].strip())
    if not experiment.shown:
        parts.append("Not run yet.")
    return "\n\n".join(part for part in parts if part)


def _name(path: Path, results: Path) -> str:
    """Of a result: vae_ten, or mnist/vae_ten."""
    return path.relative_to(results).with_suffix("").as_posix()


def _way(path: Path, place: Path) -> str:
    return Path(os.path.relpath(path, place)).as_posix()


def overview(experiments: list[Experiment]) -> str:
    """One table: a line for each table of results, with the paper's numbers where it has some."""
    lines = ["| experiment | data | the paper | here | what differs | findings |", "| --- " * 6 + "|"]
    for experiment in experiments:
        if not experiment.tables:
            lines.append(f"| [{experiment.name}]({experiment.name}.py) | not run yet | | | | |")
        lines += [_line(experiment, name, document) for name, document in experiment.tables.items()]
    return "\n".join(lines)


def _line(experiment: Experiment, name: str, document: dict[str, Any]) -> str:
    data = document["settings"].get("data") or "generated"
    seeds = document["settings"].get("seeds", 1)
    verdicts = Counter(finding["verdict"] for finding in document["findings"])
    rows = document["rows"]
    columns = _longest(COLUMNS, name, next(([key for key in row if key != "paper"][:1] for row in rows.values()), ()))
    theirs, ours = [], []
    for row, scores in rows.items():
        if scores.get("paper") and columns:
            theirs.append(f"{row} {next(iter(scores['paper'].values()))}")
            means = [f"{scores[column]['mean']:.4g}" for column in columns]
            ours.append(f"{row} {' / '.join(means)}")
    cells = [
        f"[{name}]({experiment.name}.py)",
        f"{', '.join([data] if isinstance(data, str) else data)}; {seeds} seed{'s' * (seeds != 1)}",
        "<br>".join(theirs) or _source(experiment) or experiment.summary,
        "<br>".join(ours),
        _difference(experiment, name, data) if ours else "",
        ", ".join(f"{verdict}: {verdicts[verdict]}" for verdict in VERDICTS if verdicts[verdict]),
    ]
    return f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |"


def _difference(experiment: Experiment, name: str, data: Any) -> str:
    theirs = SOURCES[experiment.name].data
    return _longest(DIFFERENCES, name, "") if data in theirs or not theirs else "the data, and all that follows"


def _source(experiment: Experiment) -> str:
    source = SOURCES.get(experiment.name)
    return f"{source.part}: no number" if source else ""


def _longest(values: dict[str, Any], name: str, default: Any) -> Any:
    """The value of the longest key that the name of a table begins with."""
    return values[key] if (key := owner(Path(name).name, list(values))) else default


def _read(folder: Path, results: Path) -> list[Experiment]:
    names = experiment_names(folder)
    return [read_experiment(name, names, folder, results) for name in names]


def readme(folder: Path, results: Path) -> str:
    """The text of the page beside the experiments in ``folder``: one table, and what was not run."""
    missing = "\n".join(f"| {what} | {why} |" for what, why in NOT_RUN.items())
    missing = f"## What we did not run\n\n| part of a paper | why |\n| --- | --- |\n{missing}"
    papers = "\n".join(f"- {name}: {reference}" for name, reference in PAPERS.items())
    return "\n\n".join([HEADER.strip(), overview(_read(folder, results)), missing, f"## Papers\n\n{papers}"]) + "\n"


def page(folder: Path, results: Path, place: Path) -> str:
    """The text of a page in the folder ``place`` with all tables and figures."""
    sections = [section(one, place, folder, results) for one in _read(folder, results)]
    introduction = "All tables and figures of the experiments, by script. Each has its settings and its command."
    return "\n\n".join(["# Experiments", introduction, *sections]) + "\n"


def main(arguments: list[str] | None = None) -> None:
    here = Path(__file__).parent
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=here, help="folder of the experiments and of the page")
    parser.add_argument("--results", type=Path, default=here / "results", help="folder of their results")
    args = parser.parse_args(arguments)
    written = args.folder / "README.md"
    written.write_text(readme(args.folder, args.results), encoding="utf-8")
    print(written)


if __name__ == "__main__":
    main()
