#!/usr/bin/env bash
# ONNX: the reference evaluator's Cast to FLOAT8E8M0 gives NaN for infinity and 2**-126 for 2**-127, against its own table.
# Packages: onnx==1.23.2 numpy==2.4.6
# Expected: by default (saturate, round up) infinity becomes E8M0's largest, what is below its smallest, 2**-127, becomes
# that, and 2**-127 itself, which E8M0 holds, stays.
# Source: https://onnx.ai/onnx/operators/onnx__Cast.html, the table of FLOAT8E8M0: Inf -> E8M0_MAX, x < E8M0_MIN ->
# E8M0_MIN
# Seen: infinity becomes NaN; 2**-127 and 2**-128, subnormal numbers of fp32, become 2**-126: their mantissa is taken
# for a fraction that is to be rounded up.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
python3 -m venv "$dir/venv"
"$dir/venv/bin/python" -m pip install --quiet --no-compile onnx==1.23.2 numpy==2.4.6
cat > "$dir/finding.py" <<'EOF'
import numpy
import onnx
import onnx.helper as helper
import onnx.reference
from onnx import TensorProto

values = numpy.array([1.5, 2.0, 2.0**-126, 2.0**-127, 2.0**-128, numpy.inf], dtype=numpy.float32)
there = helper.make_node("Cast", ["x"], ["y"], to=TensorProto.FLOAT8E8M0)
back = helper.make_node("Cast", ["y"], ["z"], to=TensorProto.FLOAT)
ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [None]) for name in ("x", "z")]
graph = helper.make_graph([there, back], "cast", ends[:1], ends[1:])
model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 24)])
(found,) = onnx.reference.ReferenceEvaluator(model).run(None, {"x": values})
print(f"onnx {onnx.__version__}: {[(float(a), float(b)) for a, b in zip(values, found)]}")
assert found[:3].tolist() == [2.0, 2.0, 2.0**-126]
assert found[3:5].tolist() == [2.0**-126, 2.0**-126]
assert numpy.isnan(found[5])
EOF
"$dir/venv/bin/python" -W ignore "$dir/finding.py"
