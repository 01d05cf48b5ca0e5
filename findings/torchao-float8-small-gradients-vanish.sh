#!/usr/bin/env bash
# torchao: dynamic float8 scaling floors amax at 1e-12, so smaller tensors lose bits, then become zero.
# Packages: torchao==0.18.0 torch==2.13.0 numpy
# Expected: dynamic scaling maps the largest element to 448 whatever its size: scale = 448 / amax, and fp32
# reaches 1e-38.
# Source: https://github.com/pytorch/ao/tree/main/torchao/float8 (README: dynamic scaling); the floor is EPS in
# float8_utils.py
# Seen: elements of 1e-16 are 4% off, those of 1e-18 are 0.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
python3 -m venv "$dir/venv"
"$dir/venv/bin/python" -m pip install --quiet --no-compile torchao==0.18.0 torch==2.13.0 numpy
cat > "$dir/finding.py" <<'EOF'
import torch
import torchao
from torchao.float8.float8_scaling_utils import hp_tensor_to_float8_dynamic
from torchao.float8.float8_training_tensor import LinearMMConfig

kept = {}
for size in (1.0, 1e-10, 1e-14, 1e-16, 1e-18):
    x = torch.full((16, 16), size)
    values = hp_tensor_to_float8_dynamic(x, torch.float8_e4m3fn, LinearMMConfig()).to_original_precision()
    kept[size] = values[0, 0].item() / size
    exact = x * (448 / x.double().max()).float()
    assert (exact.to(torch.float8_e4m3fn).float() == 448).all()  # a scale without a floor holds it
print(f"torchao {torchao.__version__}, share of the value that is left: {kept}")
assert abs(kept[1e-10] - 1) < 1e-6
assert 0.02 < abs(kept[1e-16] - 1) < 0.06
assert kept[1e-18] == 0
EOF
"$dir/venv/bin/python" -W ignore "$dir/finding.py"
