#!/usr/bin/env bash
# accelerate: a float4_e2m1fn_x2 parameter has a size of 0 bytes in its device maps.
# Packages: accelerate==1.15.0 torch==2.13.0 numpy
# Expected: an element of float4_e2m1fn_x2 is one byte, as torch's itemsize says, so a module of a million
# elements weighs a million bytes.
# Source: https://huggingface.co/docs/accelerate (compute_module_sizes, infer_auto_device_map: sizes in bytes)
# Seen: dtype_byte_size reads the 2 of the name's x2 as bits, and returns 0. A device map puts every such weight
# on the first device.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
python3 -m venv "$dir/venv"
"$dir/venv/bin/python" -m pip install --quiet --no-compile accelerate==1.15.0 torch==2.13.0 numpy
cat > "$dir/finding.py" <<'EOF'
import accelerate
import torch
from accelerate.utils import infer_auto_device_map
from accelerate.utils.modeling import compute_module_sizes, dtype_byte_size
from torch import nn


def part(dtype):
    module = nn.Module()
    codes = torch.zeros(1024, 1024, dtype=torch.uint8).view(dtype)
    module.codes = nn.Parameter(codes, requires_grad=False)
    return module


limits = {0: 2 * 2**20, "cpu": 64 * 2**20}  # room for two of the eight
for dtype in (torch.float8_e4m3fn, torch.float4_e2m1fn_x2):
    model = nn.Sequential(*[part(dtype) for _ in range(8)])
    size, device_map = compute_module_sizes(model)[""], infer_auto_device_map(model, max_memory=dict(limits))
    on_first = sum(device == 0 for device in device_map.values()) if "" not in device_map else 8
    print(f"accelerate {accelerate.__version__}, {dtype}: {dtype.itemsize} byte, {dtype_byte_size(dtype)} here; {size} bytes in all; {on_first} of 8 on device 0")
    if dtype == torch.float8_e4m3fn:
        assert size == 8 * 2**20 and on_first <= 2
    else:
        assert dtype.itemsize == 1 and dtype_byte_size(dtype) == 0 and size == 0 and on_first == 8
EOF
"$dir/venv/bin/python" -W ignore "$dir/finding.py"
