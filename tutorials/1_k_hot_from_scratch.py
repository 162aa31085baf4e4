"""
K-hot vectors from scratch, in pictures
=======================================

A k-hot vector marks a choice of k things out of n: it has k ones, and its other entries are zero. This tutorial builds
everything that it takes to *learn* such a choice by gradient descent: a soft mask, a random draw, and a gradient. We
write each of them in a few lines of PyTorch, look at a picture, and then find the same thing in khot.

You need to know what ``backward()`` does, and nothing about sampling.
"""

import itertools

import matplotlib.pyplot as plt
import torch
from torch import Tensor

import khot

torch.manual_seed(0)
torch.set_num_threads(1)  # threads would cost more than they save on tensors this small
# sphinx_gallery_thumbnail_number = 3

# %%
# The hard choice has no gradient
# -------------------------------
#
# Eight items have scores, and we choose the three with the largest ones. What happens to the choice of item 2 while its
# score grows? Nothing at all, then it jumps from 0 to 1, and then nothing happens again. The derivative is zero
# wherever it exists, so gradient descent never learns that a larger score would have helped.
scores = torch.tensor([1.2, -0.4, 0.3, 2.0, -1.1, 0.7, -0.2, 0.9], dtype=torch.float64)
n, k = len(scores), 3
items = range(n)


def hard_mask(x: Tensor, k: int) -> Tensor:
    return torch.zeros_like(x).scatter(-1, x.topk(k, -1).indices, 1.0)


def entry_along(mask, item: int, line: Tensor) -> Tensor:
    """One entry of a mask while the score of that item moves along a line."""
    x = scores.repeat(len(line), 1)
    x[:, item] = line
    return mask(x)[:, item]


line = torch.linspace(-3, 3, 301, dtype=torch.float64)
figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3), layout="constrained")
left.bar(items, scores, color=["tab:red" if chosen else "0.7" for chosen in hard_mask(scores, k)])
left.set(title="scores, and the three largest", xlabel="item")
right.plot(line, entry_along(lambda x: hard_mask(x, k), 2, line), color="tab:red")
right.set(title="is item 2 chosen?", xlabel="score of item 2")

# %%
# A soft mask: one threshold for the whole row
# --------------------------------------------
#
# We replace the jump with a smooth step, the logistic function, and compare the score of every item with a common
# threshold t:
#
# .. math:: y_i = \sigma\left(\frac{x_i - t}{\tau}\right)
#
# Which t? The entries must sum to k. The sum falls as t grows, so we can find t by bisection.


def mass(x: Tensor, t: Tensor, temperature: float) -> Tensor:
    return torch.sigmoid((x - t.unsqueeze(-1)) / temperature).sum(-1)


def find_threshold(x: Tensor, k: float, temperature: float) -> Tensor:
    low, high = x.amin(-1) - 40 * temperature, x.amax(-1) + 40 * temperature
    for _ in range(100):
        middle = (low + high) / 2
        too_much = mass(x, middle, temperature) > k
        low, high = torch.where(too_much, middle, low), torch.where(too_much, high, middle)
    return low


def soft_mask(x: Tensor, k: float, temperature: float) -> Tensor:
    return torch.sigmoid((x - find_threshold(x, k, temperature).unsqueeze(-1)) / temperature)


print("from scratch:", soft_mask(scores, k, 0.5).numpy().round(4))
print("with khot:   ", khot.sigmoid_topk(scores, k, 0.5).numpy().round(4))

