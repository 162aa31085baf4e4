#!/usr/bin/env bash
# package: lightgbm
# version: 4.7.0, with xgboost 3.2.0 and numpy 2.4.6
# date: 2026-11-29
# behaviour: ndcg of equal scores takes the rows of a query in the order of the data set, and a query without a relevant
#            row counts as 1. XGBoost does both, too, unless the metric is written "ndcg@1-".
# expected: A model that tells no rows apart has the mean over all orders, 1/4 here, as in scikit-learn; a query without
#           relevant rows is left out or counts as 0.
# seen: ndcg@1 of a constant model is 1.0 if the relevant row comes first in each query, and 0.0 if it comes last. 49 of 50
#       queries without a relevant row, and the last one wrong: 0.98.
# why: Exported rankings are often sorted by relevance. Then early stopping keeps the first, empty trees.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile lightgbm==4.7.0 xgboost==3.2.0 numpy==2.4.6
cat > "$folder/finding.py" <<'PYTHON'
import lightgbm
import numpy as np
import xgboost

QUERIES = 50
SAME = np.zeros((4 * QUERIES, 1))  # a feature that tells nothing


def in_lightgbm(relevance):
    data = lambda: lightgbm.Dataset(SAME, relevance, group=[4] * QUERIES)
    found = {}
    parameters = {"objective": "lambdarank", "metric": "ndcg", "eval_at": [1], "verbosity": -1}
    record = [lightgbm.record_evaluation(found)]
    lightgbm.train(parameters, data(), 1, valid_sets=[data()], callbacks=record)
    return float(found["valid_0"]["ndcg@1"][0])


def in_xgboost(relevance, metric):
    data, found = xgboost.DMatrix(SAME, relevance), {}
    data.set_group([4] * QUERIES)
    parameters = {"objective": "rank:ndcg", "eval_metric": metric, "verbosity": 0}
    xgboost.train(parameters, data, 1, evals=[(data, "data")], evals_result=found, verbose_eval=False)
    return found["data"][metric][0]


first, last = np.tile([1, 0, 0, 0], QUERIES), np.tile([0, 0, 0, 1], QUERIES)
hardly = np.zeros(4 * QUERIES, dtype=int)
hardly[-1] = 1  # one query has a relevant row, at its end
found = [[in_lightgbm(y), in_xgboost(y, "ndcg@1"), in_xgboost(y, "ndcg@1-")] for y in (first, last, hardly)]
assert np.allclose(found, [[1, 1, 1], [0, 0, 0], [0.98, 0.98, 0]]), found
print(found)
PYTHON
cd "$folder" && venv/bin/python -W ignore finding.py
