"""How a translator is trained, and how one of real text is tested."""

from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

import torch
from sacrebleu import corpus_bleu
from torch import Tensor, nn

from generated_language import END, Corpus
from runs import Fitted, Run
from text_data import PAIRS, Sentence, Texts, Vocabulary, alike_batches, load_texts, trim
from translator import Attention, Translator, attend, forced_loss, search

BATCH_SIZE = 64
LARGEST_GRADIENT = 1.0  # longer ones are cut to this norm

# Of Multi30k
TEXT_WIDTH, TEXT_DROPOUT, VOCABULARY = 128, 0.2, 4000
TEXT_RATE = 2e-3
LONGEST_TRAINED, LONGEST_WRITTEN = 25, 40  # words
TEST_BATCH = 50  # sentences that are searched at a time
BLEU, GREEDY = "BLEU, beam search", "BLEU, greedy"

Loss = Callable[[Translator, Corpus], Tensor]


def add_text_arguments(parser: ArgumentParser) -> None:
    """Arguments of experiments that train a translator of Multi30k."""
    parser.add_argument("--data", choices=("generated", "multi30k"), default="generated", help="(default: %(default)s)")
    parser.add_argument("--data-dir", type=Path, help="folder with the files of Multi30k")
    parser.add_argument("--pair", choices=PAIRS, default=PAIRS[0], help="languages of Multi30k (default: %(default)s)")
    parser.add_argument("--epochs", type=int, default=8, help="by teacher forcing, of Multi30k (at most %(default)s)")
    parser.add_argument("--patience", type=int, default=2, help="of these without a new minimum (%(default)s)")


def text_translator(args: Namespace, attention: Attention = attend) -> tuple[Texts, Translator]:
    """The texts, and a translator that knows none of them yet."""
    texts = load_texts(args.data_dir, args.pair, args.sentences, LONGEST_TRAINED, VOCABULARY)
    return texts, Translator(len(texts.source), len(texts.target), TEXT_WIDTH, TEXT_DROPOUT, attention)


def step(model: Translator, optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), LARGEST_GRADIENT)
    optimizer.step()


@torch.no_grad()
def validation_loss(model: Translator, corpus: Corpus) -> float:
    model.eval()
    parts = [trim(Corpus(*part)) for part in zip(*(words.split(TEST_BATCH) for words in corpus), strict=True)]
    words = [(part.targets != END).sum() + len(part.targets) for part in parts]
    losses = [forced_loss(model, part) * number for part, number in zip(parts, words, strict=True)]
    return (sum(losses) / sum(words)).item()


def text_bleu(model: Translator, corpus: Corpus, target: Vocabulary, right: Iterable[Sentence], beams: int) -> float:
    """BLEU against translations as words, in which those that the vocabulary lacks are kept."""
    model.eval()
    found = []
    for sources in corpus.sources.split(TEST_BATCH):
        found += search(model, sources[:, : int((sources != END).sum(-1).max()) + 1], beams, LONGEST_WRITTEN)
    written = [" ".join(target.decode(words)) for words in found]
    references = [" ".join(words) for words in right]
    return corpus_bleu(written, [references], tokenize="none", force=True).score  # texts that are tokenised already


class Ends(NamedTuple):
    """The learning rate of a training, and when it ends."""

    rate: float
    epochs: int  # at most
    patience: int


def fit_text(
    run: Run, model: Translator, corpus: Corpus, loss: Loss, validate: Callable[[], float], ends: Ends
) -> Fitted:
    """Trains by the loss, and leaves the model of the best epoch."""
    optimizer = torch.optim.Adam(model.parameters(), lr=ends.rate)

    def train_epoch(epoch: int) -> None:
        model.train()
        for batch in alike_batches(corpus, BATCH_SIZE):
            step(model, optimizer, loss(model, batch))

    return run.fit(model, optimizer, train_epoch, validate, ends.epochs, ends.patience)
