#!/usr/bin/env bash
# package: pyro-ppl
# version: 1.9.2, with torch 2.13.0
# date: 2026-11-29
# behaviour: RelaxedOneHotCategoricalStraightThrough keeps the relaxed vector as an attribute of the tensor that it
#            draws, and log_prob reads it there.
# expected: log_prob is a function of the numbers: a copy of the draw has the same density.
# seen: The density of a draw is finite, that of its clone is NaN, as the hard vector lies on the boundary of the
#       simplex.
# why: A draw that was copied, indexed, moved to another device or read from a replay buffer turns a loss into NaN.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile pyro-ppl==1.9.2 torch==2.13.0 numpy==2.4.6
cat > "$folder/finding.py" <<'PYTHON'
import pyro.distributions as dist
import torch

torch.manual_seed(0)
design = dist.RelaxedOneHotCategoricalStraightThrough(torch.tensor(0.5), logits=torch.zeros(4))
x = design.rsample()
found = design.log_prob(x).item(), design.log_prob(x.clone()).item()
assert torch.isfinite(torch.tensor(found[0])) and torch.isnan(torch.tensor(found[1])), found
print("log-probability of a draw, of its clone", found)
PYTHON
cd "$folder" && venv/bin/python -W ignore finding.py
