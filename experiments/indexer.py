"""Trains indexers that choose the keys of an attention layer, by a KL divergence or by a loss on the set of the best.

    python experiments/indexer.py

DeepSeek-V3.2 attends to k keys for each query. A small indexer with ReLU heads of its own scores them,

    I[t, s] = sum over heads j of w_j(h_t) relu(q_j(h_t) . k_j(h_s)),

and is trained by the KL divergence of its softmax from the attention, which is the mean over the heads of the layer.
Here a transformer of two layers first learns to copy with full attention: a sequence consists of phrases of six random
symbols, most of which repeat an earlier phrase of the sequence, so that the next symbol is known in most places. Then
its weights are frozen, and each layer gets an indexer, whose scores `topk_indices` turns into k of the earlier
positions. The rows differ in what the indexers minimise:

* KL divergence, as in DeepSeek-V3.2;
* Fenchel-Young loss: `fenchel_young_topk_loss` of the mask of the k keys with the most attention;
* binary cross-entropy of the same mask.

"Best keys" knows the attention, "last keys" takes the k positions up to the query, and "no training" the indexers as
they are initialised.

Protocol: scores are those of fresh sequences, averaged over layers and queries with more than k keys. "Attention found"
is the share of the attention that goes to the chosen keys. "Copied" is the accuracy of predicted symbols that are known
when all layers attend to the chosen keys only. Steps, learning rate, minibatches and initial weights are the same in
every row. The temperature of the KL divergence's softmax is 1, and the strength of the Fenchel-Young loss is 1; neither
was chosen by a score.

With three seeds, the Fenchel-Young loss and the KL divergence find the same share of the attention, 76 % of the 79 %
that eight keys can have, and the transformer copies as well as with full attention. Binary cross-entropy finds 73 %.
"""

from argparse import Namespace
from collections.abc import Callable, Iterator
from copy import deepcopy

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, pad
from tqdm import tqdm

from common import Table, each_seed, experiment_parser, parse, save_figure
from khot import fenchel_young_topk_loss, topk_indices, topk_mask

SYMBOLS, PHRASE, PHRASES, DISTINCT = 48, 6, 16, 6  # a sequence has 16 phrases, six of which are different
LENGTH = PHRASE * PHRASES
WIDTH, HEADS, LAYERS = 64, 4, 2
INDEX_HEADS, INDEX_WIDTH, K = 2, 8, 8
BATCH, RATE = 32, 3e-3
FOUND, COPIED = "attention found, %", "copied, %"
FULL, BEST, LAST, UNTRAINED = "full attention", "best keys", "last keys", "no training"
KL, SET, BINARY = "KL divergence", "Fenchel-Young loss", "binary cross-entropy"
Choose = Callable[[int, Tensor, Tensor], Tensor]  # a layer, its input, its attention: which keys, (batch, query, key)


