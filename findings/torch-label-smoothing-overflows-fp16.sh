#!/usr/bin/env bash
# PyTorch: F.cross_entropy with label_smoothing is infinite for fp16 logits of 32,000 classes; without it, it is right.
# Packages: torch==2.13.0 numpy
# Expected: smoothing adds a tenth of the mean of -log p over the classes, about 11, to nine tenths of a loss of about 11;
# both fit into fp16.
# Source: https://docs.pytorch.org/docs/stable/generated/torch.nn.CrossEntropyLoss.html (label_smoothing in [0.0, 1.0]:
# the targets become a mixture of the targets and a uniform distribution)
# Seen: the sum over the classes is rounded to fp16 before it is divided by their number: 32,000 * 11 is above 65,504, and
# 7,500 classes are enough. Already one token is infinite, with reduction="none", too. The gradients are finite and right:
# only what looks at the loss, a scaler's or a trainer's check, stops or skips the step. The same in 2.15.0.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
python3 -m venv "$dir/venv"
"$dir/venv/bin/python" -m pip install --quiet --no-compile torch==2.13.0 numpy
cat > "$dir/finding.py" <<'EOF'
import torch
from torch.nn.functional import cross_entropy

print(f"torch {torch.__version__}")
torch.manual_seed(0)
target = torch.zeros(1, dtype=torch.long)
logits = {classes: torch.randn(1, classes) for classes in (5000, 7500, 32000)}


def loss_and_gradient(classes, dtype, **config):
    x = logits[classes].to(dtype, copy=True).requires_grad_()
    loss = cross_entropy(x, target, **config)
    loss.sum().backward()
    return loss.sum().item(), x.grad.float()


for classes in logits:
    exact, gradient = loss_and_gradient(classes, torch.float32, label_smoothing=0.1)
    plain, _ = loss_and_gradient(classes, torch.float16)
    each, _ = loss_and_gradient(classes, torch.float16, label_smoothing=0.1, reduction="none")
    smooth, half_gradient = loss_and_gradient(classes, torch.float16, label_smoothing=0.1)
    bf16, _ = loss_and_gradient(classes, torch.bfloat16, label_smoothing=0.1)
    print(f"{classes} classes: fp32 {exact:.3f}, bf16 {bf16:.3f}, fp16 {smooth:.3f}, without smoothing {plain:.3f}")
    assert abs(plain - exact) < 0.5 and abs(bf16 - exact) < 0.1
    assert torch.allclose(half_gradient, gradient, atol=1e-3)
    assert smooth == each
    assert smooth == float("inf") if classes > 7000 else abs(smooth - exact) < 0.05
EOF
"$dir/venv/bin/python" -W ignore "$dir/finding.py"
