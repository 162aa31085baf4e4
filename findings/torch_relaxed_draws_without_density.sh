#!/usr/bin/env bash
# package: torch
# version: 2.13.0
# date: 2026-11-30
# behaviour: RelaxedOneHotCategorical has no density at many of its own draws, at temperatures that annealing reaches: an
#            entry underflows to 0, and its density is NaN; or the entries miss the sum 1 by more than 1e-6, and log_prob
#            raises, with arguments checked, that the draw is outside the support.
# expected: A finite density at each draw, as the density is computed with logarithms.
# seen: The density of 10000 draws of 10 units in float32 is NaN for none of them at temperature 0.5, for 0.5 % at 0.1, and
#       for 47 % at 0.05, where 1 % of the draws are outside the simplex.
# why: A model trains well until the temperature has fallen, and then stops with an error or trains on NaN. The terms of
#      an ELBO that use these densities need ExpRelaxedCategorical, the law of the logarithms.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile torch==2.13.0 numpy==2.4.6
cat > "$folder/finding.py" <<'PYTHON'
import torch
from torch.distributions import RelaxedOneHotCategorical, constraints

torch.manual_seed(0)
logits = torch.randn(10)
seen = {}
for temperature in (0.5, 0.1, 0.05):
    d = RelaxedOneHotCategorical(torch.tensor(temperature), logits=logits, validate_args=False)
    draws = d.sample((10000,))
    nan = d.log_prob(draws).isnan().double().mean().item()
    outside = (~constraints.simplex.check(draws)).double().mean().item()
    seen[temperature] = (nan, outside)
assert seen[0.5] == (0, 0), seen
assert seen[0.1][0] > 0.001 and seen[0.05][0] > 0.2 and 0.005 < seen[0.05][1] < 0.03, seen

checked = RelaxedOneHotCategorical(torch.tensor(0.05), logits=logits, validate_args=True)
try:
    checked.log_prob(checked.sample((10000,)))
    raised = ""
except ValueError as error:
    raised = str(error)
assert "within the support" in raised, raised
print("temperature: (share of NaN, share outside the simplex)", seen)
PYTHON
cd "$folder" && venv/bin/python -W ignore finding.py
