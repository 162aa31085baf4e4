"""
A sparse autoencoder, and what it finds
=======================================

Sparse autoencoders are used to take the activations of a neural network apart. An activation vector has, say, 32
entries, but it may be a mixture of many more *parts*, of which only a few are present at a time. The autoencoder learns
a dictionary of parts, and encodes each vector by the few that it needs.

With real activations nobody knows the true parts. In this tutorial we make the data ourselves, so that we can check
what the autoencoder finds. You will see why a plain autoencoder fails, what a top-k layer changes, how to choose k,
what to do about units that never come to life, and what to do if some inputs need more parts than others.
"""

import matplotlib.pyplot as plt
import torch
from torch import Tensor, nn

from khot.nn import BatchTopK, TopK

PARTS, INPUTS, UNITS, BATCH = 48, 24, 64, 256
torch.manual_seed(0)
torch.set_num_threads(1)  # threads would cost more than they save on tensors this small

# %%
# Data with a secret
# ------------------
#
# There are 48 parts, each a direction in 24 dimensions: twice as many parts as dimensions, so that no change of
# coordinates can separate them. A vector is the sum of 1 to 5 parts, with random positive weights. **Your data goes
# here:** replace ``batch`` with a function that returns rows of your own, such as activations of a language model.
parts = nn.functional.normalize(torch.randn(PARTS, INPUTS), dim=-1)


def batch(rows: int = BATCH) -> tuple[Tensor, Tensor]:
    """Some vectors, and the parts that they contain, which the autoencoder is not told."""
    number = torch.randint(1, 6, (rows, 1))
    present = torch.rand(rows, PARTS).argsort(-1) < number
    weights = present * (0.5 + torch.rand(rows, PARTS))
    return weights @ parts, present


test, test_present = batch(2000)
print(f"{test_present.sum(-1).float().mean():.2f} parts per vector on average")

# %%
# One training loop for all of them
# ---------------------------------
#
# The encoder and the decoder are linear. Between them is an activation function, the only thing that we will change.
# The columns of the decoder are the dictionary. They have unit length, because otherwise long columns could make up for
# small activations.


class Autoencoder(nn.Module):
    def __init__(self, activation: nn.Module) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(INPUTS, UNITS), nn.Linear(UNITS, INPUTS, bias=False)
        self.activation = activation
        nn.utils.parametrizations.weight_norm(self.decoder, dim=1)
        self.decoder.parametrizations.weight.original0.data.fill_(1.0).requires_grad_(False)
        self.encoder.weight.data = self.decoder.weight.data.T.clone()

    def codes(self, x: Tensor) -> Tensor:
        return self.activation(self.encoder(x).relu())

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder(self.codes(x))


def train(model: Autoencoder, extra_loss=None, steps: int = 600) -> Autoencoder:
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, steps)
    for _ in range(steps):
        x, _ = batch()
        reconstruction = model(x)
        loss = (reconstruction - x).square().mean()
        if extra_loss is not None:
            loss = loss + extra_loss(model, x, reconstruction)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    return model.eval()


# %%
# A unit has found a part if its column points in the direction of the part. We measure this by the cosine, and count a
# part as found if the cosine of some unit exceeds 0.9.


@torch.no_grad()
def report(name: str, model: Autoencoder) -> tuple[float, int]:
    error = float((model(test) - test).square().sum() / test.square().sum())
    cosines = parts @ model.decoder.weight  # (PARTS, UNITS)
    found = int((cosines.amax(-1) > 0.9).sum())
    active = (model.codes(test) > 0).float()
    dead = int((active.sum(0) == 0).sum())
    print(
        f"{name}: error {error:.1%}, {found} of {PARTS} parts found,"
        f" {active.sum(-1).mean():.1f} active units per vector, {dead} dead units"
    )
    return error, found


# %%
# Without sparsity there is no reason to find the parts
# -----------------------------------------------------
#
# With 64 units for 24 dimensions, a plain autoencoder reconstructs its inputs perfectly. But any invertible mixture of
# the parts serves that purpose equally well, so the autoencoder finds hardly any of them.
plain = train(Autoencoder(nn.Identity()))
report("plain", plain)

# %%
# Keep the k largest
# ------------------
#
# Now each vector may use only 3 units. Such a layer takes two lines of PyTorch: find the k largest activations, and set
# the others to zero. The gradient flows through those that are kept.


class TopKFromScratch(nn.Module):
    def forward(self, z: Tensor) -> Tensor:
        values, indices = z.topk(3, -1)
        return torch.zeros_like(z).scatter(-1, indices, values)


z = torch.randn(1000, UNITS)
print("the same as khot.nn.TopK:", bool((TopKFromScratch()(z) == TopK(3)(z)).all()))