def draw(size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Sequences (size, LENGTH), and which symbols are known from an earlier phrase."""
    phrases = torch.randint(SYMBOLS, (size, DISTINCT, PHRASE), generator=generator)
    order = torch.randint(DISTINCT, (size, PHRASES), generator=generator)
    symbols = phrases.gather(1, order.unsqueeze(-1).expand(-1, -1, PHRASE)).flatten(1)
    seen = (order.unsqueeze(1) == order.unsqueeze(2)).tril(-1).any(-1)
    known = seen.repeat_interleave(PHRASE, 1)
    known[:, ::PHRASE] = False  # the first symbol tells which phrase it is
    return symbols, known


class Layer(nn.Module):
    """Causal attention and a perceptron, both added to their input."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.perceptron_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.projections, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.perceptron = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))

    def heads(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Logits (batch, head, query, key), and values (batch, head, key, width)."""
        q, k, v = self.projections(self.norm(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        later = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)[: x.shape[1], : x.shape[1]]
        return (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(later, -torch.inf), v

    def forward(self, x: Tensor, logits: Tensor, values: Tensor) -> Tensor:
        x = x + self.out((logits.softmax(-1) @ values).transpose(1, 2).flatten(2))
        return x + self.perceptron(self.perceptron_norm(x))


class Transformer(nn.Module):
    """Predicts the next symbol; each place knows its symbol and the one before."""

    def __init__(self) -> None:
        super().__init__()
        self.symbols, self.before = nn.Embedding(SYMBOLS, WIDTH), nn.Embedding(SYMBOLS, WIDTH)
        self.places = nn.Parameter(0.1 * torch.randn(LENGTH, WIDTH))
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, SYMBOLS))

    def embedded(self, symbols: Tensor) -> Tensor:
        return self.symbols(symbols) + self.before(pad(symbols[:, :-1], (1, 0))) + self.places

    def forward(self, symbols: Tensor, choose: Choose | None = None) -> Tensor:
        """Logits (batch, LENGTH, SYMBOLS), with attention to the chosen keys."""
        x = self.embedded(symbols)
        for index, layer in enumerate(self.layers):
            logits, values = layer.heads(x)
            if choose is not None:
                chosen = choose(index, x, logits.softmax(-1).mean(1))
                logits = logits.masked_fill(~chosen.unsqueeze(1), -torch.inf)
            x = layer(x, logits, values)
        return self.head(x)

    def attention(self, symbols: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """For each layer its input and the mean of its heads, (batch, query, key)."""
        x = self.embedded(symbols)
        for layer in self.layers:
            logits, values = layer.heads(x)
            yield x, logits.softmax(-1).mean(1)
            x = layer(x, logits, values)


class Indexer(nn.Module):
    """Scores (batch, query, key) of keys, ``-inf`` for later ones."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.queries, self.keys = (nn.Linear(WIDTH, INDEX_HEADS * INDEX_WIDTH) for _ in range(2))
        self.weights = nn.Linear(WIDTH, INDEX_HEADS)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        q, k = (of(x).unflatten(-1, (INDEX_HEADS, -1)).transpose(1, 2) for of in (self.queries, self.keys))
        scores = ((q @ k.mT).relu() * self.weights(x).mT.unsqueeze(-1)).sum(1)
        return scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -torch.inf)


def kl_divergence(scores: Tensor, attention: Tensor) -> Tensor:
    """Up to a constant."""
    log_q = scores.log_softmax(-1).masked_fill(scores == -torch.inf, 0)
    return -(attention * log_q).sum(-1).mean()


def of_the_set(scores: Tensor, attention: Tensor) -> Tensor:
    rows = scores.masked_fill(scores == -torch.inf, -1e4)  # a query with fewer than K earlier keys takes later ones
    return fenchel_young_topk_loss(rows[:, K:], topk_mask(attention[:, K:], K), K)


def of_each_key(scores: Tensor, attention: Tensor) -> Tensor:
    target = topk_mask(attention[:, K:], K)
    scores = scores[:, K:]
    losses = binary_cross_entropy_with_logits(scores.masked_fill(scores == -torch.inf, 0), target, reduction="none")
    return losses.masked_fill(scores == -torch.inf, 0).sum(-1).mean()


LOSSES = {KL: kl_divergence, SET: of_the_set, BINARY: of_each_key}


def steps_of(model: nn.Module, loss: Callable[[Tensor, Tensor], Tensor], args: Namespace, seed: int, progress: tqdm):
    """Trains a model on fresh sequences with their known symbols."""
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.Adam(model.parameters(), lr=RATE)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, total_steps=args.steps)
    for _ in range(args.steps):
        optimizer.zero_grad()
        loss(*draw(BATCH, generator)).backward()
        optimizer.step()
        schedule.step()
        progress.update()


def train_transformer(args: Namespace, seed: int, progress: tqdm) -> Transformer:
    model = Transformer()
    steps_of(
        model,
        lambda symbols, _: cross_entropy(model(symbols)[:, :-1].flatten(0, 1), symbols[:, 1:].flatten()),
        args,
        seed,
        progress,
    )
    return model.requires_grad_(False)


