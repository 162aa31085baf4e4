#!/usr/bin/env bash
# package: triton
# version: 3.7.1 (its interpreter), with torch 2.13.0
# date: 2026-11-29
# behaviour: In the interpreter, tl.sort with a NaN returns other numbers than it was given, and tl.max passes over a
#            NaN that tl.argmax finds.
# expected: The same numbers in some order, as in NumPy and torch; and argmax is the position of the maximum.
# seen: (1, NaN, 3, 2) is sorted to (1, 1, 2, 3): the NaN is gone, a 1 is there twice. Its max is 3, at the position 1
#       of the NaN.
# why: A row with a NaN does not show up as one: the result is plausible. Kernels must look for NaN themselves.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile triton==3.7.1 torch==2.13.0 numpy==2.4.6
cat > "$folder/finding.py" <<'PYTHON'
import os

os.environ["TRITON_INTERPRET"] = "1"
import torch
import triton
import triton.language as tl


@triton.jit
def kernel(x_ptr, sorted_ptr, max_ptr, argmax_ptr, N: tl.constexpr):
    at = tl.arange(0, N)
    x = tl.load(x_ptr + at)
    tl.store(sorted_ptr + at, tl.sort(x))
    tl.store(max_ptr, tl.max(x, 0))
    tl.store(argmax_ptr, tl.argmax(x, 0))


in_order, largest, place = torch.zeros(4), torch.zeros(1), torch.zeros(1, dtype=torch.int32)
kernel[(1,)](torch.tensor([1.0, float("nan"), 3.0, 2.0]), in_order, largest, place, 4)
found = in_order.tolist(), largest.item(), place.item()
assert found == ([1.0, 1.0, 2.0, 3.0], 3.0, 1), found
print("sorted, max, argmax", found)
PYTHON
cd "$folder" && venv/bin/python -W ignore finding.py
