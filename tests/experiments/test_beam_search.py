"""The experiment runs with the smallest settings, also on text; grammar, search and the backtracked loss."""

from random import Random

import pytest
import torch
from torch.testing import assert_close

import beam_search as experiment
import translator
import translator_training
from generated_language import END, TARGET_WORDS, Corpus, draw_corpora, draw_sentence, make_corpus, translate
from text_data import UNKNOWN, alike_batches, load_texts
from translator import SoftSearch, Translator, backtrack, forced_loss, search, searched_loss


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Translator()


@pytest.fixture
def corpus():
    random = Random(0)
    return make_corpus([draw_sentence(random) for _ in range(6)], random, wrong=0.0)


@pytest.mark.slow
def test_smoke(tmp_path, capsys):
    table = experiment.main(["--smoke", "--out", str(tmp_path)])
    assert set(table.scores) == {experiment.START, experiment.FORCED, experiment.SEARCHED, experiment.BOTH}
    assert (tmp_path / "beam_search.png").stat().st_size > 3_000
    assert "SOFT beam search beats teacher forcing" in capsys.readouterr().out


def test_too_many_beams(capsys):
    with pytest.raises(SystemExit):
        experiment.main(["--beams", "29"])
    assert "--beams must be in 1 to 28" in capsys.readouterr().err


def test_grammar():
    # adjective 8, noun 3 (odd, subject), verb 12, noun 2: second forms are odd numbers
    assert translate([8, 3, 12, 2], Random(0), wrong=0.0) == [5, 15, 4, 23]
    assert translate([8, 3, 12, 2], Random(0), wrong=1.0) == [6, 16, 3, 24]


def test_other_sentences_in_tests():
    corpora = draw_corpora(1000, Random(0))
    known, unknown = ({tuple(filter(None, words)) for words in corpus.sources.tolist()} for corpus in corpora)
    assert len(unknown) > 300 and not known & unknown


def test_sentences_of_a_batch_do_not_change_each_other(model, corpus):
    shortest = corpus.sources.count_nonzero(-1).argmin()
    alone = corpus.sources[shortest][: corpus.sources.count_nonzero(-1).min() + 1]
    together = model.step(*example_start(model, corpus.sources))[0][shortest]
    assert_close(model.step(*example_start(model, alone.unsqueeze(0)))[0][0], together)


def example_start(model, sources):
    memory, embedding, state = model.start(sources)
    return embedding, state, memory


