#!/usr/bin/env bash
# compressed-tensors: the E8M0 scale code 255, which means NaN, decodes as infinity.
# Packages: compressed-tensors==0.20.1 torch==2.13.0 numpy
# Expected: a scale of 255 is NaN, and so is every element of its block; torch.float8_e8m0fnu decodes it so.
# Source: OCP Microscaling Formats (MX) v1.0: 0xFF is E8M0's NaN, and all values of a block with such a scale
# are NaN
# Seen: code 255 becomes 2**128, so an element 1 becomes inf and an element 0 becomes NaN: the block is partly
# infinite.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
python3 -m venv "$dir/venv"
"$dir/venv/bin/python" -m pip install --quiet --no-compile compressed-tensors==0.20.1 torch==2.13.0 numpy
cat > "$dir/finding.py" <<'EOF'
import compressed_tensors
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import preset_name_to_scheme

scheme = preset_name_to_scheme("MXFP8A16", ["Linear"])
scheme.format = "mxfp8-quantized"
codes = torch.zeros(1, 32)
codes[0, 0], codes[0, 1] = 1.0, -1.0
state = {"weight": codes.to(torch.float8_e4m3fn), "weight_scale": torch.full((1, 1), 255, dtype=torch.uint8)}
compressor = BaseCompressor.get_value_from_registry(scheme.format)
found = compressor.decompress(dict(state), scheme)["weight"][0, :3].tolist()
torchs = state["weight_scale"].view(torch.float8_e8m0fnu).float()
print(f"compressed-tensors {compressed_tensors.__version__}: elements 1, -1, 0 under scale 255 -> {found}; torch's scale {torchs.item()}")
assert torchs.isnan().all()
assert found[:2] == [float("inf"), -float("inf")]
EOF
"$dir/venv/bin/python" -W ignore "$dir/finding.py"
