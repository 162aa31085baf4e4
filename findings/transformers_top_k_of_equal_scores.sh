#!/usr/bin/env bash
# package: transformers
# version: 5.23.0, with torch 2.13.0
# date: 2026-11-29
# behaviour: TopKLogitsWarper(k) keeps every token that scores as much as the k-th largest, and TopPLogitsWarper
#            breaks ties in favour of the last tokens.
# expected: Exactly k tokens are left; where scores are equal, the earlier ones.
# seen: Of (1, 1, 1, 1, 1, 0) five tokens are left for k = 2. Of six equal ones with p = 0.5 the last three are left.
# why: The number of tokens is no bound on memory, and logits in half precision, which are often equal, widen the
#      choice.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile transformers==5.23.0 torch==2.13.0 numpy==2.4.6
cat > "$folder/finding.py" <<'PYTHON'
import torch
from transformers import TopKLogitsWarper, TopPLogitsWarper

of_k = TopKLogitsWarper(2)(None, torch.tensor([[1.0, 1.0, 1.0, 1.0, 1.0, 0.0]]))
of_p = TopPLogitsWarper(0.5)(None, torch.zeros(1, 6))
kept = [torch.isfinite(scores[0]).nonzero().flatten().tolist() for scores in (of_k, of_p)]
assert kept == [[0, 1, 2, 3, 4], [3, 4, 5]], kept
print("kept by top-k, top-p", kept)
PYTHON
cd "$folder" && venv/bin/python -W ignore finding.py
