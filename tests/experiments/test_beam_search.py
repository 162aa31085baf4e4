"""The experiment runs with the smallest settings; grammar, search and the backtracked loss against small cases."""

from random import Random

import pytest
import torch
from torch.testing import assert_close

import beam_search as experiment
from generated_language import END, Corpus, draw_corpora, draw_sentence, make_corpus, translate


@pytest.fixture
def model():
    torch.manual_seed(0)
    return experiment.Translator()


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
    words = experiment.TARGET_WORDS
    memory, embedding, state = model.start(corpus.sources[:1])
    first, state = model.step(embedding, state, memory)
    second, _ = model.step(model.target.weight.unsqueeze(0), state.expand(1, words, -1), memory)
    second[0, END, 1:] = -torch.inf
    second[0, END, END] = 0.0
    best = (first[0, 0, :, None] + second[0]).argmax()
    (found,) = experiment.search(model, corpus.sources[:1], words, 2)
    assert found == [word for word in (best // words, best % words) if word != END]


def test_hard_search_with_one_beam_is_greedy_decoding(model, corpus, monkeypatch):
    """The reference is what greedy decoding without END writes: then the searched loss is the forced one."""
    monkeypatch.setattr(experiment, "EPSILON", 1e-4)
    memory, embedding, state = model.start(corpus.sources)
    words = []
    for _ in range(4):
        log_p, state = model.step(embedding, state, memory)
        words.append(log_p[..., END + 1 :].argmax(-1) + END + 1)
        embedding = model.target(words[-1])
    written = Corpus(corpus.sources, torch.cat((*words, torch.full((6, 1), END)), -1))
    assert_close(experiment.searched_loss(model, written, 1), experiment.forced_loss(model, written))


def test_backtracking_follows_the_pointers():
    # two beams; after the second word the best beam descends from beam 1, which predicted word 2
    log_p = torch.eye(3).log_softmax(-1)
    predictions = [log_p[None, :1], log_p[None, 1:], log_p[None, :2]]
    pointers = [torch.ones(1, 1, 2), torch.tensor([[[0.0, 1.0], [1.0, 0.0]]])]
    mixed = experiment.backtrack(predictions, pointers, torch.tensor([[2, 1, END]]))
    assert_close(mixed, torch.stack((log_p[0], log_p[2], log_p[0])).unsqueeze(0))
    ended = experiment.backtrack(predictions, pointers, torch.tensor([[2, END, END]]))  # the best beam after one word
    assert_close(ended[:, 1], log_p[None, 1])


def test_gradients_reach_every_weight(model, corpus):
    experiment.searched_loss(model, corpus, 2).backward()
    assert all(weight.grad.isfinite().all() and weight.grad.any() for weight in model.parameters())


def test_bleu_of_the_references_is_100(corpus):
    assert experiment.bleu(experiment.references(corpus), corpus) == pytest.approx(100)
