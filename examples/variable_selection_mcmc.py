"""
Variable selection by MCMC
==========================

Which 4 of 55 terms explain the progression of diabetes, and how sure can we be? The terms are ten variables and their
45 products, and there are 341,055 ways to choose four. ``KHotSwap`` explores them by exchanging two terms at a time,
while NUTS samples the noise.
"""

import sys
from itertools import combinations

import matplotlib.pyplot as plt
import pyro
import pyro.distributions as dist
import torch
from pyro.infer import MCMC, NUTS
from sklearn.datasets import load_diabetes

from khot import ConditionalPoisson, KHotSwap

K, SLAB = 4, 0.3
pyro.set_rng_seed(0)
torch.set_num_threads(1)  # threads would cost more than they save on tensors this small

# %%
# The data are ten variables of 80 patients, their products, and the progression of the disease a year later, all
# standardised. **Your data goes here:** replace `z`, a tensor (rows, terms), `names`, the names of the terms, and `y`,
# a tensor (rows,).
data = load_diabetes()
z, y = torch.tensor(data.data[:80]), torch.tensor(data.target[:80])
pairs = list(combinations(range(10), 2))
names = [*data.feature_names, *(f"{data.feature_names[i]} · {data.feature_names[j]}" for i, j in pairs)]
z = (z - z.mean(0)) / z.std(0)
z = torch.cat([z, torch.stack([z[:, i] * z[:, j] for i, j in pairs], 1)], 1)
z, y = (z - z.mean(0)) / z.std(0), (y - y.mean()) / y.std()


# %%
# The coefficients, Normal(0, SLAB), are integrated out. x enters the covariance linearly, which makes the proposals of
# swaps accurate.
def model() -> None:
    x = pyro.sample("x", ConditionalPoisson(logits=z.new_zeros(len(names)), k=K))  # all choices are equally probable
    noise = pyro.sample("noise", dist.HalfNormal(z.new_ones(())))
    covariance = SLAB**2 * (z * x) @ z.T + noise**2 * torch.eye(len(y), dtype=y.dtype)
    pyro.sample("y", dist.MultivariateNormal(torch.zeros_like(y), covariance), obs=y)


# %%
# A step consists of some swaps and one step of NUTS. Two chains start at random choices, and should agree in the end.
def run_chain() -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    kernel = KHotSwap(model, continuous=lambda given: NUTS(given, max_tree_depth=2), swaps_per_step=4)
    mcmc = MCMC(kernel, num_samples=150, warmup_steps=50, disable_progbar=not sys.stderr.isatty())
    mcmc.run()
    print("a chain has finished")
    return mcmc.get_samples(), mcmc.diagnostics()["acceptance rate of swaps"]


chains = [run_chain() for _ in range(2)]
inclusion = torch.stack([draws["x"].mean(0) for draws, _ in chains])  # (chain, term)
for (draws, acceptance), mean in zip(chains, inclusion, strict=True):
    likeliest = ", ".join(f"{names[i]} {mean[i]:.2f}" for i in mean.topk(4).indices.tolist())
    print(f"{likeliest}; noise {draws['noise'].mean():.2f}; swaps accepted {acceptance}")

# %%
# The figure shows the probability that a term is among the four.
shown = inclusion.mean(0).topk(12).indices
figure, axis = plt.subplots(figsize=(8, 3.4), layout="constrained")
for chain, mean in enumerate(inclusion):
    axis.bar(torch.arange(12) + 0.4 * chain - 0.2, mean[shown].numpy(), 0.38, label=f"chain {chain + 1}")
axis.axhline(K / len(names), color="0.5", linestyle=":", label="before seeing the data")
axis.set_xticks(range(12), [names[i] for i in shown.tolist()], rotation=45, ha="right")
axis.set(ylabel="inclusion probability", ylim=(0, 1))
axis.legend()
figure.savefig("variable_selection_mcmc.png", dpi=120)
