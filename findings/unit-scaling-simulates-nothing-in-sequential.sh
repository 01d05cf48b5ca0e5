#!/usr/bin/env bash
# unit-scaling: simulate_fp8 of nn.Sequential, nn.Linear or a transformer layer of PyTorch returns a model in full precision.
# Packages: unit-scaling==0.3.5 torch==2.13.0 numpy
# Expected: the products' inputs are rounded to E4M3, and the results are a few percent off, whichever module is given.
# Source: docstring of unit_scaling.transforms.simulate_fp8: models that use modules with torch.nn.functional.linear
# inside (such as torch.nn.Linear) are inspected by TorchDynamo and have the correct quantisation ops inserted
# Seen: TorchDynamo does not trace the forward of a class of torch.nn that is called first, so nothing is inserted and
# results are equal, bit by bit. The same layers inside a module of the user's are simulated. No error and no warning: a
# study finds that FP8 costs nothing. The same with 2.11.0 and 2.15.0.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
python3 -m venv "$dir/venv"
"$dir/venv/bin/python" -m pip install --quiet --no-compile unit-scaling==0.3.5 torch==2.13.0 numpy
cat > "$dir/finding.py" <<'EOF'
import unit_scaling
import torch
from torch import nn
from unit_scaling.transforms import simulate_fp8


class Around(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer(x)


print(f"unit-scaling {unit_scaling.__version__}, torch {torch.__version__}")
torch.manual_seed(0)
x = torch.randn(2, 8, 64)
for layer in (
    nn.Linear(64, 64),
    nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)),
    nn.TransformerEncoderLayer(64, 4, dropout=0.0, batch_first=True),
):
    exact = layer(x)
    off = [((simulate_fp8(model)(x) - exact).norm() / exact.norm()).item() for model in (layer, Around(layer))]
    print(f"{type(layer).__name__}: off by {off[0]:.4f} as it is, {off[1]:.4f} in a module of the user's")
    assert off[0] == 0 and off[1] > 0.01
EOF
"$dir/venv/bin/python" -W ignore "$dir/finding.py"