@torch.no_grad()
def test_wide_search_finds_the_best_translation_of_up_to_two_words(model, corpus):
    words = TARGET_WORDS
    memory, embedding, state = model.start(corpus.sources[:1])
    first, state = model.step(embedding, state, memory)
    second, _ = model.step(model.target.weight.unsqueeze(0), state.expand(1, words, -1), memory)
    second[0, END, 1:] = -torch.inf
    second[0, END, END] = 0.0
    best = (first[0, 0, :, None] + second[0]).argmax()
    (found,) = search(model, corpus.sources[:1], words, 2)
    assert found == [word for word in (best // words, best % words) if word != END]


def test_hard_search_with_one_beam_is_greedy_decoding(model, corpus):
    """The reference is what greedy decoding without END writes: then the searched loss is the forced one."""
    memory, embedding, state = model.start(corpus.sources)
    words = []
    for _ in range(4):
        log_p, state = model.step(embedding, state, memory)
        words.append(log_p[..., END + 1 :].argmax(-1) + END + 1)
        embedding = model.target(words[-1])
    written = Corpus(corpus.sources, torch.cat((*words, torch.full((6, 1), END)), -1))
    for candidates, follows_one in ((2, False), (28, True)):
        soft = SoftSearch(1, 1e-4, candidates, follows_one)
        assert_close(searched_loss(model, written, soft), forced_loss(model, written))


def test_backtracking_follows_the_pointers():
    # two beams; after the second word the best beam descends from beam 1, whose first prediction is the better one
    steps = [torch.tensor([[-1.0]]), torch.tensor([[-3.0, -2.0]]), torch.tensor([[-4.0, -5.0]])]
    pointers = [torch.ones(1, 1, 2), torch.tensor([[[0.0, 1.0], [1.0, 0.0]]])]
    mixed = backtrack(steps, pointers, torch.tensor([[2, 1, END]]))
    assert_close(mixed, torch.tensor([[-1.0, -2.0, -4.0]]))
    ended = backtrack(steps, pointers, torch.tensor([[2, END, END]]))  # the best beam after one word
    assert_close(ended[:, 1], torch.tensor([-3.0]))


def test_soft_pointers_mix_and_their_largest_entries_choose():
    steps = [torch.tensor([[-1.0]]), torch.tensor([[-3.0, -2.0]]), torch.tensor([[-4.0, -5.0]])]
    pointers = [torch.ones(1, 1, 2), torch.tensor([[[0.25, 0.9], [0.75, 0.1]]])]
    targets = torch.tensor([[2, 1, END]])
    mixture = (0.25 * torch.tensor(-3.0).exp() + 0.75 * torch.tensor(-2.0).exp()).log()
    assert_close(backtrack(steps, pointers, targets)[0, 1], mixture)
    assert_close(backtrack(steps, pointers, targets, follows_one=True), torch.tensor([[-1.0, -2.0, -4.0]]))


def test_extensions_by_few_candidates_are_those_by_all(model, corpus):
    memory, embedding, state = model.start(corpus.sources)
    log_p, _ = model.step(embedding, state, memory)
    (all_of_them, _, numbers), (few, _, likely) = (
        translator.choose(torch.zeros(6, 1), log_p, SoftSearch(2, 0.01, candidates)) for candidates in (28, 8)
    )
    assert_close(few, all_of_them[..., :8, :])
    assert torch.equal(likely, numbers[..., :8]) and all_of_them[..., 8:, :].max() < 1e-5


def test_gradients_reach_every_weight(model, corpus):
    searched_loss(model, corpus, SoftSearch(2, experiment.EPSILON)).backward()
    assert all(weight.grad.isfinite().all() and weight.grad.any() for weight in model.parameters())


def test_bleu_of_the_references_is_100(corpus):
    assert experiment.bleu(experiment.references(corpus), corpus) == pytest.approx(100)


@pytest.mark.slow
def test_smoke_on_text(multi30k, tmp_path, capsys):
    data = ["--data", "multi30k", "--data-dir", str(multi30k), "--seeds", "1"]
    table = experiment.main(["--smoke", *data, "--out", str(tmp_path), "--runs", str(tmp_path), "--processes", "1"])
    assert list(table.scores) == [experiment.START, *experiment.later_losses(SoftSearch(2, 0.1))]
    assert (tmp_path / "beam_search_en-de.png").stat().st_size > 3_000
    kept = [path.name for path in (tmp_path / "beam_search_en-de").iterdir()]
    assert kept == ["all_rows_seed_0.json"]
    assert "beats teacher forcing (Xie et al.)" in capsys.readouterr().out


def test_texts(multi30k):
    texts = load_texts(multi30k, "en-de", None, longest=4, vocabulary=6)
    assert texts.target.words == ["<end>", "<unk>", ".", "ein", "mann", "geht"]
    assert texts.train.targets[:4].tolist() == [[3, 4, 5, 2, END]] * 3 + [[3, 4, UNKNOWN, 2, END]]
    assert texts.references["test"][0] == ["ein", "mann", "geht", "heute", "."]
    assert texts.target.decode(texts.target.encode(["ein", "hund"])) == ["ein", "<unk>"]
    with pytest.raises(FileNotFoundError, match="--data-dir"):
        load_texts(None, "en-de", None, 4, 6)
    with pytest.raises(FileNotFoundError, match=r"train\.fr\.gz"):
        load_texts(multi30k, "en-fr", None, 4, 6)


def test_batches_are_of_like_lengths_and_have_every_sentence():
    targets = torch.zeros(40, 12, dtype=torch.long)
    for row, length in enumerate(torch.arange(40) % 10 + 1):
        targets[row, :length] = row + 1
    batches = list(alike_batches(Corpus(targets, targets), 4))
    assert sorted(row for batch in batches for row in batch.targets[:, 0].tolist()) == list(range(1, 41))
    assert all(batch.targets.shape[1] == (batch.targets != END).sum(-1).max() + 1 for batch in batches)
    assert all((batch.targets != END).sum(-1).min() == batch.targets.shape[1] - 1 for batch in batches)


def test_bleu_counts_words_that_the_vocabulary_lacks(multi30k, monkeypatch):
    texts = load_texts(multi30k, "en-de", None, 9, 8)
    whole = [words[: words.index(END)] for words in texts.validation.targets.tolist()]
    monkeypatch.setattr(translator_training, "search", lambda model, sources, beams, longest: whole[: len(sources)])
    model = Translator(8, 8)
    lacking = ["ein", "mann", "fliegt", "."]
    right = experiment.text_bleu(model, texts.validation, texts.target, texts.references["validation"], 1)
    assert right == pytest.approx(100)
    assert experiment.text_bleu(model, texts.validation, texts.target, [lacking] * 9, 1) < 70
