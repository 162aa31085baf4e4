"""
Feature selection in Pyro
=========================

Which 10 of 64 pixels tell handwritten digits apart? A k-hot latent variable masks the image. Stochastic variational
inference learns its posterior, together with the network that reads the remaining pixels.
"""

import matplotlib.pyplot as plt
import pyro
import pyro.distributions as dist
import torch
from pyro.infer import SVI, TraceMeanField_ELBO
from sklearn.datasets import load_digits
from torch import nn

from khot import ConditionalPoisson, ReinMax

PIXELS, K = 64, 10
pyro.set_rng_seed(0)
torch.set_num_threads(1)  # threads would cost more than they save on tensors this small

# %%
# The data are 1797 scans of 8 x 8 pixels, of which a third is held out for the test. They are centred, so that a masked
# pixel looks average. **Your data goes here:** replace `images`, a float tensor (rows, features), and `labels`, a
# tensor of class numbers.
images, labels = map(torch.tensor, load_digits(return_X_y=True))
images = images.float() / 16
images = images - images.mean(0)
order = torch.randperm(len(images))
train, test = order[:1200], order[1200:]

classifier = nn.Sequential(nn.Linear(PIXELS, 128), nn.ReLU(), nn.Linear(128, 10))


# %%
# The model draws a mask, under which all C(64, 10) sets of pixels are equally probable, and classifies the pixels that
# it keeps. The guide is the same design with its own logits. Among all distributions over sets of ten pixels with given
# inclusion probabilities, it has the largest entropy. `ReinMax`, the recommended estimator, carries gradients through
# its draws and follows the curvature of the classifier's loss; `StraightThrough` is cheaper and ignores curvature.
def model() -> None:
    pyro.module("classifier", classifier)
    mask = pyro.sample("mask", ConditionalPoisson(logits=torch.zeros(PIXELS), k=K))
    with pyro.plate("images", len(train), subsample_size=128) as batch:
        logits = classifier(images[train[batch]] * mask)
        pyro.sample("label", dist.Categorical(logits=logits), obs=labels[train[batch]])


def guide() -> None:
    logits = pyro.param("logits", torch.zeros(PIXELS))
    pyro.sample("mask", ReinMax(ConditionalPoisson(logits=logits, k=K)))


# %%
# The KL divergence between guide and prior is known in closed form, and `TraceMeanField_ELBO` uses it.
optimizer = pyro.optim.Adam(lambda name: {"lr": 0.05 if name == "logits" else 0.005})
svi = SVI(model, guide, optimizer, TraceMeanField_ELBO())
losses = []
for step in range(1, 1001):
    losses.append(svi.step() / len(train))
    if step % 200 == 0:
        print(f"step {step}: negative ELBO per image {losses[-1]:.2f}")

# %%
# The pixels with the largest inclusion probabilities are the ones to look at.
posterior = ConditionalPoisson(logits=pyro.param("logits").detach(), k=K)
right = classifier(images[test] * posterior.mode).argmax(-1) == labels[test]
accuracy = right.float().mean().item()
print(f"{accuracy:.1%} of the test images are recognised from {K} of {PIXELS} pixels")

figure, (left, middle, end) = plt.subplots(1, 3, figsize=(10, 3), layout="constrained")
left.plot(losses, linewidth=0.5)
left.set(title="negative ELBO per image", xlabel="step")
middle.imshow(posterior.mean.reshape(8, 8).numpy(), vmin=0, vmax=1, cmap="Reds")
middle.set(title="inclusion probabilities", xticks=[], yticks=[])
seen = torch.where(posterior.mode > 0, images[test[0]], torch.nan)
end.imshow(seen.reshape(8, 8).numpy(), cmap="gray_r")
end.set(title=f"a {labels[test[0]]}, as it is read", xticks=[], yticks=[])
figure.savefig("pyro_feature_selector.png", dpi=120)
