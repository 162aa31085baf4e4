"""Runs are cut and resumed to the same numbers, in any number of processes; trainings end when they should."""

import json
import re
from argparse import ArgumentParser

import pytest
import torch
from torch import nn

from runs import Fitted, Run, add_run_arguments, run_grid


def arguments(*words):
    parser = ArgumentParser()
    for name in ("--seed", "--epochs"):
        parser.add_argument(name, type=int, default=3)
    parser.add_argument("--seeds", type=int, default=2)
    add_run_arguments(parser)
    return parser.parse_args(["--processes", "1", *words])


class Toy:
    """A training of one parameter whose validation losses are given, or the distance to 1."""

    def __init__(self, losses=None, cut_after=None):
        self.model, self.losses, self.cut_after, self.trained = nn.Linear(1, 1, bias=False), losses, cut_after, 0
        self.epochs = []

    def train_epoch(self, epoch):
        self.epochs.append(epoch)
        if self.trained == self.cut_after:
            raise KeyboardInterrupt
        self.trained += 1
        ((self.model(torch.rand(4, 1)) - 1) ** 2).mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def validate(self):
        return self.weight if self.losses is None else self.losses[self.trained - 1]

    @property
    def weight(self):
        return self.model.weight.item()

    def fit(self, run, epochs, patience):
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.1)
        return run.fit(
            self.model, self.optimizer, self.train_epoch, self.validate, epochs, patience, lambda: self.weight
        )


def toy_row(run, args):
    """Found by other processes, as it is a function of a module."""
    toy = Toy()
    fitted = toy.fit(run, args.epochs, None)
    assert toy.epochs == list(range(len(fitted.losses)))[len(fitted.losses) - len(toy.epochs) :]
    return {"scores": {"weight": toy.weight}, "notes": fitted.notes}


def interrupted_row(run, args):
    if run.row == "b":
        Toy(cut_after=2).fit(run, args.epochs, None)
    return toy_row(run, args)


NAN = float("nan")


@pytest.mark.parametrize(
    ("losses", "patience", "ended", "best"),
    [
        ([3, 2, 2, 1, 4, 4, 0], 2, 6, 3),  # the second 2 is no new minimum; 0 comes too late
        ([3, 2, 1, 0, 1], 2, 5, 3),  # the epochs end first
        ([NAN, 2, NAN, 3, 1], 2, 4, 1),
        ([NAN, NAN, NAN, NAN], 2, 3, 0),
        ([3, 2, 4, 4], None, 4, 1),
    ],
)
def test_a_training_ends_when_its_loss_has_stopped_falling(losses, patience, ended, best):
    toy = Toy(losses)
    fitted = toy.fit(Run("a", 0, {}), len(losses), patience)
    assert (len(fitted.losses), fitted.best) == (ended, best)
    assert len(fitted.seconds) == ended
    assert toy.weight == fitted.notes[-1 if patience is None else best]


def test_validation_draws_alike_and_leaves_the_generator_alone():
    toy, draws = Toy(), []
    toy.validate = lambda: draws.append(torch.rand(()).item()) or 0.0
    torch.manual_seed(1)
    toy.fit(Run("a", 0, {}), 2, None)
    after = torch.rand(())
    toy.validate = lambda: 0.0
    torch.manual_seed(1)
    toy.fit(Run("a", 0, {}), 2, None)
    assert draws[0] == draws[1] and after == torch.rand(())


@pytest.mark.slow
def test_results_are_those_of_a_run_that_was_not_cut(tmp_path, capsys):
    whole = run_grid(arguments(), "toy", "ab", toy_row)
    assert [len(result["notes"]) for result in whole["a"]] == [3, 3] and whole["a"][0] != whole["a"][1]
    with pytest.raises(KeyboardInterrupt):
        run_grid(arguments("--runs", str(tmp_path)), "toy", "ab", interrupted_row)
    assert {file.name for file in (tmp_path / "toy").iterdir()} == {"a_seed_3.json", "b_seed_3.pt"}
    capsys.readouterr()
    elsewhere = arguments("--runs", str(tmp_path), "--seeds", "1", "--processes", "2")
    assert run_grid(elsewhere, "toy", "b", toy_row)["b"] == whole["b"][:1]  # in another process
    assert "toy: 1 of 1 runs done" in capsys.readouterr().out
    assert run_grid(arguments("--runs", str(tmp_path)), "toy", "ab", toy_row) == whole
    assert {file.suffix for file in (tmp_path / "toy").iterdir()} == {".json"}


def test_a_line_for_each_epoch_and_for_what_is_resumed(tmp_path, capsys):
    kept = arguments("--runs", str(tmp_path), "--seeds", "1")
    with pytest.raises(KeyboardInterrupt):
        run_grid(kept, "toy", ["b"], interrupted_row)
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(",")[0] for line in lines] == ["seed 3"] * 2
    assert re.fullmatch(r"seed 3, b: epoch 2, validation -?\d\.\d{4}, 0\.\d s", lines[1])
    run_grid(kept, "toy", ["b"], toy_row)
    assert "seed 3, b: goes on after epoch 2\nseed 3, b: epoch 3," in capsys.readouterr().out
    run_grid(kept, "toy", ["b"], toy_row)
    assert capsys.readouterr().out == "seed 3, b: was finished before\n"


def test_other_settings_do_not_go_on(tmp_path):
    run_grid(arguments("--runs", str(tmp_path)), "toy", ["a"], toy_row)
    more_seeds = arguments("--runs", str(tmp_path), "--seeds", "3")
    assert len(run_grid(more_seeds, "toy", ["a"], toy_row)["a"]) == 3
    with pytest.raises(ValueError, match=r"a_seed_3.json was made with epochs = 3, not 4: give another"):
        run_grid(arguments("--runs", str(tmp_path), "--epochs", "4"), "toy", ["a"], toy_row)


def test_chosen_rows():
    assert list(run_grid(arguments("--rows", "b", "--seeds", "1"), "toy", "abc", toy_row)) == ["b"]
    with pytest.raises(ValueError, match=r"--rows must be some of \['a', 'b'\], but has \['c'\]"):
        run_grid(arguments("--rows", "b", "c"), "toy", ["a", "b"], toy_row)


def test_rows_have_files_of_their_own(tmp_path):
    with pytest.raises(ValueError, match="rows must have names that differ as files"):
        run_grid(arguments(), "toy", ["a b", "a & b"], toy_row)
    run_grid(arguments("--runs", str(tmp_path), "--seeds", "1"), "toy", ["σ, p = 4/3"], toy_row)
    (file,) = (tmp_path / "toy").iterdir()
    assert json.loads(file.read_text())["settings"] == {"epochs": 3}


def test_best_of_no_epochs_is_an_error():
    with pytest.raises(ValueError, match="empty"):
        _ = Fitted().best


def test_denormal_numbers_are_none_in_a_run_alone():
    def smallest(run, args):
        return {"half": (torch.tensor([torch.finfo(torch.float32).tiny]) / 2).item()}

    results = run_grid(arguments("--seeds", "1"), "toy", ("smallest",), smallest)
    assert results["smallest"] == [{"half": 0}]
    assert torch.tensor([torch.finfo(torch.float32).tiny]) / 2 > 0
