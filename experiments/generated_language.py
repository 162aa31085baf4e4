"""A small language and its translations: the data of the translator.

The target language has a different word order: nouns come before their adjectives, and verbs last. Each word has two
forms there: adjectives agree with their noun, verbs agree with the subject, and nouns have a form for the subject. In
the training data one form in ten is wrong. Words are numbers, starting at 1.
"""

from collections.abc import Iterable
from itertools import count, islice
from random import Random
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

NOUNS, ADJECTIVES, VERBS = range(1, 7), range(7, 11), range(11, 15)  # the words of the source language
SOURCE_WORDS, TARGET_WORDS = 15, 29  # END among them
END = 0  # ends a sentence, as often as is needed
WRONG = 0.1  # share of wrong forms in the training data
TEST_SIZE = 500


def draw_sentence(random: Random) -> list[int]:
    """Two or three noun phrases with verbs in between, 3 to 8 words."""
    words = noun_phrase(random)
    for _ in range(random.choice((1, 2))):
        words += [random.choice(VERBS), *noun_phrase(random)]
    return words


def noun_phrase(random: Random) -> list[int]:
    adjective = [random.choice(ADJECTIVES)] if random.random() < 0.5 else []
    return [*adjective, random.choice(NOUNS)]


def translate(words: list[int], random: Random, wrong: float) -> list[int]:
    """The words in the target language, nouns before their adjectives, verbs last, each in the right form."""

    def form(word: int, second: bool) -> int:
        return 2 * word - (second ^ (random.random() < wrong))

    subject = next(word for word in words if word in NOUNS)
    translated, verbs, adjective = [], [], None
    for word in words:
        if word in ADJECTIVES:
            adjective = word
        elif word in VERBS:
            verbs.append(form(word, subject % 2 == 1))
        else:
            translated.append(form(word, not verbs))
            translated += [form(adjective, word % 2 == 1)] if adjective else []
            adjective = None
    return translated + verbs


class Corpus(NamedTuple):
    """Sentences and translations, each followed by END; (size, length)."""

    sources: Tensor
    targets: Tensor


def make_corpus(sentences: Iterable[list[int]], random: Random, wrong: float) -> Corpus:
    pairs = [(words, translate(words, random, wrong)) for words in sentences]
    columns = ([torch.tensor([*words, END]) for words in texts] for texts in zip(*pairs, strict=True))
    return Corpus(*(pad_sequence(texts, batch_first=True, padding_value=END) for texts in columns))


def draw_corpora(size: int, random: Random) -> tuple[Corpus, Corpus]:
    """One to train on, one of other sentences and without wrong forms for tests."""
    endless = (draw_sentence(random) for _ in count())
    known = list(islice(endless, size))
    unknown = (words for words in endless if words not in known)
    return make_corpus(known, random, WRONG), make_corpus(list(islice(unknown, TEST_SIZE)), random, 0.0)
