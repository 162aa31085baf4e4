#!/usr/bin/env bash
# package: pytrec-eval-terrier
# version: 0.5.11, with ranx 0.3.21 and numpy 2.4.6
# date: 2026-11-29
# behaviour: Scores of a run are rounded to float32 before they are ranked, and equal ones are ranked by the name of the
#            document, the last name first. ranx ranks the same dictionaries in float64, and equal scores as they were inserted.
# expected: Python's floats are compared as they are. Equal scores keep their order, or are averaged.
# seen: Of (a: 100000.001, b: 100000.0), a relevant, the reciprocal rank is 0.5, and 1.0 in ranx. Of four equal scores it is
#       0.25 for the relevant document "a" and 1.0 for "d".
# why: Sums of log-likelihoods and scores with a constant added differ by less than float32 holds: the names of documents
#      decide then, and a metric that was computed elsewhere in float64 disagrees.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile pytrec-eval-terrier==0.5.11 ranx==0.3.21 numpy==2.4.6
cat > "$folder/finding.py" <<'PYTHON'
import pytrec_eval
from ranx import Qrels, Run, evaluate


def there(relevant, run):
    judged = {"query": {name: int(name == relevant) for name in run}}
    measured = pytrec_eval.RelevanceEvaluator(judged, {"recip_rank"}).evaluate({"query": run})["query"]["recip_rank"]
    return measured, float(evaluate(Qrels(judged), Run({"query": run}), "mrr"))


close = there("a", {"a": 100000.001, "b": 100000.0})
equal = [there(name, dict.fromkeys("abcd", 1.0)) for name in "ad"]
assert (close, equal) == ((0.5, 1.0), [(0.25, 1.0), (1.0, 0.25)]), (close, equal)
print(close, equal)
PYTHON
cd "$folder" && venv/bin/python -W ignore finding.py
