#!/usr/bin/env bash
# PyTorch: torch.func.grad and jvp of an operator with a CPU kernel alone are zero, where backward is right.
# Packages: torch==2.13.0 numpy
# Expected: torch.func.grad(f) equals the gradient that f(x).backward() leaves, or raises.
# Source: https://docs.pytorch.org/docs/stable/func.whirlwind_tour.html (grad); torch.library.custom_op without
# a formula does raise
# Seen: an operator of torch.library with a kernel that calls differentiable operators has the right gradient in
# eager autograd, and zeros under torch.func.grad and torch.func.jvp, without a warning.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
python3 -m venv "$dir/venv"
"$dir/venv/bin/python" -m pip install --quiet --no-compile torch==2.13.0 numpy
cat > "$dir/finding.py" <<'EOF'
import torch

library = torch.library.Library("finding", "DEF")
library.define("square(Tensor x) -> Tensor")
library.impl("square", lambda x: x * x, "CPU")
square = torch.ops.finding.square

x = torch.tensor(3.0, requires_grad=True)
square(x).backward()
of_func = torch.func.grad(square)(torch.tensor(3.0))
value, tangent = torch.func.jvp(square, (torch.tensor(3.0),), (torch.tensor(1.0),))
print(f"torch {torch.__version__}: backward {x.grad.item()}, func.grad {of_func.item()}, jvp {tangent.item()}")
assert x.grad == 6
assert of_func == 0
assert value == 9 and tangent == 0
EOF
"$dir/venv/bin/python" -W ignore "$dir/finding.py"
