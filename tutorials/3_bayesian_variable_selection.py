"""
Bayesian variable selection, three ways
=======================================

Which 3 of 12 variables explain an outcome? A stepwise search or the lasso answers with one set. But if two variables
carry nearly the same information, the data cannot tell which of them matters, and an honest answer says so. Bayesian
variable selection answers with a probability for every set.

In this tutorial you write the model in Pyro, with a k-hot latent variable that says which variables are in. Then you
compute its posterior in three ways: exactly, by a variational guide, and by Markov chains. The problem is small enough
to compare all three. At the end, the number of variables is unknown as well.
"""

import matplotlib.pyplot as plt
import pyro
import pyro.distributions as dist
import torch
from pyro.infer import MCMC, SVI, TraceMeanField_ELBO
from torch import Tensor

from khot import AutoKHot, ConditionalPoisson, KHotSwap

ROWS, VARIABLES, K = 40, 12, 3
pyro.set_rng_seed(2)
torch.set_default_dtype(torch.float64)
torch.set_num_threads(1)  # threads would cost more than they save on tensors this small

# %%
# The data
# --------
#
# The outcome depends on the variables 0, 4 and 9. Variable 1 is a near copy of variable 0, and variable 5 of
# variable 4: their correlations are about 0.95. **Your data goes here:** replace ``z``, the standardised variables
# (rows, variables), and ``y``, the outcome.
z = torch.randn(ROWS, VARIABLES)
for copy, original in ((1, 0), (5, 4)):
    z[:, copy] = 0.95 * z[:, original] + 0.31 * torch.randn(ROWS)
z = (z - z.mean(0)) / z.std(0)
y = 0.6 * (z[:, 0] - z[:, 4] + z[:, 9]) + torch.randn(ROWS)
y = y - y.mean()

# %%
# The model
# ---------
#
# Before we see the data, all C(12, 3) = 220 sets of three variables are equally probable. This is the uniform
# distribution over k-hot vectors, ``ConditionalPoisson`` with equal logits. Given the set, the outcome is a linear
# regression with normal coefficients.
#
# We do not need the coefficients, so we integrate them out analytically: given x, the outcome is normal with
# covariance :math:`s^2 Z \operatorname{diag}(x) Z^\top + \sigma^2 I`. The vector x enters linearly. This matters below,
# because two of the three methods follow the slope of the likelihood in x.
SLAB, NOISE = 0.7, 1.0


def outcome(x: Tensor) -> dist.MultivariateNormal:
    """The distribution of y for k-hot vectors ``(..., VARIABLES)``."""
    covariance = SLAB**2 * (z * x.unsqueeze(-2)) @ z.mT + NOISE**2 * torch.eye(ROWS)
    return dist.MultivariateNormal(torch.zeros(ROWS), covariance)


def model() -> None:
    x = pyro.sample("x", ConditionalPoisson(logits=torch.zeros(VARIABLES), k=K))
    pyro.sample("y", outcome(x), obs=y)


# %%
# First way: all sets
# -------------------
#
# With 220 sets we can apply Bayes' rule to each. ``enumerate_support`` lists them.
prior = ConditionalPoisson(logits=torch.zeros(VARIABLES), k=K)
sets = prior.enumerate_support()  # (220, 12)
log_joint = prior.log_prob(sets) + outcome(sets).log_prob(y)
log_evidence = log_joint.logsumexp(0)
posterior = (log_joint - log_evidence).exp()

best = posterior.topk(6)
for probability, x in zip(best.values, sets[best.indices], strict=True):
    print(f"{probability:.2f}  {x.nonzero().flatten().tolist()}")

# %%
# No set is certain. The *inclusion probabilities* summarise the answer: the probability that a variable is in the set.
# The *pair probabilities* show more. A variable and its copy share the credit, and are hardly ever in the set together.
inclusion = posterior @ sets
pairs = torch.einsum("s,si,sj->ij", posterior, sets, sets)
for i, j in ((0, 1), (4, 5)):
    print(f"P({i} in) = {inclusion[i]:.2f}, P({j} in) = {inclusion[j]:.2f}, P(both in) = {pairs[i, j]:.2f}")

# %%
# Second way: a variational guide
# -------------------------------
#
# With 100 variables there are too many sets to list. Variational inference instead searches, within a family of
# distributions, for the one nearest to the posterior. ``AutoKHot`` uses the family of conditional Poisson designs, with
# one logit for each variable. It maximises the ELBO, a lower bound on the logarithm of the evidence.
guide = AutoKHot(model)
svi = SVI(model, guide, pyro.optim.Adam({"lr": 0.05}), TraceMeanField_ELBO())
elbo = [-svi.step() for _ in range(400)]
learned = guide.designs()["x"]
print(f"log evidence {log_evidence:.2f}, ELBO of the last 100 steps {sum(elbo[-100:]) / 100:.2f}")

