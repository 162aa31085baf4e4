#!/usr/bin/env bash
# package: torchmetrics
# version: 1.9.0, with torch 2.13.0
# date: 2026-11-29
# behaviour: retrieval_average_precision(top_k=k) divides by the number of relevant documents among the first k, not
#            by that of all of them.
# expected: Divided by the number of relevant documents, as in trec_eval (0.33 here), or by k if that is less (0.5).
# seen: Relevance (1, 0, 1, 1) in this order and k = 2 give 1.0. Finding one document instead of two gives the same as
#       finding both.
# why: Values cannot be compared with those of other libraries, and a model that finds less may score more.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile torchmetrics==1.9.0 torch==2.13.0 numpy==2.4.6
cat > "$folder/finding.py" <<'PYTHON'
import torch
from torchmetrics.functional.retrieval import retrieval_average_precision as average_precision

scores = torch.tensor([0.9, 0.8, 0.7, 0.6])
one = average_precision(scores, torch.tensor([True, False, True, True]), top_k=2).item()
both = average_precision(scores, torch.tensor([True, True, True, False]), top_k=2).item()
second_too_late = average_precision(scores, torch.tensor([True, False, True, False]), top_k=3).item()
assert one == both == 1.0 and abs(second_too_late - 5 / 6) < 1e-6, (one, both, second_too_late)
print("one of two", one, "both", both, "one more at rank 3, k = 3", second_too_late)
PYTHON
cd "$folder" && venv/bin/python -W ignore finding.py
