#!/usr/bin/env bash
# safetensors: save_file writes a conjugated or negated view without its bit: other values, no error.
# Packages: safetensors==0.8.0 torch==2.13.0 numpy packaging
# Expected: what load_file returns equals what save_file was given, as with torch.save.
# Source: https://huggingface.co/docs/safetensors/api/torch (save_file saves a dictionary of tensors)
# Seen: tensor.conj() is saved as the tensor before conj(), and the imaginary part of a conjugated tensor with
# the opposite sign: PyTorch keeps both lazily, as a bit beside the memory that is written.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
python3 -m venv "$dir/venv"
"$dir/venv/bin/python" -m pip install --quiet --no-compile safetensors==0.8.0 torch==2.13.0 numpy packaging
cat > "$dir/finding.py" <<'EOF'
import tempfile

import safetensors
import torch
from safetensors.torch import load_file, save_file

z = torch.tensor([1 + 2j, 3 - 4j])
cases = {"conj": z.conj(), "imaginary part of conj": z[:1].conj().imag}
path = tempfile.mkdtemp() + "/x.safetensors"
for name, tensor in cases.items():
    save_file({"x": tensor}, path)
    read = load_file(path)["x"]
    print(f"safetensors {safetensors.__version__}, {name}: saved {tensor.tolist()}, read {read.tolist()}")
    assert not torch.equal(read, tensor)
    assert torch.equal(read, tensor.conj() if tensor.is_complex() else -tensor)
    save_file({"x": tensor.resolve_conj().resolve_neg().clone()}, path)
    assert torch.equal(load_file(path)["x"], tensor)
EOF
"$dir/venv/bin/python" -W ignore "$dir/finding.py"
