"""Arguments, tables and figures that the experiments share, against numbers worked out by hand."""

import json

import pytest
import torch
from matplotlib.figure import Figure

from common import Table, each_seed, experiment_parser, minibatches, parse, save_figure, shown_command
from tests.experiments.saved import read_table


def arguments(*words, data=("digits", "mnist")):
    parser = experiment_parser("What it shows.\n\nHow.", data)
    parser.add_argument("--epochs", type=int, default=60)
    return parse(parser, list(words), smoke={"seeds": 2, "epochs": 1})


def test_smoke_replaces_defaults_but_not_what_is_asked_for():
    assert (arguments().seeds, arguments().epochs, arguments().data) == (5, 60, "digits")
    smoke = arguments("--smoke", "--epochs", "3")
    assert (smoke.seeds, smoke.epochs, smoke.images) == (2, 3, 300)


def test_bad_arguments_end_with_usage(capsys):
    for name in ("--seeds", "--images", "--epochs"):
        with pytest.raises(SystemExit):
            arguments(name, "0")
        assert f"{name} must be at least 1" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        arguments("--data-dir", "x", data=())


def test_help_is_the_docstring(capsys):
    with pytest.raises(SystemExit):
        arguments("--help")
    assert "What it shows.\n\nHow." in capsys.readouterr().out


def test_each_seed_that_is_done_is_a_line_where_there_is_no_terminal(capsys):
    lines = []
    for seed, _ in each_seed(arguments("--seeds", "2", "--seed", "4"), steps=1):
        lines.append(capsys.readouterr().out)
        assert seed == 4 + len(lines) - 1
    assert lines == ["", "seed 4: 0 s (1 of 2)\n"] and capsys.readouterr().out == "seed 5: 0 s (2 of 2)\n"


def test_steps_are_lines_where_there_is_no_terminal(capsys):
    for _, progress in each_seed(arguments("--seeds", "1"), steps=4):
        progress.update()
        progress.mininterval = 0  # ten seconds later
        progress.update()
    lines = capsys.readouterr().err.splitlines()
    assert any("2/4" in line for line in lines) and not any("1/4" in line or "\r" in line for line in lines)


def test_each_seed_starts_the_generators_anew():
    first = {seed: torch.rand(2) for seed, _ in each_seed(arguments("--seeds", "3", "--seed", "4"), steps=1)}
    second = {seed: torch.rand(2) for seed, _ in each_seed(arguments("--seeds", "1", "--seed", "5"), steps=1)}
    assert list(first) == [4, 5, 6]
    assert first[5].equal(second[5]) and not first[4].equal(first[5])


def test_minibatches_are_full_disjoint_and_aligned():
    x = torch.arange(10)
    batches = list(minibatches(3, x, 10 * x))
    assert [len(batch) for batch, _ in batches] == [3, 3, 3]
    assert torch.cat([batch for batch, _ in batches]).unique().numel() == 9
    assert all(tens.equal(10 * batch) for batch, tens in batches)


@pytest.fixture
def table():
    table = Table("Toy", {"accuracy": ".1f", "loss": ".2f"}, "a", {"paper": {"b": "12.3"}})
    for a, b, c in ((1, 3, 1), (2, 5, 2.5), (3, 7, 2.5)):
        table.add("a", {"accuracy": a, "loss": 1})
        table.add("b", {"accuracy": b, "loss": 2})
        table.add("c", {"accuracy": c, "loss": 1})
    table.find("b beats a", "b", "a")
    table.find("a beats b", "a", "b")
    table.find("c beats a", "c", "a")
    table.find("a loses less than b", "a", "b", "loss", lower=True)
    return table


def test_means_and_paired_differences(table):
    # b - a is 2, 3, 4: mean 3, standard deviation 1, standard error 1 / sqrt(3)
    assert table.paired("b", "a", "accuracy") == (3.0, pytest.approx(3**-0.5))
    assert table.markdown().splitlines() == [
        "Toy. Mean ± sd over 3 seeds. Δ: paired difference from “a” ± its standard error.",
        "",
        "|  | accuracy | Δ | loss | Δ | paper |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
        "| a | 2.0 ± 1.0 |  | 1.00 ± 0.00 |  |  |",
        "| b | 5.0 ± 2.0 | +3.0 ± 0.6 | 2.00 ± 0.00 | +1.00 ± 0.00 | 12.3 |",
        "| c | 2.0 ± 0.9 | +0.0 ± 0.3 | 1.00 ± 0.00 | +0.00 ± 0.00 |  |",
        "",
        "Finding: b beats a: **holds**, +3.0 ± 0.6 (accuracy).",
        "",
        "Finding: a beats b: **does not hold**, -3.0 ± 0.6 (accuracy).",
        "",
        "Finding: c beats a: **open**, +0.0 ± 0.3 (accuracy).",
        "",
        "Finding: a loses less than b: **holds**, -1.00 ± 0.00 (loss).",
    ]


