#!/usr/bin/env bash
# Brevitas: MXInt8Weight clips every block to the power of two below its maximum: 1.9 becomes 0.99, and -1.9 becomes -1.
# Packages: brevitas==0.13.4 torch==2.13.0 numpy
# Expected: MXINT8 is finer than MXFP8: a normal weight is less than 1% off, and a block of 1.9 keeps 1.9.
# Source: https://xilinx.github.io/brevitas/v0.13.4/tutorials/minifloat_mx.html (MXInt and MXFloat standards); OCP
# Microscaling Formats (MX) v1.0: an element of MXINT8 is k / 64, up to 1.984 times the scale, the largest power of two
# in the block's maximum
# Seen: the elements are k / 128 of that power of two. A normal weight is 15% off, against 3% with MXFloat8e4m3Weight.
# MXInt8WeightMSE and the activations' MXInt8Act do the same.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
python3 -m venv "$dir/venv"
"$dir/venv/bin/python" -m pip install --quiet --no-compile brevitas==0.13.4 torch==2.13.0 numpy
cat > "$dir/finding.py" <<'EOF'
import brevitas
import torch
from brevitas.nn import QuantIdentity, QuantLinear
from brevitas.quant.mx_quant_ocp import MXFloat8e4m3Weight, MXInt8Act, MXInt8Weight, MXInt8WeightMSE


def quantized(weight, quantizer):
    layer = QuantLinear(weight.shape[1], weight.shape[0], bias=False, weight_quant=quantizer).eval()
    layer.weight.data = weight.clone()
    return layer.quant_weight().value.detach()


def off(result, weight):
    return ((result - weight).norm() / weight.norm()).item()


print(f"brevitas {brevitas.__version__}, torch {torch.__version__}")
block = torch.tensor([[1.9, -1.9] + [0.5] * 30])
found = quantized(block, MXInt8Weight)[0, :3].tolist()
print("1.9, -1.9 and 0.5:", found)
assert found == [127 / 128, -1.0, 0.5]
torch.manual_seed(0)
weight = torch.randn(64, 256)
errors = {one.__name__: off(quantized(weight, one), weight) for one in (MXFloat8e4m3Weight, MXInt8Weight, MXInt8WeightMSE)}
act = QuantIdentity(act_quant=MXInt8Act, group_dim=-1, return_quant_tensor=False).eval()
errors["MXInt8Act"] = off(act(weight), weight)
scale = torch.exp2(weight.unflatten(-1, (-1, 32)).abs().amax(-1, True).log2().floor()) / 64
by_the_standard = (weight.unflatten(-1, (-1, 32)) / scale).round().clamp(-127, 127) * scale
errors["MXINT8 of the standard"] = off(by_the_standard.flatten(-2), weight)
print("relative errors of a normal weight:", {name: round(error, 4) for name, error in errors.items()})
assert errors["MXINT8 of the standard"] < 0.01 and errors["MXFloat8e4m3Weight"] < 0.035
assert all(errors[name] > 0.1 for name in ("MXInt8Weight", "MXInt8WeightMSE", "MXInt8Act"))
EOF
"$dir/venv/bin/python" -W ignore "$dir/finding.py"
