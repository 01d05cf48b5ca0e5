#!/usr/bin/env bash
# ONNX Runtime: a cast to FP8 that must not saturate gives NaN above 464, 448 again from 480 to 495, then NaN again.
# Packages: onnxruntime==1.32.0 onnx==1.23.2 numpy==2.4.6 ml_dtypes==0.6.0
# Expected: with saturate=0 a number above the largest becomes NaN in E4M3FN and infinity in E5M2, as in ONNX's
# reference evaluator and in ml_dtypes.
# Source: https://onnx.ai/onnx/operators/onnx__Cast.html, the table of saturate=0: |x| > FLT_MAX is NaN for E4M3FN and
# Inf for E5M2
# Seen: 480 up to 496, the place of E4M3's NaN code, becomes the finite number 448: a part of the overflows is hidden.
# In E5M2 61,440 to 65,535 becomes NaN, and from 65,536 on infinity. QuantizeLinear does the same.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
python3 -m venv "$dir/venv"
"$dir/venv/bin/python" -m pip install --quiet --no-compile onnxruntime==1.32.0 onnx==1.23.2 numpy==2.4.6 ml_dtypes==0.6.0
cat > "$dir/finding.py" <<'EOF'
import ml_dtypes
import numpy as np
import onnxruntime
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator

onnxruntime.set_default_logger_severity(4)
print(f"onnxruntime {onnxruntime.__version__}, ml_dtypes {ml_dtypes.__version__}")


def both(op, dtype, values):
    scale = helper.make_tensor("scale", TensorProto.FLOAT, [], [1.0])
    zero = helper.make_tensor("zero", dtype, [], [0])
    nodes = {
        "Cast": helper.make_node("Cast", ["x"], ["y"], to=dtype, saturate=0),
        "QuantizeLinear": helper.make_node("QuantizeLinear", ["x", "scale", "zero"], ["y"], saturate=0),
    }
    graph = [nodes[op], helper.make_node("Cast", ["y"], ["z"], to=TensorProto.FLOAT)]
    x, z = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [None]) for name in "xz")
    graph = helper.make_graph(graph, "finding", [x], [z], [scale, zero])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 24)], ir_version=10)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, {"x": values})[0], ReferenceEvaluator(model).run(None, {"x": values})[0]


inf, nan = np.inf, np.nan
cases = {
    TensorProto.FLOAT8E4M3FN: ([448, 465, 479, 480, 495, 496, 1e9], [448, nan, nan, 448, 448, nan, nan]),
    TensorProto.FLOAT8E5M2: ([57344, 61439, 61440, 65535, 65536, 1e9], [57344, 57344, nan, nan, inf, inf]),
}
for dtype, (values, seen) in cases.items():
    values = np.array(values, np.float32)
    narrow = ml_dtypes.float8_e4m3fn if dtype == TensorProto.FLOAT8E4M3FN else ml_dtypes.float8_e5m2
    with np.errstate(all="ignore"):
        expected = values.astype(narrow).astype(np.float32)
    for op in ("Cast", "QuantizeLinear"):
        result, reference = both(op, dtype, values)
        print(op, narrow.__name__, [(f"{x:g}", f"{y:g}", f"ml_dtypes {e:g}") for x, y, e in zip(values, result, expected)])
        np.testing.assert_array_equal(result, seen)
    print("the reference evaluator's Cast:", both("Cast", dtype, values)[1])
EOF
"$dir/venv/bin/python" -W ignore "$dir/finding.py"
