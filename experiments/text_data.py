"""Sentences and their translations in the files of Multi30k: the real text of the translator.

    train.<language>.gz, val.<language>.gz, test_2016_flickr.<language>.gz      one sentence a line, with or without .gz

Texts are in small letters and split into words by the tokeniser 13a of sacrebleu. A vocabulary has the words that are
most frequent in the training texts, and UNKNOWN in place of all others. Words are numbers.
"""

import gzip
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from sacrebleu.tokenizers.tokenizer_13a import Tokenizer13a
from torch.nn.utils.rnn import pad_sequence

from generated_language import END, Corpus

UNKNOWN = END + 1
PARTS = {"train": "train", "validation": "val", "test": "test_2016_flickr"}
PAIRS = ("en-de", "en-fr")

Sentence = list[str]


class Vocabulary:
    """The most frequent words of some sentences, numbered from 2, after END and UNKNOWN."""

    def __init__(self, sentences: Iterable[Sentence], size: int) -> None:
        counts = Counter(word for sentence in sentences for word in sentence)
        frequent = sorted(counts, key=lambda word: (-counts[word], word))  # whatever their order in the file
        self.words = ["<end>", "<unk>", *frequent[: size - 2]]
        self.numbers = {word: number for number, word in enumerate(self.words)}

    def __len__(self) -> int:
        return len(self.words)

    def encode(self, sentence: Sentence) -> list[int]:
        return [self.numbers.get(word, UNKNOWN) for word in sentence]

    def decode(self, numbers: Iterable[int]) -> Sentence:
        return [self.words[number] for number in numbers]


class Texts(NamedTuple):
    """Numbered sentences to train on, to validate and to test with; the vocabularies; and the references, as words."""

    train: Corpus
    validation: Corpus
    test: Corpus
    source: Vocabulary
    target: Vocabulary
    references: dict[str, list[Sentence]]  # of "validation" and "test", with words that the vocabulary lacks


def read_sentences(folder: Path, part: str, language: str) -> list[Sentence]:
    """The sentences of a file, in small letters, as words."""
    names = [f"{PARTS[part]}.{language}{suffix}" for suffix in (".gz", "")]
    paths = [folder / name for name in names if (folder / name).is_file()]
    if not paths:
        raise FileNotFoundError(f"multi30k: neither {' nor '.join(names)} is in {folder}")
    tokenize = Tokenizer13a()
    with (
        gzip.open(paths[0], "rt", encoding="utf-8")
        if paths[0].suffix == ".gz"
        else paths[0].open(encoding="utf-8") as file
    ):
        return [tokenize(line.strip().lower()).split() for line in file]


def load_texts(folder: Path | None, pair: str, size: int | None, longest: int, vocabulary: int) -> Texts:
    """Multi30k in two languages, such as ``en-de``.

    Args:
        folder: That of the files.
        pair: The languages of source and target.
        size: Number of sentences to train on, and at most to validate and to test with; None for all.
        longest: Words of a sentence to train on, in either language; pairs with a longer one are left out.
        vocabulary: Words of each language, with END and UNKNOWN.
    """
    if folder is None:
        raise FileNotFoundError(
            "multi30k does not ship with this experiment: give the folder of its files by --data-dir"
        )
    languages = pair.split("-")
    read = {part: [read_sentences(folder, part, language) for language in languages] for part in PARTS}
    for part, (sources, targets) in read.items():
        if len(sources) != len(targets):
            raise ValueError(f"{folder}: {part} has {len(sources)} sentences, but {len(targets)} translations")
    pairs = [both for both in zip(*read["train"], strict=True) if max(map(len, both)) <= longest][:size]
    source, target = (Vocabulary(sentences, vocabulary) for sentences in zip(*pairs, strict=True))
    others = {part: list(zip(*read[part], strict=True))[:size] for part in ("validation", "test")}
    corpora = [number(part, source, target) for part in (pairs, *others.values())]
    return Texts(*corpora, source, target, {part: [right for _, right in others[part]] for part in others})


def number(pairs: list[tuple[Sentence, Sentence]], source: Vocabulary, target: Vocabulary) -> Corpus:
    """Each sentence followed by END, as often as the longest one needs."""
    columns = zip(*pairs, strict=True)
    numbered = [
        [torch.tensor([*words.encode(sentence), END]) for sentence in sentences]
        for words, sentences in zip((source, target), columns, strict=True)
    ]
    return Corpus(*(pad_sequence(sentences, batch_first=True, padding_value=END) for sentences in numbered))


def alike_batches(corpus: Corpus, size: int) -> Iterator[Corpus]:
    """One epoch in random order, in batches of translations of nearly the same length; at most ``size`` sentences."""
    lengths = (corpus.targets != END).sum(-1)
    order = (lengths + torch.rand(len(lengths))).argsort()
    batches = order.split(size)
    for i in torch.randperm(len(batches)).tolist():
        yield trim(Corpus(corpus.sources[batches[i]], corpus.targets[batches[i]]))


def trim(batch: Corpus) -> Corpus:
    """The batch without the columns in which all sentences have ended, one END after the longest sentence."""
    return Corpus(*(words[:, : int((words != END).sum(-1).max()) + 1] for words in batch))
