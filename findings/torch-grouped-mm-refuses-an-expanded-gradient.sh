#!/usr/bin/env bash
# PyTorch: the backward of F.grouped_mm raises for the gradient of .sum(), which is expanded; torch.bmm takes it.
# Packages: torch==2.13.0 numpy
# Expected: y.sum().backward() works behind every product, as it does behind torch.mm and torch.bmm.
# Source: https://docs.pytorch.org/docs/stable/generated/torch.nn.functional.grouped_mm.html: differentiable
# Seen: RuntimeError: Invalid strides/sizes, got [0, 0] for strides. A sum, a mean and a bias' expanded gradient have
# such strides; (y * 1).sum() works. The same in 2.15.0.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
python3 -m venv "$dir/venv"
"$dir/venv/bin/python" -m pip install --quiet --no-compile torch==2.13.0 numpy
cat > "$dir/finding.py" <<'EOF'
import torch
import torch.nn.functional as F

x = torch.randn(64, 128).bfloat16().requires_grad_()
experts = torch.randn(2, 128, 96).bfloat16().requires_grad_()
ends = torch.tensor([32, 64], dtype=torch.int32)


def outcome(product, through=lambda y: y):
    try:
        through(product()).sum().backward()
    except RuntimeError as error:
        return str(error).partition(",")[0]
    return "runs"


found = {
    "bmm": outcome(lambda: torch.bmm(x.view(2, 32, 128), experts)),
    "grouped_mm": outcome(lambda: F.grouped_mm(x, experts, offs=ends)),
    "grouped_mm * 1": outcome(lambda: F.grouped_mm(x, experts, offs=ends), lambda y: y * 1),
}
print(f"torch {torch.__version__}: {found}")
assert found == {"bmm": "runs", "grouped_mm": "Invalid strides/sizes", "grouped_mm * 1": "runs"}
EOF
"$dir/venv/bin/python" -W ignore "$dir/finding.py"
