"""
Variable selection by MCMC
==========================

Which 3 of 10 variables drive the progress of diabetes, and how sure can one be? The k-hot vector says which
coefficients are not zero. NUTS moves the coefficients; the 120 ways to choose three are summed out exactly, because a
sampling design knows its support.
"""

import sys

import matplotlib.pyplot as plt
import pyro
import pyro.distributions as dist
import torch
from pyro.infer import MCMC, NUTS
from sklearn.datasets import load_diabetes
from torch import Tensor

from khot import ConditionalPoisson

K = 3
pyro.set_rng_seed(0)

# %%
# Ten variables of 80 patients and the progress of their disease a year later, all standardised.
data = load_diabetes()
z, y = torch.tensor(data.data[:80]), torch.tensor(data.target[:80])
z, y = (z - z.mean(0)) / z.std(0), (y - y.mean()) / y.std()
n = z.shape[-1]
prior = ConditionalPoisson(logits=torch.zeros(n, dtype=z.dtype), k=K)  # all triples are as probable


# %%
# The model reads as if for one triple. Under NUTS the design hands out all of them, and Pyro sums over them.
def outcome(x: Tensor, slopes: Tensor, noise: Tensor) -> dist.Normal:
    """The law of all patients' y, given k-hot vectors ``(..., n)``."""
    return dist.Normal((x * slopes) @ z.T, noise).to_event(1)


def model() -> None:
    x = pyro.sample("x", prior, infer={"enumerate": "parallel"})
    slopes = pyro.sample("slopes", dist.Normal(z.new_zeros(n), 0.3).to_event(1))
    noise = pyro.sample("noise", dist.HalfNormal(z.new_ones(())))
    pyro.sample("y", outcome(x, slopes, noise), obs=y)


mcmc = MCMC(
    NUTS(model, max_plate_nesting=0), num_samples=150, warmup_steps=100, disable_progbar=not sys.stderr.isatty()
)
mcmc.run()
draws = mcmc.get_samples()

# %%
# Each draw of the coefficients says how probable each triple is; their mean is the posterior.
triples = prior.enumerate_support()  # (120, n)
posterior = torch.zeros(len(triples), dtype=z.dtype)
for slopes, noise in zip(draws["slopes"], draws["noise"], strict=True):
    posterior += outcome(triples, slopes, noise).log_prob(y).softmax(0) / len(draws["noise"])

names = data.feature_names
for i in posterior.topk(3).indices:
    chosen = ", ".join(names[j] for j in triples[i].nonzero().flatten())
    print(f"{posterior[i]:.2f}  {chosen}")

# %%
# The probability that a variable is among the three.
figure, axis = plt.subplots(figsize=(6, 3), layout="constrained")
axis.bar(names, (posterior @ triples).numpy(), color="tab:red")
axis.axhline(K / n, color="0.5", linestyle=":", label="before seeing the data")
axis.set(ylabel="inclusion probability", ylim=(0, 1))
axis.legend()
figure.savefig("variable_selection_mcmc.png", dpi=120)