# %%
# The gap between the two is the price of the family. It has one parameter for each variable, and cannot say "one of
# these two, and one of those two". If it gave all four the same probability, a third of its draws would contain a
# variable together with its copy. The ELBO penalises such draws heavily, so the guide instead commits to one variable
# of each pair, and is overconfident about it:
for name, values in {"exactly": inclusion, "by the guide": learned.mean.detach()}.items():
    print(f"P(in) of the variables 0, 1, 4, 5 {name}: {[round(v, 2) for v in values[[0, 1, 4, 5]].tolist()]}")

# %%
# Third way: chains of swaps
# --------------------------
#
# ``KHotSwap`` walks from set to set. Each step proposes to exchange one variable that is in for one that is out,
# with a preference for exchanges that promise a larger posterior. It accepts or rejects the proposal so that the
# visited sets are draws from the exact posterior. Eight chains run side by side from random starts. If they agree,
# ``r_hat`` is close to 1.
mcmc = MCMC(KHotSwap(model, chains=8, swaps_per_step=5), num_samples=200, warmup_steps=50, disable_progbar=True)
mcmc.run()
draws = mcmc.get_samples()["x"]  # (8 * 200, 12)
print(f"largest r_hat: {mcmc.diagnostics()['x']['r_hat'].nan_to_num(1.0).max():.3f}")

figure, axis = plt.subplots(figsize=(10, 3.2), layout="constrained")
places = torch.arange(VARIABLES)
answers = {
    "exact": (inclusion, "0.4"),
    "AutoKHot": (learned.mean.detach(), "tab:blue"),
    "KHotSwap": (draws.mean(0), "tab:red"),
}
for shift, (name, (values, color)) in zip((-0.27, 0, 0.27), answers.items(), strict=True):
    axis.bar(places + shift, values, 0.25, color=color, label=name)
axis.axhline(K / VARIABLES, color="0.7", linestyle=":", label="before seeing the data")
axis.set(title="inclusion probabilities", xlabel="variable", xticks=places)
axis.legend()

# %%
# Which way should you choose? List all sets if there are at most about a million of them. Take the guide if you want a
# quick answer, or one k-hot vector for each row of the data, computed by a network. Take the chains if dependences
# between variables matter.
#
# How many variables?
# -------------------
#
# So far we have assumed that exactly three variables matter. Now we let the size vary from 0 to 6, and all sizes are
# equally probable a priori. ``ConditionalPoisson`` accepts a range of sizes with the logarithms of their prior
# probabilities, and ``KHotSwap`` then also adds and removes single variables.
log_prior = torch.full((7,), 1 / 7).log()


def model_of_any_size() -> None:
    x = pyro.sample("x", ConditionalPoisson(logits=torch.zeros(VARIABLES), k=(0, 6, log_prior)))
    pyro.sample("y", outcome(x), obs=y)


mcmc = MCMC(
    KHotSwap(model_of_any_size, chains=8, swaps_per_step=5), num_samples=200, warmup_steps=50, disable_progbar=True
)
mcmc.run()
any_size = mcmc.get_samples()["x"]
share = any_size.sum(-1).long().bincount(minlength=7) / len(any_size)

flexible_prior = ConditionalPoisson(logits=torch.zeros(VARIABLES), k=(0, 6, log_prior))
all_sets = flexible_prior.enumerate_support()
log_joint = flexible_prior.log_prob(all_sets) + outcome(all_sets).log_prob(y)
weights = log_joint.softmax(0)
exact_share = torch.zeros(7).index_add(0, all_sets.sum(-1).long(), weights)

figure, axis = plt.subplots(figsize=(6, 2.8), layout="constrained")
axis.bar(torch.arange(7) - 0.2, exact_share, 0.38, color="0.4", label="exact")
axis.bar(torch.arange(7) + 0.2, share, 0.38, color="tab:red", label="KHotSwap")
axis.set(title="posterior probability of each size", xlabel="number of variables")
axis.legend()

# %%
# Larger sets fit better, yet the posterior does not simply prefer the largest size. Because the coefficients are
# integrated out, every variable has a price: a useless one spreads the probability of y over outcomes that did not
# occur.
#
# What to try
# -----------
#
# * Use 400 rows instead of 40. How much data does it take to tell variable 0 from its near copy?
# * ``NOISE`` is given here. Make it a site with a prior, and pass ``continuous=`` to ``KHotSwap``, so that NUTS samples
#   it. The example on variable selection by MCMC does this with real data.
# * Write the covariance as ``A @ A.mT`` with ``A = z * x``, which is the same for k-hot x. The chains stay exact, but
#   the guide gets worse. The page on pitfalls explains why.
torch.set_default_dtype(torch.float32)
