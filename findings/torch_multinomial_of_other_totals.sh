#!/usr/bin/env bash
# package: torch
# version: 2.13.0
# date: 2026-11-29
# behaviour: torch.distributions.Multinomial(n) gives a probability to vectors that sum to less than n, with arguments
#            checked.
# expected: An error, or -inf: such a vector cannot be drawn.
# seen: Multinomial(3) of four equal probabilities gives (1, 1, 0, 0) the log-probability -2.079, that of
#       Multinomial(2); the vectors that pass its check have the total probability 4.
# why: A k-hot vector that lost a unit is scored as if it were possible.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile torch==2.13.0 numpy==2.4.6
cat > "$folder/finding.py" <<'PYTHON'
from itertools import product

import torch

design = torch.distributions.Multinomial(3, torch.full((4,), 0.25), validate_args=True)
shorter = design.log_prob(torch.tensor([1.0, 1.0, 0.0, 0.0])).item()
same = torch.distributions.Multinomial(2, torch.full((4,), 0.25)).log_prob(torch.tensor([1.0, 1.0, 0.0, 0.0])).item()
total = 0.0
for counts in product(range(4), repeat=4):
    try:
        total += design.log_prob(torch.tensor(counts).float()).exp().item()
    except ValueError:
        continue
assert shorter == same and abs(total - 4) < 1e-5, (shorter, same, total)
print("log-probability of a sum of 2", shorter, "total probability", total)
PYTHON
cd "$folder" && venv/bin/python -W ignore finding.py