def test_files(table, tmp_path, capsys):
    args = arguments("--out", str(tmp_path / "new"), "--data-dir", "somewhere")
    table.save(args, "toy")
    save_figure(Figure(), args, "toy")
    assert (tmp_path / "new" / "toy.png").stat().st_size > 100
    text = read_table(tmp_path / "new" / "toy.json")
    assert text == table.markdown() + "\nSettings: seeds 5, seed 0, smoke False, data digits, epochs 60.\n"
    document = json.loads((tmp_path / "new" / "toy.json").read_text(encoding="utf-8"))
    assert document["settings"]["data"] == "digits" and "somewhere" not in json.dumps(document)  # no folder of ours
    assert str(tmp_path) not in json.dumps(document)
    assert document["rows"]["b"]["accuracy"]["by seed"] == [3, 5, 7]
    assert document["rows"]["b"]["paper"] == {"paper": "12.3"}
    assert document["findings"][0]["verdict"] == "holds"
    assert text in capsys.readouterr().out


def test_one_seed_has_no_spread(tmp_path):
    table = Table("Toy", {"accuracy": ".1f"}, "a")
    table.add("a", {"accuracy": 1.0})
    table.add("b", {"accuracy": 2.0})
    table.find("b beats a", "b", "a")
    assert "| b | 2.0 | +1.0 |" in table.markdown() and "**open (one seed)**" in table.markdown()
    table.save(arguments("--out", str(tmp_path)), "toy")
    assert json.loads((tmp_path / "toy.json").read_text())["rows"]["a"]["accuracy"]["sd"] is None


def test_a_score_that_a_row_does_not_have():
    table = Table("Toy", {"accuracy": ".1f", "loss": ".1f"}, "a")
    table.add("a", {"accuracy": 1.0, "loss": float("nan")})
    assert table.markdown().splitlines()[-1] == "| a | 1.0 |  |  |  |"


def test_wrong_columns():
    with pytest.raises(ValueError, match=r"the scores of 'a' are \['loss'\], the columns \['accuracy'\]"):
        Table("Toy", {"accuracy": ".1f"}).add("a", {"loss": 1.0})


def test_columns_without_differences_and_notes():
    columns = {"accuracy": ".1f", "epochs": ".0f"}
    table = Table("Toy", columns, "a", compared=["accuracy"], notes=["Less data than there."])
    table.add_all(
        {"a": [{"scores": {"accuracy": 1.0, "epochs": 3}}], "b": [{"scores": {"accuracy": 3.0, "epochs": 4}}]}
    )
    assert table.markdown().splitlines()[2:] == [
        "|  | accuracy | Δ | epochs |",
        "| --- | ---: | ---: | ---: |",
        "| a | 1.0 |  | 3 |",
        "| b | 3.0 | +2.0 | 4 |",
        "",
        "Less data than there.",
    ]


def test_a_margin_for_what_is_to_be_as_good():
    table = Table("Toy", {"loss": ".2f"})
    for noise in (-0.01, 0.0, 0.01):
        table.add("a", {"loss": 1.0})
        table.add("b", {"loss": 1.1 + noise})
    for margin, verdict in ((0.0, "does not hold"), (0.1, "open"), (0.2, "holds")):
        table.find(f"b is as good as a, {margin}", "b", "a", lower=True, margin=margin)
        assert f", {margin}: **{verdict}**, +0.10 ± 0.01 (loss)" in table.markdown()
    table.find("b beats c", "b", "c")
    assert "b beats c" not in table.markdown()  # which was not run


def test_command_without_folders_of_this_machine():
    words = "/here/experiments/vae.py", "--data", "mnist", "--data-dir=/here", "--processes", "2", "--seeds", "3"
    assert (
        shown_command([*words, "--out", "/there"]) == "python experiments/vae.py --data mnist --data-dir DIR --seeds 3"
    )
    rows = shown_command([*words, "--rows", "fixed, 10", "πST"])
    assert rows.endswith(' --rows "fixed, 10" πST')
