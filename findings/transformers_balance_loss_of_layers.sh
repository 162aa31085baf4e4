#!/usr/bin/env bash
# package: transformers
# version: 5.23.0, with torch 2.13.0
# date: 2026-11-29
# behaviour: load_balancing_loss_func adds up loads and probabilities over all layers before it multiplies them.
# expected: The mean of the losses of the layers: a layer that uses half of its experts is punished, whatever other
#           layers do.
# seen: Two layers, each of which sends every token to the same two of four experts, have the losses 4.0 and 4.0;
#       together they have 2.0, which is the minimum, if their experts differ.
# why: A model whose layers have collapsed may show a perfect balance. Call the function once for each layer.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile transformers==5.23.0 torch==2.13.0 numpy==2.4.6
cat > "$folder/finding.py" <<'PYTHON'
import torch
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func as loss

first = torch.tensor([[9.0, 9.0, 0.0, 0.0]]).repeat(8, 1)
second = first.flip(-1)
alone = [loss((layer,), 4, 2).item() for layer in (first, second)]
together = loss((first, second), 4, 2).item()
assert all(abs(value - 4) < 0.01 for value in alone) and abs(together - 2) < 1e-5, (alone, together)
print("alone", alone, "together", together)
PYTHON
cd "$folder" && venv/bin/python -W ignore finding.py