sparse = train(Autoencoder(TopK(3)))
report("k = 3", sparse)

# %%
# The dictionary now consists of parts. The picture shows the cosine between each part (a row) and each unit (a column).
# The units are sorted by the part that they resemble most, so parts that have been found form a diagonal.


@torch.no_grad()
def show_cosines(axis: plt.Axes, title: str, model: Autoencoder) -> None:
    cosines = parts @ model.decoder.weight
    axis.imshow(cosines[:, cosines.argmax(0).argsort()], cmap="RdBu_r", vmin=-1, vmax=1)
    axis.set(title=title, xlabel="unit", ylabel="part")


figure, axes = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
show_cosines(axes[0], "plain", plain)
show_cosines(axes[1], "k = 3", sparse)

# %%
# How to choose k
# ---------------
#
# Nobody tells us how many parts a vector has. Train with several k, and look at the error. It falls steeply as long as
# each additional unit adds a true part, and slowly once more units only fill in details. Far beyond the bend, the units
# drift away from the parts again, as in the plain autoencoder. We can count the parts only because we made the data;
# the error is what you will see with your own.
sizes = (1, 2, 3, 5, 10)
errors, numbers = zip(*(report(f"k = {size}", train(Autoencoder(TopK(size)))) for size in sizes), strict=True)
figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3), layout="constrained")
left.plot(sizes, errors, "o-")
left.set(title="relative error", xlabel="k", ylim=(0, None))
right.plot(sizes, numbers, "o-", color="tab:red")
right.set(title=f"parts found, of {PARTS}", xlabel="k", ylim=(0, PARTS + 2))

# %%
# Dead units
# ----------
#
# Some units above are dead: no test vector uses them. A unit that is never among the k largest gets no gradient, and
# stays dead. In large dictionaries this can happen to most units.
#
# If you give ``TopK`` the number of units, it counts for how many rows each unit has not been kept. ``auxiliary_loss``
# then lets the dead units explain what the others leave over. The weight of this loss is that of Gao et al. (2024),
# 1/32. In our small problem there are 16 more units than parts, so the revived ones find nothing more to do: compare
# the report with that of k = 3 above.


def revive(model: Autoencoder, x: Tensor, reconstruction: Tensor) -> Tensor:
    residual = (x - reconstruction).detach()
    scores = model.encoder(x).relu()
    return model.activation.auxiliary_loss(scores, lambda codes: (model.decoder(codes) - residual).square().mean()) / 32


report("k = 3, dead units revived", train(Autoencoder(TopK(3, n=UNITS, dead_after=10 * BATCH)), revive))

# %%
# Vectors of different complexity
# -------------------------------
#
# Our vectors have 1 to 5 parts, but every code has 3 units: too many for some, too few for others. ``BatchTopK`` keeps
# the 3 · 256 largest activations *of the batch*, so that a vector of five parts may have five units and a vector of one
# part makes do with one. In evaluation mode a threshold, learned during training, replaces the comparison within the
# batch. Then each vector is encoded on its own.
flexible = train(Autoencoder(BatchTopK(3)))
report("BatchTopK", flexible)

figure, axes = plt.subplots(1, 2, figsize=(9, 3), layout="constrained", sharey=True)
for axis, (name, model) in zip(axes, {"TopK": sparse, "BatchTopK": flexible}.items(), strict=True):
    with torch.no_grad():
        active = (model.codes(test) > 0).sum(-1)
    for true_number in range(1, 6):
        chosen = active[test_present.sum(-1) == true_number].float()
        axis.errorbar(true_number, chosen.mean(), chosen.std(), fmt="o", color="tab:blue")
    axis.plot([1, 5], [1, 5], color="0.5", linestyle=":")
    axis.set(title=name, xlabel="true parts of a vector", ylabel="active units, mean ± sd")

# %%
# With ``BatchTopK`` the codes have about as many units as the vectors have parts, and the error is a little smaller. In
# this short training it has found fewer of the parts, as the reports show: neither layer is best in every respect.
#
# To use the trained autoencoder elsewhere, replace the layer with a plain threshold, ``JumpReLU``. It computes the same
# codes, and depends on nothing but its input.
exported = flexible.activation.to_jumprelu()
with torch.no_grad():
    scores = flexible.encoder(test).relu()
    print(exported, "computes the same codes:", torch.equal(exported(scores), flexible.activation(scores)))

# %%
# What to try
# -----------
#
# * Give the data more parts than there are units. Which parts are found: those with large weights, or the frequent
#   ones?
# * Some parts often occur together in practice. Draw ``present`` so that part 1 never comes without part 0. Does the
#   autoencoder still keep them apart?
# * A Matryoshka autoencoder also reconstructs from only its first 16 and only its first 32 units. The recipes for
#   PyTorch in the guide show its loss, which takes one line.