# %%
# The temperature says how soft the step is. As it goes to 0, the mask becomes the hard choice. As it grows, all entries
# approach k/n, here 3/8.
thresholds = torch.linspace(-3, 4, 200, dtype=torch.float64)
figure, (left, middle, right) = plt.subplots(1, 3, figsize=(12, 3), layout="constrained")
for temperature, color in ((0.05, "#9ecae1"), (0.5, "#2171b5"), (3.0, "#08306b")):
    label = f"temperature {temperature:g}"
    left.plot(thresholds, mass(scores, thresholds, temperature), color=color, label=label)
    left.plot(find_threshold(scores, k, temperature), k, "o", color=color)
    middle.plot(items, soft_mask(scores, k, temperature), "o-", color=color)
    right.plot(line, entry_along(lambda x, s=temperature: soft_mask(x, k, s), 2, line), color=color)
left.axhline(k, color="0.5", linestyle=":")
left.set(title="sum of the mask: where is it 3?", xlabel="threshold t")
left.legend()
middle.set(title="the masks", xlabel="item", ylim=(-0.05, 1.05))
right.set(title="entry 2 of the mask", xlabel="score of item 2")

# %%
# Where masks live: the capped simplex
# ------------------------------------
#
# All vectors with entries between 0 and 1 that sum to k form a polytope, the *capped simplex*. Its corners are the
# k-hot vectors. With n = 3 we can look at it: the condition on the sum leaves a plane. For k = 1 the polytope is the
# triangle that softmax maps to; for k = 2 the triangle is upside down; between them lies a hexagon.
#
# Each line follows the mask of one score vector from temperature 10, close to the centre, to temperature 0.02, close to
# a corner. For k = 1.5 the corners have one entry of 1/2.
plane = torch.tensor([[-1.0, 1.0, 0.0], [-1.0, -1.0, 2.0]], dtype=torch.float64)
plane = plane / plane.norm(dim=-1, keepdim=True)
temperatures = torch.logspace(1, -1.7, 60, dtype=torch.float64)
three_scores = torch.randn(12, 3, dtype=torch.float64)
figure, axes = plt.subplots(1, 3, figsize=(10, 3.2), layout="constrained")
for axis, size in zip(axes, (1, 1.5, 2), strict=True):
    whole, part = int(size), size - int(size)
    corners = sorted(set(itertools.permutations(([1.0] * whole + [part] + [0.0] * 3)[:3])))
    corners = torch.tensor(corners, dtype=torch.float64) @ plane.T
    corners = corners[torch.atan2(*(corners - corners.mean(0)).T).argsort()]
    axis.fill(*corners.T, color="0.92")
    for x in three_scores:
        path = torch.stack([soft_mask(x, size, s) for s in temperatures.tolist()]) @ plane.T
        axis.plot(*path.T, linewidth=1)
    axis.plot(*corners.T, "o", color="black", markersize=4)
    axis.set(title=f"n = 3, k = {size:g}", aspect="equal", xticks=[], yticks=[])


# %%
# The gradient of the mask
# ------------------------
#
# We do not want to differentiate through a hundred steps of bisection, and we do not need to. The threshold is defined
# by the equation "the mask sums to k". Differentiating both sides gives the derivative of t, and from it the derivative
# of the mask. With the slopes :math:`w_i = \sigma'((x_i - t)/\tau)/\tau`:
#
# .. math:: \frac{\partial y_i}{\partial x_j} = w_i \delta_{ij} - \frac{w_i w_j}{\sum_l w_l}
#
# Read it as a competition. An item that gains score gains mass (the diagonal) and takes it from the others in
# proportion to *their* slopes. Items far from the threshold, certainly in or certainly out, hardly take part.
def jacobian(x: Tensor, k: float, temperature: float) -> Tensor:
    y = soft_mask(x, k, temperature)
    w = y * (1 - y) / temperature
    return w.diag() - torch.outer(w, w) / w.sum()


automatic = torch.func.jacrev(lambda x: khot.sigmoid_topk(x, k, 0.5))(scores)
print("largest difference from khot's gradient:", float((jacobian(scores, k, 0.5) - automatic).abs().max()))
print("each column sums to zero:", bool((automatic.sum(0).abs() < 1e-12).all()))

