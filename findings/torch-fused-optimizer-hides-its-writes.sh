#!/usr/bin/env bash
# PyTorch: a fused optimizer does not count its writes, so a backward after its step is silently wrong.
# Packages: torch==2.13.0 numpy
# Expected: a second backward through a graph whose weights were stepped raises 'modified by an inplace
# operation', with every implementation of Adam.
# Source: https://docs.pytorch.org/docs/stable/notes/autograd.html (in-place correctness checks);
# torch.optim.Adam: fused is another implementation of the same step
# Seen: with fused=True the version counter of the weights stays, and the gradient mixes old activations with
# new weights, without an error. The other two raise.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
python3 -m venv "$dir/venv"
"$dir/venv/bin/python" -m pip install --quiet --no-compile torch==2.13.0 numpy
cat > "$dir/finding.py" <<'EOF'
import torch
from torch import nn


def second_backward(**options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.5, **options)
    loss = model(torch.ones(2, 4)).sum()
    loss.backward(retain_graph=True)
    first, version = model[0].weight.grad.clone(), model[0].weight._version
    optimizer.step()
    moved = model[0].weight._version - version
    optimizer.zero_grad()
    try:
        loss.backward()
    except RuntimeError as error:
        assert "modified by an inplace operation" in str(error)
        return moved, "raises"
    return moved, (model[0].weight.grad - first).abs().max().item()


for options in ({"foreach": False}, {"foreach": True}, {"fused": True}):
    moved, found = second_backward(**options)
    print(f"torch {torch.__version__}, {options}: version +{moved}, second backward: {found}")
    if "fused" in options:
        assert moved == 0 and found > 0.1
    else:
        assert moved == 1 and found == "raises"
EOF
"$dir/venv/bin/python" -W ignore "$dir/finding.py"
