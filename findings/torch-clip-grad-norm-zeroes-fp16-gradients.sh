#!/usr/bin/env bash
# PyTorch: clip_grad_norm_ turns finite fp16 gradients into zeros if their norm is above 65,504; fp32 and bf16 are clipped.
# Packages: torch==2.13.0 numpy
# Expected: gradients are scaled so that their norm is max_norm; all of them are finite, and so is their norm in fp32.
# Source: https://docs.pytorch.org/docs/stable/generated/torch.nn.utils.clip_grad_norm_.html
# Seen: the norm is returned in fp16, where it is infinite, and max_norm / infinity is 0: the step's gradients are
# gone, by default without an error. A million elements of 300 are enough. The same in 2.15.0.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
python3 -m venv "$dir/venv"
"$dir/venv/bin/python" -m pip install --quiet --no-compile torch==2.13.0 numpy
cat > "$dir/finding.py" <<'EOF'
import torch

found = {}
for dtype in (torch.float32, torch.bfloat16, torch.float16):
    weight = torch.nn.Parameter(torch.zeros(1_000_000, dtype=dtype))
    weight.grad = torch.full_like(weight, 300.0)
    norm = torch.nn.utils.clip_grad_norm_([weight], max_norm=1.0)
    found[dtype] = norm.item(), round(weight.grad.float().norm().item(), 2)
print(f"torch {torch.__version__}: (norm that is returned, norm after clipping to 1): {found}")
assert found[torch.float32][1] == 1.0 and 0.9 < found[torch.bfloat16][1] < 1.1
assert found[torch.float16] == (float("inf"), 0.0)
EOF
"$dir/venv/bin/python" -W ignore "$dir/finding.py"
