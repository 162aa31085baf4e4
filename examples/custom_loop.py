"""
A training loop of your own
===========================

At which 6 of 60 possible places should stations be built, so that most customers have one nearby? This is plain PyTorch
without a model: a loss of k-hot vectors, a sampling design, and an estimator that turns both into a number to call
``backward`` on. Trying another estimator takes one line.
"""

import matplotlib.pyplot as plt
import torch
from torch import Tensor

from khot import ConditionalPoisson, reinmax, score_function, straight_through

SITES, CUSTOMERS, K, RADIUS = 60, 300, 6, 0.2
torch.manual_seed(1)
torch.set_num_threads(1)  # threads would cost more than they save on tensors this small

# %%
# Customers live in seven towns of the unit square; stations can be built at 60 places. **Your data goes here:** replace
# `near`, a boolean tensor that says which place is near which customer, and `unserved`, the loss of k-hot vectors.
towns = torch.rand(7, 2)
customers = towns[torch.randint(7, (CUSTOMERS,))] + 0.07 * torch.randn(CUSTOMERS, 2)
sites = torch.rand(SITES, 2)
near = torch.cdist(customers, sites) < RADIUS  # (CUSTOMERS, SITES)


def unserved(x: Tensor) -> Tensor:
    """The share of customers without a station nearby, for k-hot vectors ``(..., SITES)``."""
    return torch.where(near, 1 - x.unsqueeze(-2), 1).prod(-1).mean(-1)


# %%
# The value of a surrogate is the mean loss of its draws, and its gradient estimates that of the expected loss. Prefer
# `reinmax`, which differentiates the loss between k-hot vectors and follows its curvature, or `score_function`, which
# only evaluates the loss and is unbiased. `straight_through` is cheaper: it differentiates, but ignores curvature.
ESTIMATORS = {
    "reinmax": lambda design: reinmax(design, unserved, num_samples=16),
    "score_function": lambda design: score_function(design, unserved, num_samples=16, baseline="leave_one_out"),
    "straight_through": lambda design: straight_through(design, unserved, num_samples=16),
}


def minimise(estimator, steps: int = 200) -> tuple[Tensor, list[float]]:
    logits = torch.zeros(SITES, requires_grad=True)
    optimizer = torch.optim.Adam([logits], lr=0.1)
    curve = []
    for _ in range(steps):
        surrogate = estimator(ConditionalPoisson(logits=logits, k=K))
        optimizer.zero_grad()
        surrogate.backward()
        optimizer.step()
        curve.append(surrogate.item())
    return ConditionalPoisson(logits=logits.detach(), k=K).mode, curve


results, left_out = {}, {}
for name, estimator in ESTIMATORS.items():
    results[name] = chosen, _ = minimise(estimator)
    left_out[name] = unserved(chosen).item()
    print(f"{name}: {left_out[name]:.1%} of the customers have no station nearby")

# %%
# The map shows the stations that `reinmax` chose, and the curves show how the three estimators learn.
figure, (town_map, learning) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
chosen, _ = results["reinmax"]
town_map.scatter(*customers.T, s=2, color="0.6")
town_map.scatter(*sites.T, s=12, facecolor="none", edgecolor="tab:blue")
for place in sites[chosen > 0].tolist():
    town_map.add_patch(plt.Circle(place, RADIUS, color="tab:red", alpha=0.2))
town_map.set(title=f"{K} of {SITES} places", aspect="equal", xticks=[], yticks=[])
for name, (_, curve) in results.items():
    learning.plot(curve, label=name)
learning.set(title="share of customers not served", xlabel="step", ylim=(0, None))
learning.legend()
figure.savefig("custom_loop.png", dpi=120)