figure, axes = plt.subplots(1, 2, figsize=(8, 3.4), layout="constrained")
for axis, temperature in zip(axes, (0.2, 1.0), strict=True):
    shown = axis.imshow(jacobian(scores, k, temperature), cmap="RdBu_r", vmin=-1, vmax=1)
    axis.set(title=f"temperature {temperature:g}", xlabel="score of item j moves", ylabel="entry i of the mask moves")
figure.colorbar(shown)

# %%
# Random choices
# --------------
#
# A mask is not a choice yet. To explore, a model should *draw* k items, the promising ones more often. The simplest
# idea is to toss one coin per item, with the entries of the mask as probabilities. Then the number of items varies:
mask = soft_mask(scores, k, 0.5)
coins = torch.bernoulli(mask.expand(20_000, n))
counts = coins.sum(-1).long().bincount(minlength=n + 1)
print(f"{counts[k] / len(coins):.0%} of the draws have exactly {k} ones")

# %%
# So we keep only the draws with three ones. This is an old idea from survey sampling, called *conditional Poisson*
# sampling. It has a catch: among the draws that we keep, items are not chosen as often as their coins say. What counts
# are the *inclusion probabilities*: how probable each item is in a final draw.
#
# khot's ``ConditionalPoisson`` draws from this distribution without throwing anything away, and knows its inclusion
# probabilities exactly. Given ``probs`` instead of ``logits``, it finds coins for which the inclusion probabilities are
# the ones that you ask for.
kept = coins[coins.sum(-1) == k]
by_logits = khot.ConditionalPoisson(logits=mask.logit(), k=k)
by_probs = khot.ConditionalPoisson(probs=mask)

figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3), layout="constrained")
left.bar(range(n + 1), counts / len(coins), color=["tab:red" if size == k else "0.7" for size in range(n + 1)])
left.set(title="number of ones from independent coins")
right.bar(items, mask, color="0.85", label="the mask = the coins")
right.plot(items, kept.mean(0), "x", color="tab:red", label="share among the draws that we kept")
right.plot(items, by_logits.mean, "_", markersize=14, color="tab:red", label="ConditionalPoisson(logits=...).mean")
drawn = by_probs.sample((20_000,)).mean(0)
right.plot(items, drawn, ".", color="tab:blue", label="draws of ConditionalPoisson(probs=...)")
right.set(title="inclusion probabilities", xlabel="item", ylim=(0, 1.5))
right.legend(fontsize="small")

# %%
# A gradient through random choices
# ---------------------------------
#
# A draw is as hard as the top-k, but its *average* is not: the expected loss E[f(x)] changes smoothly with the scores,
# because they change how probable each choice is. There are only 56 ways to choose 3 of 8, so we can compute the
# expectation and its gradient exactly, by summing over all of them.
#
# Our loss is about a budget: each item has a price, and the three chosen ones should cost 5 in total.
prices = torch.tensor([3.0, 1.0, 2.5, 4.0, 0.5, 1.5, 2.0, 3.5], dtype=torch.float64)


def loss(x: Tensor) -> Tensor:
    return (x @ prices - 5).square()


def design_of(x: Tensor) -> khot.ConditionalPoisson:
    return khot.ConditionalPoisson(probs=khot.sigmoid_topk(x, k))


def exact(x: Tensor) -> Tensor:
    design = design_of(x)
    choices = design.enumerate_support()  # (56, 8)
    return (design.log_prob(choices).exp() * loss(choices)).sum()


# %%
# With more items we cannot sum over all choices, and have to *estimate* the gradient from some draws. Two ideas
# underlie most methods. Each fits in a few lines:
#
# * The **score function** needs only the values of the loss. It makes choices more probable if their loss was below
#   average. The estimate is right on average, but noisy.
# * **Straight-through** uses the slope of the loss. It shows the loss a hard draw, and sends the gradient to the mask
#   as if the mask had been there. It has little noise, but on average it is a bit wrong, because the loss is curved and
#   the draw is not where the mask is.


