"""
Estimating a total from a survey
================================

How much do 284 farms produce, if only 30 can be asked? Large farms matter more, so they are drawn with probability
proportional to their known area. Dividing by that probability makes the estimate unbiased, and the pair probabilities
of the design give its standard error.
"""

import matplotlib.pyplot as plt
import torch

from khot import ConditionalPoisson, Sampford, capped_softmax, horvitz_thompson

FARMS, K = 284, 30
torch.manual_seed(0)

# %%
# The areas of all farms are known; the harvests are not, but they are roughly proportional to the areas. **Your data
# goes here:** replace `area` with a known size of each unit, and `harvest` with what you observe of the drawn units.
area = torch.randn(FARMS, dtype=torch.float64).mul(0.8).exp()
harvest = area * (3 + 0.6 * torch.randn(FARMS, dtype=torch.float64))
total = harvest.sum()

# %%
# The inclusion probabilities are proportional to area, at most 1, and sum to 30. One design has exactly these
# probabilities, and the other treats all farms alike.
probs = capped_softmax(area.log(), K)
by_size = Sampford(probs=probs)
at_random = ConditionalPoisson(logits=torch.zeros_like(area), k=K)

# %%
# This is one survey. It uses no harvest of a farm that was not drawn.
farms = by_size.sample()
estimate, variance = horvitz_thompson(by_size, farms, harvest * farms)
print(f"estimated {estimate:.0f} ± {variance.sqrt():.0f} tonnes from {int(farms.sum())} farms; in fact {total:.0f}")

# %%
# The same survey is repeated 2000 times, to see how often its confidence intervals cover the true total.
surveys = {"by area": by_size, "all alike": at_random}
figure, axis = plt.subplots(figsize=(7, 3.2), layout="constrained")
for name, design in surveys.items():
    farms = design.sample((2000,))
    estimates, variances = horvitz_thompson(design, farms, harvest * farms)
    covered = ((estimates - total).abs() < 1.96 * variances.clamp(min=0).sqrt()).double().mean()
    print(f"{name}: standard error {estimates.std():.0f}; 95 % intervals cover the truth in {covered:.1%}")
    axis.hist(estimates, bins=60, alpha=0.6, density=True, label=name)
axis.axvline(total, color="black", linestyle=":", label="the truth")
axis.set(xlabel="estimated total, tonnes", yticks=[])
axis.legend()
figure.savefig("survey_sample.png", dpi=120)
