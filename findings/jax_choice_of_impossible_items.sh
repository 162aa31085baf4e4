#!/usr/bin/env bash
# package: jax
# version: 0.10.2
# date: 2026-11-29
# behaviour: jax.random.choice(replace=False, p=p) draws items of probability 0 if fewer others are left than were
#            asked for.
# expected: An error, as in NumPy ("Fewer non-zero entries in p than size").
# seen: Three of five items with p = (0.5, 0.5, 0, 0, 0): the third is item 2 with every key.
# why: A mask by zero probabilities is broken in silence where a row has too few items left.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile jax==0.10.2 jaxlib==0.10.2 numpy==2.4.6
cat > "$folder/finding.py" <<'PYTHON'
import jax
import numpy as np

p = np.array([0.5, 0.5, 0.0, 0.0, 0.0], np.float32)
draws = [jax.random.choice(jax.random.key(i), 5, (3,), replace=False, p=p).tolist() for i in range(20)]
try:
    np.random.default_rng(0).choice(5, 3, replace=False, p=p)
    numpy = "draws"
except ValueError as error:
    numpy = str(error)
assert all(draw[2] == 2 for draw in draws) and numpy.startswith("Fewer non-zero"), (draws, numpy)
print("third item", {draw[2] for draw in draws}, "NumPy:", numpy)
PYTHON
cd "$folder" && venv/bin/python -W ignore finding.py
