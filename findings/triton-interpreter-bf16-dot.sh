#!/usr/bin/env bash
# Triton's interpreter: tl.dot of bf16 blocks multiplies their bit patterns.
# Packages: triton==3.9.0 torch==2.13.0 numpy
# Expected: tl.dot of two bf16 blocks is their matrix product, in the interpreter as on a GPU.
# Source: https://triton-lang.org/main/python-api/generated/triton.language.dot.html (input types include
# bfloat16)
# Seen: the identity times ones gives 16256 * 16256 for each element: 16256 is 0x3F80, the bits of 1.0. fp16 and
# fp32 are right.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
python3 -m venv "$dir/venv"
"$dir/venv/bin/python" -m pip install --quiet --no-compile triton==3.9.0 torch==2.13.0 numpy
cat > "$dir/finding.py" <<'EOF'
import os

os.environ["TRITON_INTERPRET"] = "1"
import torch
import triton
import triton.language as tl


@triton.jit
def multiply(x, y, z, N: tl.constexpr):
    at = tl.arange(0, N)[:, None] * N + tl.arange(0, N)[None, :]
    tl.store(z + at, tl.dot(tl.load(x + at), tl.load(y + at)))


def run(dtype):
    z = torch.empty(16, 16)
    multiply[(1,)](torch.eye(16, dtype=dtype), torch.ones(16, 16, dtype=dtype), z, 16)
    return z


found = {dtype: run(dtype) for dtype in (torch.float32, torch.float16, torch.bfloat16)}
for dtype, z in found.items():
    print(f"triton {triton.__version__}, {dtype}: identity times ones has elements {z.unique().tolist()}")
assert (found[torch.float32] == 1).all() and (found[torch.float16] == 1).all()
assert (found[torch.bfloat16] == 0x3F80**2).all()
EOF
"$dir/venv/bin/python" -W ignore "$dir/finding.py"
