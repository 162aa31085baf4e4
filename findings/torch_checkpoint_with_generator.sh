#!/usr/bin/env bash
# package: torch
# version: 2.13.0
# date: 2026-11-29
# behaviour: torch.utils.checkpoint restores the states of torch's default generators before it runs a block again,
#            but of no generator that the block was given.
# expected: preserve_rng_state=True makes the second run draw the same numbers.
# seen: A mask of 1000 entries drawn with generator=g: half of the entries have a gradient where the output was 0, or
#       none where it was not. With the default generator none do.
# why: Gradients are those of another draw, without any error: shapes and dtypes are the same.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile torch==2.13.0 numpy==2.4.6
cat > "$folder/finding.py" <<'PYTHON'
import torch
from torch.utils.checkpoint import checkpoint


def mismatch(generator):
    def block(x):
        return x * torch.bernoulli(torch.full_like(x, 0.5), generator=generator) * x

    x = torch.ones(1000, requires_grad=True)
    y = checkpoint(block, x, use_reentrant=False, preserve_rng_state=True)
    y.sum().backward()
    return int(((y != 0) != (x.grad != 0)).sum())


torch.manual_seed(0)
found = mismatch(torch.Generator().manual_seed(0)), mismatch(None)
assert 400 < found[0] < 600 and found[1] == 0, found
print("entries of 1000 with the gradient of another draw: own generator", found[0], "default", found[1])
PYTHON
cd "$folder" && venv/bin/python -W ignore finding.py
