"""
A variational autoencoder with k-hot codes
==========================================

The code of an image has 8 active units out of 48. It is discrete, has a fixed size, and says which parts the image is
made of. A one-hot code of 48 units has 48 values; this code has C(48, 8) = 377 million.
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
# The data are scans of digits, whose pixels are counts from 0 to 16. **Your data goes here:** replace `images`, a float
# tensor (images, pixels), and the likelihood of `model` if your pixels are not counts.
images = torch.tensor(load_digits().data, dtype=torch.float32)
images = images[torch.randperm(len(images))]
train, test = images[:1500], images[1500:]


# %%
# For every image, the encoder computes the logits of a sampling design, and the decoder computes those of the pixels.
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
# Stochastic variational inference works as with any other latent variable. `ReinMax` is the recommended estimator,
# because it follows the curvature of the decoder. `StraightThrough` takes two thirds of the time and ends 7 nats
# higher.
svi = SVI(model, guide, pyro.optim.Adam({"lr": 0.003}), TraceMeanField_ELBO())
losses = []
for epoch in range(1, 61):
    batches = train[torch.randperm(len(train))].split(125)
    losses.append(sum(svi.step(batch) for batch in batches) / len(train))
    if epoch % 10 == 0:
        print(f"epoch {epoch}: negative ELBO of a training image {losses[-1]:.1f} nats")
print(f"negative ELBO of a test image: {svi.evaluate_loss(test) / len(test):.1f} nats")

# %%
# The first row shows test images, and the second row what the decoder reconstructs from their codes. The images of the
# third row are decoded from random codes.
with torch.no_grad():
    codes = ConditionalPoisson(logits=encoder(test[:10] / GREYS), k=K).mode
    random_codes = ConditionalPoisson(logits=torch.zeros(10, UNITS), k=K).sample()
    rows = test[:10] / GREYS, decoder(codes).sigmoid(), decoder(random_codes).sigmoid()

figure, axes = plt.subplots(3, 10, figsize=(10, 3.2), layout="constrained")
for axis, image in zip(axes.flat, torch.cat(rows), strict=True):
    axis.imshow(image.reshape(8, 8).numpy(), cmap="gray_r", vmin=0, vmax=1)
    axis.set(xticks=[], yticks=[])
figure.savefig("khot_vae.png", dpi=120)
