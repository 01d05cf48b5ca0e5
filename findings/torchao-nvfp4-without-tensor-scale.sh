#!/usr/bin/env bash
# torchao: NVFP4 by its default, without a scale of the tensor, turns weights of 1e-4 into zeros; with one, a zero tensor into NaN.
# Packages: torchao==0.18.0 torch==2.13.0 numpy
# Expected: a tensor of 1e-4 in NVFP4 is within a few percent, and a tensor of zeros is zeros, with one level of
# scales or two.
# Source: torchao/prototype/mx_formats/nvfp4_tensor.py: per_tensor_scale is optional;
# https://arxiv.org/abs/2509.25149 (NVFP4: E4M3 scales per 16 and an fp32 scale per tensor)
# Seen: E4M3 scales reach down to 2**-9, so blocks with an amax below 6 * 2**-10 vanish without an error.
# per_tensor_amax_to_scale(0) is 0, and 0 / 0 is NaN.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
python3 -m venv "$dir/venv"
"$dir/venv/bin/python" -m pip install --quiet --no-compile torchao==0.18.0 torch==2.13.0 numpy
cat > "$dir/finding.py" <<'EOF'
import torch
import torchao
from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor, per_tensor_amax_to_scale


def kept(size, two_levels):
    x = torch.full((32, 32), size)
    scale = per_tensor_amax_to_scale(x.abs().amax()) if two_levels else None
    return NVFP4Tensor.to_nvfp4(x, per_tensor_scale=scale).dequantize(torch.float32)[0, 0].item()


found = {(size, two): kept(size, two) for size in (1.0, 1e-4, 0.0) for two in (False, True)}
print(f"torchao {torchao.__version__}, value by (size, two levels): {found}")
assert abs(found[1.0, False] - 1.0) < 0.05 and found[1.0, True] == 1.0
assert found[1e-4, False] == 0.0
assert abs(found[1e-4, True] - 1e-4) < 1e-6
assert found[0.0, False] == 0.0
assert found[0.0, True] != found[0.0, True]
EOF
"$dir/venv/bin/python" -W ignore "$dir/finding.py"
