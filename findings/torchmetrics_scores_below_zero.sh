#!/usr/bin/env bash
# package: torchmetrics
# version: 1.9.0, with torch 2.13.0
# date: 2026-11-29
# behaviour: Precision, recall, average precision and reciprocal rank of a retrieval ignore a relevant document whose
#            score is not positive; hit rate and nDCG count it.
# expected: Only the order of scores matters.
# seen: Scores (-1, -2, -3), the third document relevant, k = 3: recall 0 and hit rate 1, where the scores (3, 2, 1)
#       give 1 and 1. nDCG is 0.5 for both.
# why: Logits, distances with a minus sign and centred scores give lower metrics, without a warning. Pass their
#      sigmoid.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile torchmetrics==1.9.0 torch==2.13.0 numpy==2.4.6
cat > "$folder/finding.py" <<'PYTHON'
import torch
from torchmetrics.functional import retrieval

METRICS = ("precision", "recall", "average_precision", "reciprocal_rank", "hit_rate", "normalized_dcg")


def of(scores):
    relevant = torch.tensor([False, False, True])
    found = {name: getattr(retrieval, f"retrieval_{name}")(scores, relevant, top_k=3).item() for name in METRICS}
    return {name: round(value, 3) for name, value in found.items()}


positive, negative = of(torch.tensor([3.0, 2.0, 1.0])), of(torch.tensor([-1.0, -2.0, -3.0]))
assert list(positive.values()) == [0.333, 1.0, 0.333, 0.333, 1.0, 0.5], positive
assert list(negative.values()) == [0.0, 0.0, 0.0, 0.0, 1.0, 0.5], negative
print("positive", positive, "negative", negative)
PYTHON
cd "$folder" && venv/bin/python -W ignore finding.py
