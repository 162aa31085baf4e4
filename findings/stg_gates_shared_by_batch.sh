#!/usr/bin/env bash
# package: stg
# version: 0.1.2, with torch 2.13.0
# date: 2026-11-29
# behaviour: The stochastic gates of a feature selector are drawn once for a batch, not once for an example.
# expected: Each example has gates of its own, like the units of dropout; the expectation in the objective is over both.
# seen: 1000 examples of a training batch have the same five gates. The variance of the mean of a batch of 1000 gated ones is
#       that of one gate, 0.13, where it would be 1000 times smaller if each example had its own.
# why: Gradients of the gates do not get less noisy with larger batches, and batches of one size are not comparable with a
#      method that draws for each example.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile stg==0.1.2 torch==2.13.0 numpy==2.4.6
cat > "$folder/finding.py" <<'PYTHON'
import torch
from stg.layers import FeatureSelector

torch.manual_seed(0)
gates = FeatureSelector(5, 0.5, "cpu").train()
with torch.no_grad():
    batches = torch.stack([gates(torch.ones(1000, 5)) for _ in range(2000)])
within, between = batches.std(1).max().item(), batches.mean(1).var(0)
assert within == 0 and (between > 0.1).all(), (within, between)
print(within, between.tolist())
PYTHON
cd "$folder" && venv/bin/python -W ignore finding.py
