#!/usr/bin/env bash
# package: torch
# version: 2.13.0
# date: 2026-11-29
# behaviour: With dynamic=True, torch.compile cannot trace two calls of an autograd.Function whose methods read the same
#            float of a module; one call works, and so do two in a graph of fixed sizes.
# expected: What is traced once can be traced twice, and sizes have nothing to do with it.
# seen: AssertionError: lift_tracked_freevar_to_input should not be called on root SubgraphTracer. For dynamic graphs
#       a float is an input, which belongs to the first Function that reads it.
# why: Two layers with the same Function are usual. Functions get floats as arguments, read before, or use integers.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile torch==2.13.0 numpy==2.4.6
cat > "$folder/finding.py" <<'PYTHON'
import torch

SCALE = 2.5


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(x):
        return SCALE * x

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, grad):
        return SCALE * grad


def outcome(function, dynamic):
    torch._dynamo.reset()
    x = torch.ones(3, requires_grad=True)
    try:
        return torch.compile(function, dynamic=dynamic, fullgraph=True, backend="eager")(x).tolist()
    except AssertionError as error:
        return str(error).splitlines()[0]


once, twice = Scaled.apply, lambda x: Scaled.apply(x) + Scaled.apply(x)
found = [outcome(lambda x: once(x), True), outcome(twice, False), outcome(twice, True)]
assert found[:2] == [[2.5] * 3, [5.0] * 3] and found[2].startswith("lift_tracked_freevar_to_input"), found
print(found)
PYTHON
cd "$folder" && venv/bin/python -W ignore finding.py
