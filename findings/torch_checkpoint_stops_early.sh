#!/usr/bin/env bash
# package: torch
# version: 2.13.0
# date: 2026-11-29
# behaviour: torch.utils.checkpoint(use_reentrant=False) stops the second run of a block at the last tensor that is
#            needed.
# expected: The block runs twice, from its first line to its last.
# seen: A count at the beginning of the block is 2, one behind its last saved tensor is 1.
# why: State that a block counts at its end is right, state that it counts at its beginning is twice what it should
#      be; an addition at the end moves the boundary.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile torch==2.13.0 numpy==2.4.6
cat > "$folder/finding.py" <<'PYTHON'
import torch
from torch.utils.checkpoint import checkpoint

count = {"beginning": 0, "end": 0}


def block(x):
    count["beginning"] += 1
    y = (2 * x).exp()
    count["end"] += 1
    return y + 1


x = torch.ones(3, requires_grad=True)
checkpoint(block, x, use_reentrant=False).sum().backward()
assert count == {"beginning": 2, "end": 1}, count
print(count)
PYTHON
cd "$folder" && venv/bin/python -W ignore finding.py
