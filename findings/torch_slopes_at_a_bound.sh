#!/usr/bin/env bash
# package: torch
# version: 2.13.0
# date: 2026-11-29
# behaviour: Four ways to write min(x, 1) have three different derivatives at x = 1.
# expected: The same derivative, as they are the same function.
# seen: clamp(max=1) has 1, minimum(x, 1) has 0.5, hardtanh and 1 - relu(1 - x) have 0.
# why: Exchanging one for another changes training where values sit at the bound, such as saturated gates or quantised
#      inputs.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile torch==2.13.0 numpy==2.4.6
cat > "$folder/finding.py" <<'PYTHON'
import torch
import torch.nn.functional as F

one = torch.ones(())
ways = {
    "clamp": lambda x: x.clamp(max=1.0),
    "minimum": lambda x: torch.minimum(x, one),
    "hardtanh": lambda x: F.hardtanh(x),
    "relu": lambda x: 1 - F.relu(1 - x),
}
slopes = {name: torch.func.grad(way)(one).item() for name, way in ways.items()}
assert slopes == {"clamp": 1.0, "minimum": 0.5, "hardtanh": 0.0, "relu": 0.0}, slopes
print(slopes)
PYTHON
cd "$folder" && venv/bin/python -W ignore finding.py
