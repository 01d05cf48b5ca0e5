#!/usr/bin/env bash
# PyTorch: 448 / x is not torch.div(448, x): a quarter of the quotients differ in the last bit.
# Packages: torch==2.13.0 numpy
# Expected: a number divided by a tensor is the IEEE quotient, as torch.div and NumPy give it, so that a scale
# of FP8 is 448 / amax rounded once.
# Source: https://docs.pytorch.org/docs/stable/generated/torch.div.html (true division)
# Seen: 448 / x equals x.reciprocal() * 448, rounded twice; 25% of fp32 quotients are one unit off.
# torch.div(448, x) is exact.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
python3 -m venv "$dir/venv"
"$dir/venv/bin/python" -m pip install --quiet --no-compile torch==2.13.0 numpy
cat > "$dir/finding.py" <<'EOF'
import numpy as np
import torch

x = torch.rand(100_000, generator=torch.Generator().manual_seed(0)) + 0.5
exact = torch.from_numpy(np.float32(448) / x.numpy())
operator, function = 448 / x, torch.div(448, x)
off = (operator != exact).float().mean().item()
print(f"torch {torch.__version__}: 448 / x is off for {off:.1%}, torch.div(448, x) for {(function != exact).float().mean():.1%}")
assert torch.equal(operator, x.reciprocal() * 448)
assert torch.equal(function, exact)
assert 0.2 < off < 0.3
EOF
"$dir/venv/bin/python" -W ignore "$dir/finding.py"
