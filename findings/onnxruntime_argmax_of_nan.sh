#!/usr/bin/env bash
# package: onnxruntime
# version: 1.32.0, with onnx 1.23.2
# date: 2026-11-29
# behaviour: ArgMax passes over NaN, unless it comes first, while TopK with k = 1 takes NaN as the largest.
# expected: ArgMax and TopK(1) agree, as in torch, where both give the position of NaN.
# seen: (1, NaN, 3, 2) has the ArgMax 2 and the TopK position 1; (NaN, 1, 3, 2) has 0 for both.
# why: An exported router gives a row with a NaN to another expert than torch does, depending on where the NaN is.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile onnxruntime==1.32.0 onnx==1.23.2 numpy==2.4.6
cat > "$folder/finding.py" <<'PYTHON'
import numpy as np
import onnxruntime
from onnx import TensorProto, helper


def run(node, outputs, x, constants=()):
    values = [helper.make_tensor_value_info(name, kind, None) for name, kind in outputs]
    graph = helper.make_graph(
        [node], "graph", [helper.make_tensor_value_info("x", TensorProto.FLOAT, [4])], values, list(constants)
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    return onnxruntime.InferenceSession(model.SerializeToString()).run(None, {"x": np.array(x, np.float32)})[-1][0]


def positions(x):
    k = helper.make_tensor("k", TensorProto.INT64, [1], [1])
    outputs = [("values", TensorProto.FLOAT), ("indices", TensorProto.INT64)]
    return (
        int(run(helper.make_node("ArgMax", ["x"], ["indices"], axis=0), outputs[1:], x)),
        int(run(helper.make_node("TopK", ["x", "k"], ["values", "indices"]), outputs, x, [k])),
    )


found = positions([1, np.nan, 3, 2]), positions([np.nan, 1, 3, 2])
assert found == ((2, 1), (0, 0)), found
print("ArgMax and TopK(1) with NaN second and first", found)
PYTHON
cd "$folder" && venv/bin/python -W ignore finding.py
