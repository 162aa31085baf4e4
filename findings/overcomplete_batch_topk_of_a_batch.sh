#!/usr/bin/env bash
# package: overcomplete
# version: 0.3.0, with torch 2.14.1
# date: 2026-11-30
# behaviour: BatchTopKSAE(top_k=k) keeps k codes of a batch, not k for each row of it as in the paper that it cites. Its
#            running threshold is no buffer: a saved and loaded autoencoder has none, and cannot encode in evaluation.
# expected: k times the number of rows, and a threshold in the state.
# seen: Of a batch of 100 rows, top_k=4 keeps 4 codes; at least 96 rows have none. The state dict has no threshold, and
#       encoding after loading it raises "Running threshold is not initialized."
# why: A value of k that is right for TopKSAE, or for other libraries, trains an autoencoder that ignores nearly all rows.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile torch==2.14.1 torchvision==0.29.1 numpy==2.4.6 timm==1.0.31 einops==0.8.2 \
    scipy==1.17.1 matplotlib==3.8.4 scikit-image==0.26.0 scikit-learn==1.9.1 opencv-python-headless==5.0.0.93
"$folder/venv/bin/pip" install --quiet --no-compile --no-deps overcomplete==0.3.0
cat > "$folder/finding.py" <<'PYTHON'
import torch
from overcomplete.sae import BatchTopKSAE

torch.manual_seed(0)
x, autoencoder = torch.randn(100, 16), BatchTopKSAE(16, 64, top_k=4).train()
codes = autoencoder.encode(x)[1]
kept, rows = int((codes != 0).sum()), int((codes != 0).any(-1).sum())
state, loaded = autoencoder.state_dict(), BatchTopKSAE(16, 64, top_k=4).eval()
loaded.load_state_dict(state)
try:
    loaded.encode(x)
    raised = ""
except AssertionError as error:
    raised = str(error)
assert kept == 4 and rows <= 4 and not any("threshold" in name for name in state), (kept, rows, list(state))
assert raised.startswith("Running threshold"), raised
print("codes kept", kept, "of rows", rows, "after loading:", raised)
PYTHON
cd "$folder" && venv/bin/python -W ignore finding.py