def score_function(x: Tensor, draws: int = 16) -> Tensor:
    design = design_of(x)
    sample = design.sample((draws,))
    losses = loss(sample)
    others = (losses.sum() - losses) / (draws - 1)  # the mean loss of the other draws is the baseline
    return (design.log_prob(sample) * (losses - others)).mean()


def straight_through(x: Tensor, draws: int = 16) -> Tensor:
    sample, mask = design_of(x).sample((draws,)), khot.sigmoid_topk(x, k)
    return loss(sample + mask - mask.detach()).mean()


# %%
# We repeat each estimate 200 times. The marks show its mean and standard deviation, and the grey bars are the exact
# gradient. khot's own ``reinmax`` is shown as well: it is a straight-through estimator that follows the curvature of
# the loss to second order, and its bias is smaller.
def gradient(estimator) -> Tensor:
    x = scores.clone().requires_grad_()
    return torch.autograd.grad(estimator(x), x)[0]


estimators = {
    "score function": (score_function, "tab:red"),
    "straight-through": (straight_through, "tab:blue"),
    "khot.reinmax": (lambda x: khot.reinmax(design_of(x), loss, num_samples=16), "tab:green"),
}
truth = gradient(exact)
figure, axis = plt.subplots(figsize=(9, 3.4), layout="constrained")
axis.bar(items, truth, color="0.85", label="exact")
bias = {}
for shift, (name, (estimator, color)) in zip((-0.2, 0, 0.2), estimators.items(), strict=True):
    estimates = torch.stack([gradient(estimator) for _ in range(200)])
    bias[name] = (estimates.mean(0) - truth).norm() / truth.norm()
    places = [item + shift for item in items]
    axis.errorbar(places, estimates.mean(0), estimates.std(0), fmt=".", color=color, label=name)
    print(f"{name}: off by {bias[name]:.0%} on average, noise {estimates.std(0).norm() / truth.norm():.0%}")
axis.set(title="gradient of the expected loss in the scores, from 16 draws", xlabel="item")
axis.legend()

# %%
# Learning the choice
# -------------------
#
# Now everything is in place: scores, a mask, draws, and a gradient. Start from equal scores, and let Adam learn three
# items that cost 5 in total. The picture shows the inclusion probabilities: at first all items are equally probable,
# and in the end three are nearly certain.
x = torch.zeros(n, dtype=torch.float64, requires_grad=True)
optimizer = torch.optim.Adam([x], lr=0.1)
history = []
for _ in range(250):
    optimizer.zero_grad()
    score_function(x).backward()
    optimizer.step()
    history.append(khot.sigmoid_topk(x.detach(), k))

chosen = khot.topk_mask(x.detach(), k)
print(f"chosen: {chosen.nonzero().flatten().tolist()}, which cost {float(chosen @ prices)}")

figure, axis = plt.subplots(figsize=(9, 2.6), layout="constrained")
shown = axis.imshow(torch.stack(history, 1), aspect="auto", cmap="Reds", vmin=0, vmax=1)
axis.set(title="inclusion probabilities", xlabel="step", ylabel="item")
figure.colorbar(shown)

# %%
# What to try
# -----------
#
# * Replace ``score_function`` with ``straight_through`` or ``khot.reinmax`` in the loop. Which one needs the fewest
#   steps?
# * Let the three items cost 6.5 in total. Several choices cost exactly that. Does the model learn one of them, or a
#   mixture of all?
# * Replace the logistic function with another step, such as ``torch.distributions.Normal(0, 1).cdf``. You get
#   ``khot.normal_topk``. What changes in the Jacobian?
#
# The three building blocks are families in khot: maps such as ``sigmoid_topk``, designs such as ``ConditionalPoisson``,
# and estimators such as ``reinmax``. The guide has a page on which member to choose.
