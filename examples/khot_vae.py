"""
A variational autoencoder with k-hot codes
==========================================

Each image gets a code of 8 active units out of 48: discrete, of fixed size, and readable as "which parts is it made
of". One-hot codes have 48 values, these C(48, 8) = 377 million.
"""

import matplotlib.pyplot as plt
import pyro
import pyro.distributions as dist
import torch
from pyro.infer import SVI, TraceMeanField_ELBO
from sklearn.datasets import load_digits
from torch import Tensor, nn

from khot import ConditionalPoisson, ReinMax

PIXELS, GREYS, UNITS, K = 64, 16, 48, 8
pyro.set_rng_seed(0)
torch.set_num_threads(1)  # threads would cost more than they save on tensors this small

# %%
# Scans of digits, each pixel a count of 0 to 16.
images = torch.tensor(load_digits().data, dtype=torch.float32)
images = images[torch.randperm(len(images))]
train, test = images[:1500], images[1500:]


# %%
# The encoder gives the logits of a sampling design for every image, the decoder those of the pixels.
def perceptron(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(inputs, 128), nn.ReLU(), nn.Linear(128, outputs))


encoder, decoder = perceptron(PIXELS, UNITS), perceptron(UNITS, PIXELS)


def model(batch: Tensor) -> None:
    pyro.module("decoder", decoder)
    with pyro.plate("images", len(batch)):
        code = pyro.sample("code", ConditionalPoisson(logits=torch.zeros(UNITS), k=K))
        pixels = dist.Binomial(total_count=GREYS, logits=decoder(code)).to_event(1)
        pyro.sample("pixels", pixels, obs=batch)


def guide(batch: Tensor) -> None:
    pyro.module("encoder", encoder)
    with pyro.plate("images", len(batch)):
        pyro.sample("code", ReinMax(ConditionalPoisson(logits=encoder(batch / GREYS), k=K)))


# %%
# Stochastic variational inference, as with any other latent variable. `ReinMax` is the recommended estimator: it
# follows the curvature of the decoder. `StraightThrough` takes two thirds of the time and ends 7 nats higher.
svi = SVI(model, guide, pyro.optim.Adam({"lr": 0.003}), TraceMeanField_ELBO())
losses = []
for _ in range(60):
    batches = train[torch.randperm(len(train))].split(125)
    losses.append(sum(svi.step(batch) for batch in batches) / len(train))
print(f"negative ELBO of a test image: {svi.evaluate_loss(test) / len(test):.1f} nats")

# %%
# Above: test images. Middle: what is left of them after their code. Below: images that the decoder makes of codes drawn
# at random, eight units of 48.
with torch.no_grad():
    codes = ConditionalPoisson(logits=encoder(test[:10] / GREYS), k=K).mode
    random_codes = ConditionalPoisson(logits=torch.zeros(10, UNITS), k=K).sample()
    rows = test[:10] / GREYS, decoder(codes).sigmoid(), decoder(random_codes).sigmoid()

figure, axes = plt.subplots(3, 10, figsize=(10, 3.2), layout="constrained")
for axis, image in zip(axes.flat, torch.cat(rows), strict=True):
    axis.imshow(image.reshape(8, 8).numpy(), cmap="gray_r", vmin=0, vmax=1)
    axis.set(xticks=[], yticks=[])
figure.savefig("khot_vae.png", dpi=120)
