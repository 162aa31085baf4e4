#!/usr/bin/env bash
# package: allRank
# version: 1.4.3, with torch 2.14.1
# date: 2026-11-30
# behaviour: neuralNDCG_transposed(powered_relevancies=False) takes linear gains, and normalises by the ideal DCG of the
#            gains 2^x - 1. neuralNDCG with the same arguments normalises by that of linear gains.
# expected: -1 for the perfect ranking from both, as both are minus nDCG.
# seen: Grades (3, 2, 1, 0) in perfect order: -1.0 from neuralNDCG, -0.507 from neuralNDCG_transposed. With
#       powered_relevancies=True both are -1.0.
# why: Queries with high grades weigh less in the mean over a batch than those with low grades, and the value is no nDCG.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile torch==2.14.1 torchvision==0.29.1 numpy==2.4.6 attrs==26.1.0 \
    scikit-learn==1.9.1 scipy==1.17.1 pandas==3.1.1 gcsfs==2026.10.1 flatten-dict==0.5.0 setuptools==79.0.1
"$folder/venv/bin/pip" install --quiet --no-compile --no-deps allRank==1.4.3
cat > "$folder/finding.py" <<'PYTHON'
import torch
from allrank.models.losses.neuralNDCG import neuralNDCG, neuralNDCG_transposed

grades, scores = torch.tensor([[3.0, 2.0, 1.0, 0.0]]), torch.tensor([[30.0, 20.0, 10.0, 0.0]])
seen = {
    (loss.__name__, powered): round(loss(scores, grades, temperature=0.1, powered_relevancies=powered).item(), 3)
    for loss in (neuralNDCG, neuralNDCG_transposed)
    for powered in (True, False)
}
assert list(seen.values()) == [-1.0, -1.0, -1.0, -0.507], seen
print(seen)
PYTHON
cd "$folder" && venv/bin/python -W ignore finding.py
