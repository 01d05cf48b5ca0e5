#!/usr/bin/env bash
# torch, the build without CUDA: a fake CUDA tensor can be narrowed, viewed and added to, but not indexed.
# Packages: torch==2.13.0+cpu (from https://download.pytorch.org/whl/cpu) numpy
# Expected: under FakeTensorMode x[:4] is x.narrow(0, 0, 4), x[0] is x.select(0, 0) and x[None] is x.unsqueeze(0): no
# data are touched, and a program can be traced for a device that the machine has not got. The build with CUDA does so
# on a machine without a GPU.
# Source: https://docs.pytorch.org/docs/2.13/torch.compiler_fake_tensor.html
# Seen: RuntimeError "PyTorch is not linked with support for cuda devices", from basic indexing alone; narrow, select,
# unsqueeze, view, split and arithmetic work. Indexing in Python guards the tensor's device before it dispatches.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
python3 -m venv "$dir/venv"
install() { "$dir/venv/bin/python" -m pip install --quiet --no-compile "$@" torch==2.13.0+cpu numpy; }
install 2>/dev/null || install --extra-index-url https://download.pytorch.org/whl/cpu
cat > "$dir/finding.py" <<'EOF'
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

pairs = {
    "x[:4]": (lambda x: x[:4], lambda x: x.narrow(0, 0, 4)),
    "x[0]": (lambda x: x[0], lambda x: x.select(0, 0)),
    "x[None]": (lambda x: x[None], lambda x: x.unsqueeze(0)),
    "x[..., 2]": (lambda x: x[..., 2], lambda x: x.select(-1, 2)),
}
print(f"torch {torch.__version__}, built with CUDA: {torch.backends.cuda.is_built()}")
for device in ("cpu", "cuda"):
    with FakeTensorMode():
        x = torch.empty(8, 16, device=device)
        for name, (indexed, called) in pairs.items():
            wanted = called(x).shape
            try:
                found = str(tuple(indexed(x).shape))
            except RuntimeError as error:
                found = str(error).splitlines()[0]
            print(f"fake {device} tensor, {name}: {found}; the method's: {tuple(wanted)}")
            if device == "cpu":
                assert found == str(tuple(wanted))
            else:
                assert "not linked with support for cuda" in found
EOF
"$dir/venv/bin/python" -W ignore "$dir/finding.py"
