#!/usr/bin/env bash
# PyTorch: Adafactor of bf16 weights takes an eighth of its step for gradients of 1e-3, and a thousandth for 1e-5.
# Packages: torch==2.13.0 numpy
# Expected: Adafactor divides a gradient by its root mean square, so the step does not depend on the gradients' size, in
# bf16 as in fp32. Gradients of a model are 1e-3 and less.
# Source: https://docs.pytorch.org/docs/stable/generated/torch.optim.Adafactor.html (epsilon1 improves numerical
# stability; default None)
# Seen: None stands for torch.finfo of the weights' dtype: 1.2e-7 in fp32, 0.0078 in bf16, below which the root mean
# square is not taken. With eps=(1.2e-7, 1e-3) bf16 steps as fp32 does. No error and no warning: the model trains as with
# a small learning rate. The same in 2.15.0.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
python3 -m venv "$dir/venv"
"$dir/venv/bin/python" -m pip install --quiet --no-compile torch==2.13.0 numpy
cat > "$dir/finding.py" <<'EOF'
import torch


def moved(dtype, size, **config):
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.zeros(256, 256, dtype=dtype))  # from 0, no step is lost to rounding
    optimizer = torch.optim.Adafactor([weight], weight_decay=0.0, **config)
    weight.grad = (torch.randn(256, 256) * size).to(dtype)
    optimizer.step()
    return weight.detach().float().norm().item()


print(f"torch {torch.__version__}")
whole = moved(torch.float32, 1.0)
for size, part in ((1.0, 1.0), (1e-3, 0.13), (1e-5, 0.0013)):
    steps = {
        "fp32": moved(torch.float32, size) / whole,
        "bf16": moved(torch.bfloat16, size) / whole,
        "bf16, eps of fp32": moved(torch.bfloat16, size, eps=(torch.finfo(torch.float32).eps, 1e-3)) / whole,
    }
    print(f"gradients of {size:g}, the step relative to fp32's of 1: {({k: round(v, 4) for k, v in steps.items()})}")
    assert abs(steps["fp32"] - 1) < 0.02 and abs(steps["bf16, eps of fp32"] - 1) < 0.02
    assert 0.9 * part < steps["bf16"] < 1.1 * part
EOF
"$dir/venv/bin/python" -W ignore "$dir/finding.py"
