"""
Differentiable sampling in your own training loop
=================================================

You have a loss that depends on a *choice*, and want to find a good choice by gradient descent. This tutorial adds
random choices to an ordinary PyTorch loop. You need neither a probabilistic model nor any knowledge of Pyro. You will
write the loop, look inside one step of it, measure which gradient estimator suits your loss, and handle a loss that has
no derivative.

The problem: at which 6 of 49 places of a square field should we put thermometers, so that the temperature of the whole
field is known best? There are 14 million possible answers.
"""

import matplotlib.pyplot as plt
import torch
from torch import Tensor

from khot import (
    ConditionalPoisson,
    compare_estimators,
    reinmax,
    score_function,
    sigmoid_topk,
    straight_through,
    topk_mask,
)

SIDE, K, NOISE = 7, 6, 0.1
torch.manual_seed(0)
torch.set_default_dtype(torch.float64)
torch.set_num_threads(1)  # threads would cost more than they save on tensors this small

# %%
# The loss
# --------
#
# Temperatures at nearby places are similar; their covariance falls with the distance. The sun makes one corner of the
# field vary more than the others. If there are thermometers at the places with x = 1, the variance that remains at
# every place is the diagonal of
#
# .. math:: \bigl(C^{-1} + \operatorname{diag}(x) / \sigma^2\bigr)^{-1}
#
# Our loss is the mean of this diagonal. **Your data goes here:** replace ``loss`` with a function that maps k-hot
# vectors ``(..., n)`` to losses ``(...)``.
grid = torch.linspace(0, 1, SIDE)
places = torch.cartesian_prod(grid, grid)  # (49, 2)
n = len(places)
amplitude = 0.5 + places.sum(-1)
covariance = amplitude[:, None] * amplitude * torch.exp(-(torch.cdist(places, places) ** 2) / (2 * 0.3**2))
precision = torch.linalg.inv(covariance + 1e-3 * torch.eye(n))


def variances(x: Tensor) -> Tensor:
    return torch.linalg.inv(precision + torch.diag_embed(x / NOISE**2)).diagonal(dim1=-2, dim2=-1)


def loss(x: Tensor) -> Tensor:
    return variances(x).mean(-1)


random_choices = ConditionalPoisson(logits=torch.zeros(n), k=K).sample((1000,))
by_chance = loss(random_choices)
print(f"no thermometer: {loss(torch.zeros(n)):.3f}; random places: {by_chance.mean():.3f} ± {by_chance.std():.3f}")

# %%
# Why not just relax?
# -------------------
#
# There is a tempting shortcut: let x be a soft mask, minimise the loss of the mask, and round at the end.
mask_scores = torch.zeros(n, requires_grad=True)
optimizer = torch.optim.Adam([mask_scores], lr=0.1)
for _ in range(200):
    optimizer.zero_grad()
    relaxed_loss = loss(sigmoid_topk(mask_scores, K))
    relaxed_loss.backward()
    optimizer.step()
rounded = topk_mask(mask_scores.detach(), K)
print(f"loss of the soft mask {relaxed_loss:.3f}, after rounding {loss(rounded):.3f}")

# %%
# The soft mask has found a loophole. According to our formula, a tenth of a thermometer measures with ten times the
# variance, which is still quite good. So it puts a little of a thermometer everywhere, and its loss is far below that
# of any real choice. The rounded mask is no better than a random choice.
#
# One step of the loop
# --------------------
#
# The loss should therefore see only real choices. We draw them from a *design*, a distribution over k-hot vectors, and
# make its **expected** loss small. A step consists of four lines:
#
# 1. Construct the design from the scores. This is cheap; do it again in each step.
# 2. Call an estimator. It draws, evaluates the loss, and returns one number, the *surrogate*.
# 3. Call ``backward`` on the surrogate. Its value is the mean loss of the draws, and its gradient is an estimate of the
#    gradient of the expected loss.
# 4. Let the optimiser move the scores.
#
# Our estimator is ``score_function``. It raises the probability of the choices whose loss is lower than that of the
# other draws, and looks at nothing else.
logits = torch.zeros(n, requires_grad=True)
design = ConditionalPoisson(logits=logits, k=K)
surrogate = score_function(design, loss, num_samples=64, baseline="leave_one_out")
surrogate.backward()
print(f"mean loss of 64 draws: {surrogate.item():.3f}")
print(f"the gradient favours place {int(logits.grad.argmin())}, at {places[logits.grad.argmin()].tolist()}")

# %%
# The whole loop
# --------------
#
# The design begins with all choices equally probable. We record the loss, and the entropy of the design, which measures
# how undecided it still is. When the entropy is near zero, almost all draws are the same choice, and further steps
# change little.


def minimise(estimator, steps: int = 100, lr: float = 0.2) -> dict:
    logits = torch.zeros(n, requires_grad=True)
    optimizer = torch.optim.Adam([logits], lr=lr)
    losses, entropies = [], []
    for _ in range(steps):
        design = ConditionalPoisson(logits=logits, k=K)
        surrogate = estimator(design)
        optimizer.zero_grad()
        surrogate.backward()
        losses.append(surrogate.item())
        entropies.append(design.entropy().item())
        optimizer.step()
    return {"losses": losses, "entropies": entropies, "design": ConditionalPoisson(logits=logits.detach(), k=K)}


