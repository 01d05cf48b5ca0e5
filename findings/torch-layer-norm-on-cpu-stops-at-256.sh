#!/usr/bin/env bash
# torch: on a CPU the gradients of nn.LayerNorm's weight and bias are summed in bf16, and stop at 256 for each thread.
# Packages: torch==2.13.0 numpy
# Expected: the gradient of the bias is the sum of the output's gradients over the rows, as nn.GroupNorm with one group,
# which computes the same, and torch.compile give it: 4,096 for 4,096 rows of ones.
# Source: https://docs.pytorch.org/docs/stable/generated/torch.nn.LayerNorm.html (the formula, affine in weight and bias)
# Seen: 256 with one thread, in 4,096 rows as in 65,536, without a warning: 256 + 1 rounds to 256 in bf16. With two
# threads 512. fp32 parameters under a bf16 input do not help. fp16 stops at 2,048. The same in 2.15.0.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
python3 -m venv "$dir/venv"
"$dir/venv/bin/python" -m pip install --quiet --no-compile torch==2.13.0 numpy
cat > "$dir/finding.py" <<'EOF'
import torch


def of_bias(norm, dtype, threads=1, rows=4096):
    torch.set_num_threads(threads)
    y = norm(torch.randn(rows, 16, dtype=dtype))
    y.backward(torch.ones_like(y))
    return norm.bias.grad[0].item()


bf16, fp16 = torch.bfloat16, torch.float16
found = {
    "bf16, nn.GroupNorm(1, 16)": of_bias(torch.nn.GroupNorm(1, 16, dtype=bf16), bf16),
    "bf16, nn.LayerNorm(16)": of_bias(torch.nn.LayerNorm(16, dtype=bf16), bf16),
    "bf16, 65,536 rows": of_bias(torch.nn.LayerNorm(16, dtype=bf16), bf16, rows=65536),
    "bf16, two threads": of_bias(torch.nn.LayerNorm(16, dtype=bf16), bf16, threads=2),
    "bf16 input, fp32 parameters": of_bias(torch.nn.LayerNorm(16), bf16),
    "fp16": of_bias(torch.nn.LayerNorm(16, dtype=fp16), fp16),
    "fp32": of_bias(torch.nn.LayerNorm(16), torch.float32),
}
print(f"torch {torch.__version__}: the gradient of the bias, of 4,096 rows of ones")
for name, value in found.items():
    print(f"{name}: {value:g}")
assert list(found.values()) == [4096, 256, 256, 512, 256, 2048, 4096]
EOF
"$dir/venv/bin/python" -W ignore "$dir/finding.py"
