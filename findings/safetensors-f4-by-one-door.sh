#!/usr/bin/env bash
# safetensors: a float4_e2m1fn_x2 or float8_e8m0fnu tensor that save() writes can be read by load_file alone.
# Packages: safetensors==0.8.0 torch==2.13.0 numpy packaging
# Expected: load(save(x)) is x, as for every other dtype, and a slice of a tensor in four bits can be read.
# Source: https://huggingface.co/docs/safetensors/api/torch (load: loads a safetensors file from pure bytes)
# Seen: load() raises KeyError 'F4' and 'F8_E8M0'; get_slice says twice the columns of the tensor and raises
# when it is read. load_file reads both dtypes.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
python3 -m venv "$dir/venv"
"$dir/venv/bin/python" -m pip install --quiet --no-compile safetensors==0.8.0 torch==2.13.0 numpy packaging
cat > "$dir/finding.py" <<'EOF'
import tempfile

import safetensors
import torch
from safetensors import safe_open
from safetensors.torch import load, load_file, save, save_file

four = torch.arange(32, dtype=torch.uint8).view(4, 8).view(torch.float4_e2m1fn_x2)
path = tempfile.mkdtemp() + "/x.safetensors"
for tensor, code in ((four, "F4"), (torch.ones(3).to(torch.float8_e8m0fnu), "F8_E8M0")):
    save_file({"x": tensor}, path)
    read = load_file(path)["x"]
    assert torch.equal(read.view(torch.uint8), tensor.view(torch.uint8))
    try:
        load(save({"x": tensor}))
        raise SystemExit(f"load() reads {code}")
    except KeyError as error:
        print(f"safetensors {safetensors.__version__}: load_file reads {tensor.dtype}, load raises KeyError {error}")
        assert error.args == (code,)
save_file({"x": four}, path)
with safe_open(path, "pt") as opened:
    part = opened.get_slice("x")
    print(f"shape {tuple(four.shape)}, of the slice {tuple(part.get_shape())}")
    assert part.get_shape() == [4, 16]
    try:
        part[:2]
        raise SystemExit("get_slice reads F4")
    except RuntimeError as error:
        print("reading the slice:", error)
EOF
"$dir/venv/bin/python" -W ignore "$dir/finding.py"