def train_indexers(
    model: Transformer, start: nn.ModuleList, row: str, args: Namespace, seed: int, progress: tqdm
) -> nn.ModuleList:
    indexers = deepcopy(start)

    def loss(symbols: Tensor, _: Tensor) -> Tensor:
        layers = zip(indexers, model.attention(symbols), strict=True)
        return sum(LOSSES[row](indexer(x), attention) for indexer, (x, attention) in layers)

    steps_of(indexers, loss, args, seed, progress)
    return indexers


def by(indexers: nn.ModuleList) -> Choose:
    """The choice of the indexers."""

    def choose(layer: int, x: Tensor, attention: Tensor) -> Tensor:
        indices = topk_indices(indexers[layer](x), K, lengths=torch.arange(1, x.shape[1] + 1), fill=x.shape[1])
        marks = torch.zeros(*attention.shape[:-1], x.shape[1] + 1, dtype=torch.bool)  # the last is for missing keys
        return marks.scatter(-1, indices, True)[..., :-1]

    return choose


def best(layer: int, x: Tensor, attention: Tensor) -> Tensor:
    return topk_mask(attention, K).bool()


def last(layer: int, x: Tensor, attention: Tensor) -> Tensor:
    return torch.ones_like(attention, dtype=torch.bool).tril().triu(1 - K)


def everything(layer: int, x: Tensor, attention: Tensor) -> Tensor:
    return torch.ones_like(attention, dtype=torch.bool)


@torch.no_grad()
def score(model: Transformer, choose: Choose, seed: int) -> dict[str, float]:
    symbols, known = draw(200, torch.Generator().manual_seed(10**6 + seed))
    layers = enumerate(model.attention(symbols))
    found = [(attention * choose(layer, x, attention)).sum(-1)[:, K:].mean() for layer, (x, attention) in layers]
    is_right = model(symbols, choose)[:, :-1].argmax(-1) == symbols[:, 1:]
    return {FOUND: 100 * sum(found).item() / LAYERS, COPIED: 100 * is_right[known[:, 1:]].float().mean().item()}


def draw_figure(table: Table) -> Figure:
    figure = Figure(figsize=(7, 3.2), layout="constrained")
    for panel, column in zip(figure.subplots(1, 2, sharey=True), (FOUND, COPIED), strict=True):
        values = [table.values(row, column) for row in table.scores]
        panel.errorbar([v.mean() for v in values], list(table.scores), xerr=[v.std() for v in values], fmt="o")
        panel.set(xlabel=f"{column} (mean and sd)", xlim=(0, 102))
    panel.invert_yaxis()
    return figure


def main(arguments: list[str] | None = None) -> Table:
    parser = experiment_parser(__doc__)
    parser.add_argument("--steps", type=int, default=1200, help="of each training (default: %(default)s)")
    args = parse(parser, arguments, smoke={"seeds": 2, "steps": 2})

    title = f"{K} of up to {LENGTH} keys, chosen by indexers of {INDEX_HEADS} heads of width {INDEX_WIDTH}"
    table = Table(title, dict.fromkeys((FOUND, COPIED), ".1f"), KL)
    for seed, progress in each_seed(args, steps=(1 + len(LOSSES)) * args.steps):
        model, start = train_transformer(args, seed, progress), nn.ModuleList(Indexer() for _ in range(LAYERS))
        choices = {FULL: everything, BEST: best, LAST: last, UNTRAINED: by(start)}
        choices |= {row: by(train_indexers(model, start, row, args, seed, progress)) for row in LOSSES}
        for row, choose in choices.items():
            table.add(row, score(model, choose, seed))
    table.find("the KL divergence finds more attention than the last keys have", KL, LAST)
    table.find("the Fenchel-Young loss finds more attention than the KL divergence", SET, KL)
    table.find("the Fenchel-Young loss finds more attention than binary cross-entropy", SET, BINARY)
    table.find("keys by the KL divergence copy as well as full attention", KL, FULL, COPIED, margin=1.0)
    table.save(args, "indexer")
    save_figure(draw_figure(table), args, "indexer")
    return table


if __name__ == "__main__":
    main()
