#!/usr/bin/env bash
# torch.distributed.checkpoint: HuggingFaceStorageWriter with consolidation writes every tensor without dimensions as 0.
# Packages: torch==2.13.0 safetensors==0.8.0 numpy packaging
# Expected: the consolidated file holds the tensors that were saved, as the files without consolidation do: a weight in
# FP8 and its scale, torch.tensor(0.25).
# Source: https://docs.pytorch.org/docs/2.13/distributed.checkpoint.html (HuggingFaceStorageWriter: enable_consolidation
# consolidates the sharded checkpoint after saving)
# Seen: the loop that copies a shard stops before it starts where there is no dimension, and the buffer's zeros are
# written. A scale per tensor, a step count or a learned scalar is 0 in the file, and dcp.load reads it as 0. A scale of
# shape (1,) is right. No error and no warning. The same in 2.11.0 and 2.15.0.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
python3 -m venv "$dir/venv"
"$dir/venv/bin/python" -m pip install --quiet --no-compile torch==2.13.0 safetensors==0.8.0 numpy packaging
cat > "$dir/finding.py" <<'EOF'
import glob
import tempfile

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter

print(f"torch {torch.__version__}")
saved = {
    "weight": torch.full((2, 4), 4.0).to(torch.float8_e4m3fn),
    "weight_scale": torch.tensor(0.25),
    "input_scale": torch.tensor([0.5]),
}
for consolidate in (False, True):
    folder = tempfile.mkdtemp()
    writer = HuggingFaceStorageWriter(path=folder, save_distributed=True, enable_consolidation=consolidate)
    dcp.save(dict(saved), storage_writer=writer)
    (path,) = glob.glob(folder + "/*.safetensors")
    written = load_file(path)
    read = {name: torch.zeros_like(tensor) + 9 if tensor.itemsize > 1 else tensor.clone() for name, tensor in saved.items()}
    dcp.load(read, storage_reader=HuggingFaceStorageReader(path=folder))
    scales = {name: (written[name].tolist(), read[name].tolist()) for name in ("weight_scale", "input_scale")}
    weight = written["weight"].float() * written["weight_scale"]
    print(f"consolidation {consolidate}: scales in the file and read {scales}, the weight {weight[0, 0].item()}")
    assert scales["input_scale"] == ([0.5], [0.5])
    assert scales["weight_scale"] == ((0.0, 0.0) if consolidate else (0.25, 0.25))
    assert (weight == (0.0 if consolidate else 1.0)).all()
EOF
TMPDIR=$dir "$dir/venv/bin/python" -W ignore "$dir/finding.py"
