#!/usr/bin/env bash
# torchao: conversion drops a Linear subclass's own forward, hooks of the module, and evaluation mode.
# Packages: torchao==0.18.0 torch==2.13.0 numpy
# Expected: a module whose forward is not nn.Linear's is left alone or refused, as its products are its own; hooks and
# mode stay.
# Source: docstring of torchao.float8.convert_to_float8_training: swaps torch.nn.Linear with Float8Linear
# Seen: a layer that doubles its output no longer does; a hook that zeroes the output is gone; a layer in evaluation
# mode is in training mode. No error and no warning.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
python3 -m venv "$dir/venv"
"$dir/venv/bin/python" -m pip install --quiet --no-compile torchao==0.18.0 torch==2.13.0 numpy
cat > "$dir/finding.py" <<'EOF'
import torch
import torchao
from torch import nn
from torchao.float8 import Float8LinearConfig, convert_to_float8_training


class Doubled(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


torch.manual_seed(0)
x, config = torch.randn(16, 32), Float8LinearConfig(emulate=True)
model = nn.Sequential(Doubled(32, 32))
before = model(x)
after = convert_to_float8_training(model, config=config)(x)
ratio = (after.norm() / before.norm()).item()
hooked = nn.Sequential(nn.Linear(32, 32))
hooked[0].register_forward_hook(lambda module, args, out: torch.zeros_like(out))
zeroed = not convert_to_float8_training(hooked, config=config)(x).any()
evaluated = convert_to_float8_training(nn.Sequential(nn.Linear(32, 32)).eval(), config=config)
print(f"torchao {torchao.__version__}: doubled after/before {ratio:.3f}; hook runs: {zeroed}; mode: {evaluated[0].training}")
assert 0.45 < ratio < 0.55
assert not zeroed
assert evaluated.training is False and evaluated[0].training is True
EOF
"$dir/venv/bin/python" -W ignore "$dir/finding.py"
