#!/usr/bin/env bash
# torchao: under a default dtype of bf16 its 8-bit AdamW stops counting steps at 256; torch.optim.AdamW counts on.
# Packages: torchao==0.18.0 torch==2.13.0 numpy
# Expected: an optimizer's step count does not depend on torch.set_default_dtype, as torch.optim makes it fp32
# in any case.
# Source: https://github.com/pytorch/ao/tree/main/torchao/optim (README: drop-in replacements of torch.optim)
# Seen: the count is a bf16 tensor: 256 + 1 is 256 in bf16, so the bias correction of beta2 = 0.999 stays at
# step 256, and the step at step 2,000 is about half of what it should be.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
python3 -m venv "$dir/venv"
"$dir/venv/bin/python" -m pip install --quiet --no-compile torchao==0.18.0 torch==2.13.0 numpy
cat > "$dir/finding.py" <<'EOF'
import torch
import torchao
from torch import nn
from torchao.optim import AdamW8bit

torch.set_default_dtype(torch.bfloat16)
counts = {}
for make in (torch.optim.AdamW, AdamW8bit):
    weight = nn.Parameter(torch.ones(8, 8, dtype=torch.float32))
    optimizer = make([weight], lr=1e-5)
    for _ in range(300):
        weight.grad = torch.ones_like(weight)
        optimizer.step()
    counts[make.__name__] = optimizer.state[weight]["step"]
print(f"torchao {torchao.__version__}, after 300 steps: {counts}")
assert counts["AdamW"].dtype == torch.float32 and counts["AdamW"] == 300
assert counts["AdamW8bit"].dtype == torch.bfloat16 and counts["AdamW8bit"] == 256
EOF
"$dir/venv/bin/python" -W ignore "$dir/finding.py"
