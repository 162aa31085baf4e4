#!/usr/bin/env bash
# package: torch
# version: 2.13.0
# date: 2026-11-29
# behaviour: What MultiheadAttention gives a query that may attend to nothing depends on need_weights: NaN with the
#            weights, 0 without.
# expected: The weights are an extra result and change no value; and softmax of nothing but -inf is NaN, in attention
#           too.
# seen: The query's row is NaN for need_weights=True (the default) and 0 for False; scaled_dot_product_attention gives
#       0.
# why: A model that was trained without weights gives NaN as soon as somebody looks at them.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile torch==2.13.0 numpy==2.4.6
cat > "$folder/finding.py" <<'PYTHON'
import torch

torch.manual_seed(0)
x, closed = torch.randn(1, 2, 4), torch.tensor([[False, False], [True, True]])
attention = torch.nn.MultiheadAttention(4, 1, batch_first=True)
with_weights = attention(x, x, x, attn_mask=closed, need_weights=True)[0][0, 1]
without = attention(x, x, x, attn_mask=closed, need_weights=False)[0][0, 1]
plain = torch.nn.functional.scaled_dot_product_attention(x, x, x, attn_mask=~closed)[0, 1]
assert with_weights.isnan().all() and not without.any() and not plain.any(), (with_weights, without, plain)
print("with weights", with_weights.tolist(), "without", without.tolist(), "scaled_dot_product_attention", plain.tolist())
PYTHON
cd "$folder" && venv/bin/python -W ignore finding.py
