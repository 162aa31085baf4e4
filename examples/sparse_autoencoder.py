"""
A sparse autoencoder
====================

The autoencoder learns a dictionary of 64 parts. An image uses 8 parts on average: easy images use fewer, difficult
images more. During training ``BatchTopK`` keeps the largest activations of the whole batch. Afterwards a threshold
replaces it, so that each image is encoded on its own.
"""

import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

from khot.nn import BatchTopK

PIXELS, UNITS, K = 64, 64, 8
torch.manual_seed(0)
torch.set_num_threads(1)  # threads would cost more than they save on tensors this small

# %%
# The data are centred scans of digits. **Your data goes here:** replace `images`, a float tensor (rows, inputs), such
# as the activations of a language model.
images = torch.tensor(load_digits().data, dtype=torch.float32) / 16
images = (images - images.mean(0))[torch.randperm(len(images))]
train, test = images[:1500], images[1500:]

# %%
# Encoder and decoder are linear; the only nonlinearity between them is the choice of the k largest activations.
encoder, decoder = nn.Linear(PIXELS, UNITS), nn.Linear(UNITS, PIXELS)
topk = BatchTopK(K, n=UNITS, dead_after=50)
parameters = [*encoder.parameters(), *decoder.parameters()]
optimizer = torch.optim.Adam(parameters, lr=3e-3)
steps = 1500
schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, steps)  # lets the threshold settle


def loss(batch: Tensor) -> Tensor:
    activations = encoder(batch).relu()
    residual = batch - decoder(topk(activations))
    # Units that no image has used for 50 batches learn to explain the residual of the others.
    revive = topk.auxiliary_loss(activations, lambda z: (decoder(z) - residual.detach()).square().mean())
    return residual.square().mean() + revive / 32


for step in range(1, steps + 1):
    optimizer.zero_grad()
    error = loss(train[torch.randint(len(train), (128,))])
    error.backward()
    optimizer.step()
    schedule.step()
    if step % 300 == 0:
        print(f"step {step}: loss {error.item():.4f}")

# %%
# In evaluation the module is a JumpReLU, which keeps the activations above the threshold. These are 8 units of a
# training image on average, and a few more of other images, to which the encoder was not fitted.
autoencoder = nn.Sequential(encoder, nn.ReLU(), topk.to_jumprelu(), decoder)
with torch.no_grad():
    codes = autoencoder[:-1](test)
    explained = 1 - (decoder(codes) - test).square().sum() / test.square().sum()
active = (codes > 0).sum(-1).float()
print(f"{active.mean():.1f} of {UNITS} units per test image explain {explained:.1%} of the variance")

# %%
# The figure shows the parts that the test images use most, and how many parts an image uses.
often = (codes > 0).sum(0).topk(32).indices
figure, (parts, sizes) = plt.subplots(1, 2, figsize=(10, 3.4), layout="constrained", width_ratios=(2, 1))
tiles = decoder.weight.detach().T[often].reshape(4, 8, 8, 8)
parts.imshow(tiles.permute(0, 2, 1, 3).reshape(32, 64).numpy(), cmap="RdBu_r", vmin=-0.5, vmax=0.5)
parts.set(title="parts", xticks=[], yticks=[])
sizes.hist(active, bins=range(20), color="tab:red")
sizes.axvline(K, color="0.3", linestyle=":")
sizes.set(title="active units of an image", xlabel=f"(k = {K})")
figure.savefig("sparse_autoencoder.png", dpi=120)
