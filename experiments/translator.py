"""A translator, its loss in teacher forcing, a soft beam search to train it by, and an ordinary one to test it with."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import nll_loss, one_hot
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from generated_language import END, SOURCE_WORDS, TARGET_WORDS, Corpus
from khot import sorted_transport_topk

WIDTH = 48


class Memory(NamedTuple):
    """What the encoder leaves for the decoder to attend to."""

    states: Tensor  # (..., length, width)
    padding: Tensor  # (..., length), -inf where there is no word


# Of queries (..., beams, width) to keys (..., length, width), their values and their padding: (..., beams, width).
Attention = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def attend(query: Tensor, key: Tensor, value: Tensor, padding: Tensor) -> Tensor:
    """Attention to all words."""
    return (query @ key.mT / query.shape[-1] ** 0.5 + padding).softmax(-1) @ value


class Translator(nn.Module):
    """Encoder and decoder of one recurrent layer each, with attention between.

    Args:
        source_words: Size of the source's vocabulary.
        target_words: Size of the target's vocabulary.
        width: Of embeddings and states.
        dropout: Share of the entries of embeddings, and of what the next word is predicted from, that training drops.
        attention: Of the decoder's states to the encoder's.
    """

    def __init__(
        self,
        source_words: int = SOURCE_WORDS,
        target_words: int = TARGET_WORDS,
        width: int = WIDTH,
        dropout: float = 0.0,
        attention: Attention = attend,
    ) -> None:
        super().__init__()
        self.attention = attention
        self.source = nn.Embedding(source_words, width)
        self.target = nn.Embedding(target_words, width)
        self.encoder = nn.GRU(width, width // 2, batch_first=True, bidirectional=True)
        self.decoder = nn.GRUCell(width, width)
        self.first = nn.Linear(width, width)
        self.read_out = nn.Sequential(nn.Linear(2 * width, width), nn.Tanh(), nn.Dropout(dropout))
        self.scores = nn.Linear(width, target_words)
        self.dropout = nn.Dropout(dropout)

    def encode(self, sources: Tensor) -> tuple[Memory, Tensor]:
        """The memory, and the first state of the decoder (batch, width)."""
        lengths = (sources != END).sum(-1) + 1  # one END each
        embedded = self.dropout(self.source(sources))
        words = pack_padded_sequence(embedded, lengths, batch_first=True, enforce_sorted=False)
        states, _ = pad_packed_sequence(self.encoder(words)[0], batch_first=True)
        no_word = torch.arange(states.shape[1]) >= lengths.unsqueeze(-1)
        padding = torch.zeros(no_word.shape).masked_fill(no_word, -torch.inf)
        return Memory(states, padding), self.first(states[:, 0]).tanh()

    def advance(self, embedding: Tensor, state: Tensor, memory: Memory) -> tuple[Tensor, Tensor]:
        """What the next word is predicted from, and the new state, both (batch, beams, width)."""
        words = self.dropout(embedding).flatten(0, 1)
        state = self.decoder(words, state.flatten(0, 1)).view(state.shape)
        found = self.attention(state, memory.states, memory.states, memory.padding.unsqueeze(-2))
        return self.read_out(torch.cat((state, found), -1)), state

    def predict(self, features: Tensor) -> Tensor:
        """Log-probabilities of the next word (..., words of the target)."""
        return self.scores(features).log_softmax(-1)

    def step(self, embedding: Tensor, state: Tensor, memory: Memory) -> tuple[Tensor, Tensor]:
        """Log-probabilities of the next word (batch, beams, words), and the new state (batch, beams, width)."""
        features, state = self.advance(embedding, state, memory)
        return self.predict(features), state

    def start(self, sources: Tensor) -> tuple[Memory, Tensor, Tensor]:
        """The memory, and embedding and state of a single beam, (batch, 1, width)."""
        memory, state = self.encode(sources)
        begin = torch.full((len(sources), 1), END)
        return memory, self.target(begin), state.unsqueeze(-2)


def forced_loss(model: Translator, batch: Corpus) -> Tensor:
    """-log-likelihood of the references, whose words the decoder is given."""
    memory, embedding, state = model.start(batch.sources)
    features = []
    for words in batch.targets.T:
        feature, state = model.advance(embedding, state, memory)
        features.append(feature)
        embedding = model.target(words).unsqueeze(-2)
    counted = until_end(batch.targets)
    return nll_loss(model.predict(torch.cat(features, -2)[counted]), batch.targets[counted])


def until_end(targets: Tensor) -> Tensor:
    """Which words a loss counts: those up to the first END."""
    return (targets == END).cumsum(-1) <= 1


class SoftSearch(NamedTuple):
    """The settings of a soft beam search.

    Args:
        beams: Number of beams.
        epsilon: Softness of the choice.
        candidates: Words by which each beam is extended, the most likely ones.
        follows_one: Whether the way back from the best beam follows the largest entry of each back pointer, as
            algorithm 2 does, in place of all of them by their weights.
    """

    beams: int
    epsilon: float
    candidates: int = 10**9
    follows_one: bool = False


def searched_loss(model: Translator, batch: Corpus, soft: SoftSearch) -> Tensor:
    """-log-likelihood of the references along the ancestors of the best beam of a soft search of their length."""
    memory, embedding, state = model.start(batch.sources)
    log_p, state = model.step(embedding, state, memory)
    log_likelihood = torch.zeros(state.shape[:-1])  # (batch, beams); one beam, of no words
    predictions, pointers = [of_word(log_p, batch.targets[:, 0])], []
    for words in batch.targets[:, 1:].T:
        chosen, extended, number = choose(log_likelihood, log_p, soft)
        log_likelihood = torch.einsum("biwr,biw->br", chosen, extended)
        pointers.append(chosen.sum(-2))  # (batch, old beams, new beams)
        embedding = torch.einsum("biwr,biwe->bre", chosen, model.target(number))
        log_p, state = model.step(embedding, pointers[-1].mT @ state, memory)
        predictions.append(of_word(log_p, words))
    counted = until_end(batch.targets)
    return -backtrack(predictions, pointers, batch.targets, soft.follows_one)[counted].mean()


def of_word(log_p: Tensor, words: Tensor) -> Tensor:
    """The log-probability (batch, beams) of the word of each sentence."""
    return log_p.gather(-1, words[:, None, None].expand(-1, log_p.shape[-2], 1)).squeeze(-1)


def choose(log_likelihood: Tensor, log_p: Tensor, soft: SoftSearch) -> tuple[Tensor, Tensor, Tensor]:
    """Extends beams, but not by END.

    Returns:
        The weights of the extensions in the new beams, best first, (batch, old beams, candidates, new beams); the
        log-likelihoods of the extensions, and their words, both (batch, old beams, candidates).
    """
    words = log_p[..., END + 1 :]
    best, number = words.topk(min(soft.candidates, words.shape[-1]))
    extended = log_likelihood.unsqueeze(-1) + best
    chosen = sorted_transport_topk(extended.flatten(-2), soft.beams, soft.epsilon)
    return chosen.view(*extended.shape, soft.beams), extended, number + END + 1


def backtrack(predictions: list[Tensor], pointers: list[Tensor], targets: Tensor, follows_one: bool = False) -> Tensor:
    """Log-probabilities of the reference (batch, length), mixed over the best beam's ancestors.

    The search is to end where the reference does: the beam that is best then is the one whose ancestors count.

    Args:
        predictions: For each step the log-probability of the reference's word by beam (batch, beams).
        pointers: For each step but the first the weights of old beams in new ones (batch, old beams, new beams).
        targets: The references (batch, length).
        follows_one: As in `SoftSearch`.
    """
    length = (targets != END).sum(-1, keepdim=True)
    best = torch.eye(predictions[-1].shape[-1])[0].expand(len(targets), -1)
    weights, mixed = best, []
    for t in reversed(range(len(predictions))):
        if t < len(pointers):
            pointer = hardened(pointers[t]) if follows_one else pointers[t]
            ancestors = (pointer @ weights.unsqueeze(-1)).squeeze(-1)  # sums to 1, as the columns of pointers do
            weights = torch.where(t >= length, best, ancestors) if t else ancestors  # one beam at first
        mixture = (weights * predictions[t].exp()).sum(-1)
        mixed.append(mixture.clamp(min=torch.finfo(mixture.dtype).tiny).log())
    return torch.stack(mixed[::-1], -1)


def hardened(pointer: Tensor) -> Tensor:
    """Ones at the old beam of most weight in each new one."""
    return one_hot(pointer.argmax(-2), pointer.shape[-2]).mT.to(pointer.dtype)


@torch.no_grad()
def search(model: Translator, sources: Tensor, beams: int, longest: int) -> list[list[int]]:
    """The translation of most likelihood that an ordinary beam search finds, for each source."""
    memory, embedding, state = model.start(sources)
    words = model.target.num_embeddings
    written = torch.zeros(len(sources), 1, 0, dtype=torch.long)  # (batch, beams, words)
    log_likelihood, ended = torch.zeros(state.shape[:-1]), torch.zeros(state.shape[:-1], dtype=torch.bool)
    only_end = torch.full((words,), -torch.inf).index_fill(0, torch.tensor(END), 0.0)
    for _ in range(longest):
        log_p, state = model.step(embedding, state, memory)
        log_p = torch.where(ended.unsqueeze(-1), only_end, log_p)
        extended = (log_likelihood.unsqueeze(-1) + log_p).flatten(-2)
        log_likelihood, chosen = extended.topk(beams)
        beam, word = chosen // words, chosen % words
        written = torch.cat((pick(written, beam), word.unsqueeze(-1)), -1)
        state, ended = pick(state, beam), ended.gather(-1, beam) | (word == END)
        if ended.all():
            break
        embedding = model.target(word)
    return [words[: words.index(END)] if END in words else words for words in written[:, 0].tolist()]


def pick(x: Tensor, beam: Tensor) -> Tensor:
    """x (batch, beams, features) of the beams with these indices (batch, new beams)."""
    return x.gather(-2, beam.unsqueeze(-1).expand(-1, -1, x.shape[-1]))
