#!/usr/bin/env bash
# package: torchmetrics
# version: 1.9.0, with torch 2.13.0
# date: 2026-11-29
# behaviour: Retrieval metrics treat equal scores in different ways: nDCG takes the mean over all orders, precision
#            takes the order of torch.topk.
# expected: All metrics see the same ranking, or all take means.
# seen: 300 documents of equal score, of which the first 100 are relevant: nDCG@100 is 0.333, the mean; precision@100
#       is 0.0 and precision@3 is 1.0.
# why: For a model with few distinct scores, such as counts or half precision, a metric may be 0 or 1 by accident.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile torchmetrics==1.9.0 torch==2.13.0 numpy==2.4.6
cat > "$folder/finding.py" <<'PYTHON'
import torch
from torchmetrics.functional.retrieval import retrieval_normalized_dcg as ndcg
from torchmetrics.functional.retrieval import retrieval_precision as precision

scores, relevant = torch.ones(300), torch.arange(300) < 100
found = ndcg(scores, relevant, top_k=100).item(), *(precision(scores, relevant, top_k=k).item() for k in (100, 3))
assert abs(found[0] - 1 / 3) < 1e-4 and found[1:] == (0.0, 1.0), found
print("nDCG@100, precision@100, precision@3", found)
PYTHON
cd "$folder" && venv/bin/python -W ignore finding.py
