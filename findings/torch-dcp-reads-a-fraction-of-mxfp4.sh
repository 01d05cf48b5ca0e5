#!/usr/bin/env bash
# torch.distributed.checkpoint: QuantizedHuggingFaceStorageReader reads 1 of 32 weights in MXFP4, and leaves the others.
# Packages: torch==2.13.0 safetensors==0.8.0 numpy packaging
# Expected: dcp.load fills the tensor with the dequantized weights of NAME_blocks and NAME_scales, or raises.
# Source: docstring of torch.distributed.checkpoint.QuantizedHuggingFaceStorageReader (dequantizes from quantized blocks
# to full tensors before copying to the target tensor); its _dequantize_tensor_mxfp4 (weights as in gpt-oss)
# Seen: the reader corrects the size of the tensor for the planner and not that of its chunk, whose third dimension is the
# number of groups of 32. For rows of 96 the plan reads 3 numbers; the other 93 keep what the tensor held before, an
# initialization in a real model. No error and no warning. FP8 in blocks of 128 is read in full. The same in 2.11.0 and
# 2.15.0.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
python3 -m venv "$dir/venv"
"$dir/venv/bin/python" -m pip install --quiet --no-compile torch==2.13.0 safetensors==0.8.0 numpy packaging
cat > "$dir/finding.py" <<'EOF'
import json
import tempfile

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch.distributed.checkpoint import QuantizedHuggingFaceStorageReader

HELD = 99.0


def read(tensors, name, shape):
    folder, file = tempfile.mkdtemp(), "model-00001-of-00001.safetensors"
    save_file(tensors, f"{folder}/{file}")
    with open(f"{folder}/model.safetensors.index.json", "w") as index:
        json.dump({"metadata": {}, "weight_map": {tensor: file for tensor in tensors}}, index)
    state = {name: torch.full(shape, HELD)}
    dcp.load(state, storage_reader=QuantizedHuggingFaceStorageReader(path=folder))
    return state[name]


print(f"torch {torch.__version__}")
one = 2  # the code of 1.0 in E2M1; a byte holds two
for columns in (64, 96):
    blocks = torch.full((2, 4, columns // 32, 16), one << 4 | one, dtype=torch.uint8)
    scales = torch.full((2, 4, columns // 32), 127, dtype=torch.uint8)
    weight = read({"w_blocks": blocks, "w_scales": scales}, "w_blocks", (2, 4, columns))
    counts = [(weight[0, 0] == value).sum().item() for value in (1.0, HELD)]
    print(f"MXFP4, rows of {columns}: {counts[0]} weights read, {counts[1]} as before")
    assert counts == [columns // 32, columns - columns // 32]
    assert (weight == weight[0, 0]).all()
codes = torch.ones(256, 256).to(torch.float8_e4m3fn)
weight = read({"w.weight": codes, "w.weight_scale_inv": torch.full((2, 2), 0.5)}, "w.weight", (256, 256))
print(f"FP8: {(weight == 0.5).sum().item()} of {weight.numel()} weights read")
assert (weight == 0.5).all()
EOF
TMPDIR=$dir "$dir/venv/bin/python" -W ignore "$dir/finding.py"
