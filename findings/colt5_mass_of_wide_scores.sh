#!/usr/bin/env bash
# package: colt5-attention
# version: 0.11.2
# date: 2026-11-30
# behaviour: The mask of coor_descent exceeds k in sum: its steps need more iterations the wider the scores are, and stop
#            at n_iters whatever is left.
# expected: Entries that sum to k, as the constraint of the problem says, with 20 or 50 iterations of its examples.
# seen: Rows of 64 standard normal scores, k = 8, eps = 0.1: the mean sum is 8.64 after 20 steps and 8.01 after 50. For
#       scores ten times as wide it is 18.5 after 50 steps, and at most 8.001 after 5000.
# why: A router budgets k tokens and gives weight to twice as many once training has made its scores wide.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile colt5-attention==0.11.2 torch==2.13.0 numpy==2.4.6
cat > "$folder/finding.py" <<'PYTHON'
import torch
from colt5_attention import coor_descent

torch.manual_seed(0)
scores = torch.randn(1000, 64)


def mass(scale, steps):
    return coor_descent(scale * scores, n_iters=steps, k=8, eps=0.1).sum(-1).mean().item()


seen = {(scale, steps): round(mass(scale, steps), 3) for scale, steps in ((1, 20), (1, 50), (10, 50), (10, 5000))}
assert 8.4 < seen[1, 20] < 8.9 and 8.005 < seen[1, 50] < 8.03, seen
assert 17 < seen[10, 50] < 20 and abs(seen[10, 5000] - 8) < 0.001, seen
print("(scale of the scores, steps): mean sum of the mask", seen)
PYTHON
cd "$folder" && venv/bin/python -W ignore finding.py
