#!/usr/bin/env bash
# package: torch
# version: 2.13.0
# date: 2026-11-29
# behaviour: A policy of a selective checkpoint never sees aten.linear, which is taken apart before it is asked.
# expected: MUST_SAVE for torch.ops.aten.linear.default saves the results of linear layers.
# seen: The matrix product runs twice with MUST_SAVE for linear, once with MUST_SAVE for addmm.
# why: A policy that lists linear saves nothing, without an error; only the time tells. Without a bias the name is mm,
#      so both are needed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile torch==2.13.0 numpy==2.4.6
cat > "$folder/finding.py" <<'PYTHON'
from functools import partial

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

aten = torch.ops.aten


class Count(TorchDispatchMode):
    products = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.products += func is aten.addmm.default
        return func(*args, **(kwargs or {}))


def products(saved):
    def policy(context, operation, *args, **kwargs):
        return CheckpointPolicy.MUST_SAVE if operation is saved else CheckpointPolicy.PREFER_RECOMPUTE

    layer, x = torch.nn.Linear(8, 8), torch.randn(4, 8, requires_grad=True)
    with Count() as count:
        contexts = partial(create_selective_checkpoint_contexts, policy)
        checkpoint(lambda x: layer(x).sigmoid().exp(), x, use_reentrant=False, context_fn=contexts).sum().backward()
    return count.products


found = products(aten.linear.default), products(aten.addmm.default)
assert found == (2, 1), found
print("matrix products if linear, addmm must be saved", found)
PYTHON
cd "$folder" && venv/bin/python -W ignore finding.py
