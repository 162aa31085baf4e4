#!/usr/bin/env bash
# package: numba
# version: 0.68.1, with NumPy 2.4.6
# date: 2026-11-29
# behaviour: np.sum and np.mean of float32 in compiled code add up one after the other, in float32.
# expected: NumPy's result: pairwise sums, for np.mean too.
# seen: Of 2^25 ones the sum is 16777216 instead of 33554432, and the mean is 0.5 instead of 1.
# why: A mean over a large array is wrong by any factor, and no warning is given. Sum in float64.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile numba==0.68.1 numpy==2.4.6
cat > "$folder/finding.py" <<'PYTHON'
import numba
import numpy as np


@numba.njit
def compiled(x):
    return np.sum(x), np.mean(x)


ones = np.ones(2**25, np.float32)
found = *map(float, compiled(ones)), float(ones.sum()), float(ones.mean())
assert found == (2.0**24, 0.5, 2.0**25, 1.0), found
print("sum and mean, compiled and by NumPy", found)
PYTHON
cd "$folder" && venv/bin/python -W ignore finding.py