result = minimise(lambda design: score_function(design, loss, num_samples=64, baseline="leave_one_out"))
chosen = result["design"].mode
print(f"loss of the chosen places: {loss(chosen):.3f}")

# %%
# A greedy search, which adds the best place six times, is a strong competitor for this kind of problem:
greedy = torch.zeros(n)
for _ in range(K):
    candidates = (greedy + torch.eye(n)).clamp(max=1)
    greedy = candidates[loss(candidates).argmin()]
print(f"loss of the greedy choice: {loss(greedy):.3f}")

figure, (left, middle, right) = plt.subplots(1, 3, figsize=(12, 3.2), layout="constrained")
shown = left.imshow(variances(chosen).sqrt().reshape(SIDE, SIDE), cmap="viridis")
rows, columns = (chosen.reshape(SIDE, SIDE) > 0).nonzero(as_tuple=True)
left.scatter(columns, rows, color="tab:red", label="chosen")
left.set(title="uncertainty that remains, degrees", xticks=[], yticks=[])
left.legend(loc="lower left")
figure.colorbar(shown)
middle.plot(result["losses"], linewidth=0.8)
middle.axhline(loss(greedy), color="0.5", linestyle=":", label="greedy")
middle.set(title="mean loss of the draws", xlabel="step", ylim=(0, None))
middle.legend()
right.plot(result["entropies"])
right.set(title="entropy of the design, nats", xlabel="step", ylim=(0, None))

# %%
# Which estimator?
# ----------------
#
# khot has other estimators. ``straight_through`` and ``reinmax`` also use the derivative of the loss, which makes them
# much less noisy for many losses. But the derivative describes the loss *between* the k-hot vectors, where our loss has
# a loophole. Do not guess: measure. ``compare_estimators`` repeats each estimate, and reports its bias and variance. It
# needs the exact gradient. Because we cannot sum over 14 million choices, we take the estimate from 4096 draws.
logits = torch.zeros(n, requires_grad=True)
start = ConditionalPoisson(logits=logits, k=K)
many_draws = score_function(start, loss, num_samples=4096, baseline="leave_one_out")
(reference,) = torch.autograd.grad(many_draws, logits)
print(f"norm of the gradient: {reference.norm():.3f}")
comparison = compare_estimators(start, loss, num_samples=8, num_repeats=50, exact=reference)
print(comparison)

# %%
# The bias of the two pathwise estimators is many times as large as the gradient itself. Their direction is not bad
# (``cosine``), so training with them works to some extent, but it ends at worse choices. Draws are random, so we train
# twice with each estimator.
estimators = {
    "score_function": lambda design: score_function(design, loss, num_samples=64, baseline="leave_one_out"),
    "reinmax": lambda design: reinmax(design, loss, num_samples=16),
    "straight_through": lambda design: straight_through(design, loss, num_samples=16),
}
figure, axis = plt.subplots(figsize=(7, 3), layout="constrained")
for name, estimator in estimators.items():
    outcomes = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        outcomes.append(minimise(estimator))
    axis.plot(outcomes[0]["losses"], linewidth=0.8, label=name)
    print(f"{name}: loss of the most probable choice", [round(loss(o["design"].mode).item(), 3) for o in outcomes])
axis.axhline(loss(greedy), color="0.5", linestyle=":", label="greedy")
axis.set(title="mean loss of the draws", xlabel="step", ylim=(0, 1.1 * by_chance.mean()))
axis.legend()

# %%
# For other losses the verdict is the opposite. In the first tutorial, whose loss is a parabola, ``reinmax`` has nearly
# no bias and a fraction of the noise. Use it if your loss is smooth and well behaved between the k-hot vectors, like
# most networks that take ``x * inputs``.
#
# A loss without a derivative
# ---------------------------
#
# Suppose the owner of the field asks a different question: at how many places is the temperature known to within 0.4
# degrees? This number jumps, and its derivative is zero. The score function does not mind. It would also accept a
# simulator, or a program in another language.


def unknown(x: Tensor) -> Tensor:
    return (variances(x) > 0.4**2).double().mean(-1)


black_box = minimise(lambda design: score_function(design, unknown, num_samples=64, baseline="leave_one_out"))
for name, x in {"this loss": black_box["design"].mode, "mean variance": chosen, "greedy search": greedy}.items():
    print(f"places chosen by {name}: {1 - unknown(x):.0%} of the field known to within 0.4 degrees")

# %%
# Reproducible draws
# ------------------
#
# Estimators draw from PyTorch's global generator unless you pass one. A generator of your own makes a run reproducible,
# whatever else the program draws. If you use several processes, give each its own seed: equal seeds mean equal draws,
# and then the second process gains nothing.
generator = torch.Generator().manual_seed(7)
first = score_function(start, loss, num_samples=4, generator=generator)
again = score_function(start, loss, num_samples=4, generator=generator.manual_seed(7))
print("the same:", first.item() == again.item())

# %%
# What to try
# -----------
#
# * Ask for 20 thermometers. Does the learned choice still keep up with greedy search?
# * Use ``Pivotal`` and ``reinmax`` instead of ``ConditionalPoisson`` and ``score_function``. Draws of long rows are
#   faster. ``Pivotal`` has no log-probability, entropy or mode: remove the entropies, and take the ``topk_mask`` of the
#   logits as the choice.
# * Let a network compute the logits, one row for each of many fields with different covariances. The loop stays as it
#   is, because designs come in batches.
torch.set_default_dtype(torch.float32)
