#!/usr/bin/env bash
# package: torch
# version: 2.13.0
# date: 2026-11-29
# behaviour: WeightNormSparsifier's sparsity_level is a share of blocks, and zeros_per_block counts in these only.
# expected: sparsity_level=0.5 with two zeros per block of four gives 2:4 sparsity: half of the weights are 0.
# seen: A quarter of the weights is 0, and half of the blocks have no zero. 2:4 sparsity needs sparsity_level=1.0.
# why: Kernels for 2:4 sparsity refuse such a weight or, where nobody checks, drop entries of it.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile torch==2.13.0 numpy==2.4.6
cat > "$folder/finding.py" <<'PYTHON'
import torch
from torch.ao.pruning import WeightNormSparsifier


def zeros(level):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64))
    sparsifier = WeightNormSparsifier(sparsity_level=level, sparse_block_shape=(1, 4), zeros_per_block=2)
    sparsifier.prepare(model, [{"tensor_fqn": "0.weight"}])
    sparsifier.step()
    return (model[0].weight == 0).float().mean().item()


found = zeros(0.5), zeros(1.0)
assert found == (0.25, 0.5), found
print("share of zeros at the levels 0.5 and 1.0", found)
PYTHON
cd "$folder" && venv/bin/python -W ignore finding.py
