#!/usr/bin/env bash
# unit-scaling: simulate_format with FPFormat(4, 3, rounding="nearest") rounds stochastically.
# Packages: unit-scaling==0.3.5 torch==2.13.0 numpy
# Expected: the inputs of a product are what FPFormat.quantise makes of them, and a second call gives the same result.
# Source: docstring of unit_scaling.transforms.simulate_format (fwd_format: the quantisation format to be used in the
# forward pass); unit_scaling.formats.FPFormat: rounding is "stochastic" or "nearest"
# Seen: the format is passed on as its two numbers of bits, and made anew with the default, stochastic rounding. The error
# is 1.4 times that of rounding to nearest, and no two calls agree. srbits, the bits of randomness, is lost, too.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
python3 -m venv "$dir/venv"
"$dir/venv/bin/python" -m pip install --quiet --no-compile unit-scaling==0.3.5 torch==2.13.0 numpy
cat > "$dir/finding.py" <<'EOF'
import torch
import unit_scaling
from torch import nn
from torch.nn.functional import linear
from unit_scaling.formats import FPFormat
from unit_scaling.transforms import simulate_format


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(256, 256, bias=False)

    def forward(self, x):
        return self.linear(x)


def off(result):
    return ((result - exact).norm() / exact.norm()).item()


print(f"unit-scaling {unit_scaling.__version__}, torch {torch.__version__}")
torch.manual_seed(0)
model, x = Model(), torch.randn(256, 256)
exact, nearest = model(x), FPFormat(4, 3, rounding="nearest")
by_hand = linear(nearest.quantise(x), nearest.quantise(model.linear.weight))
simulated = simulate_format(model, nearest, nearest)
first, second = simulated(x), simulated(x)
print(f"by quantise: off by {off(by_hand):.4f}; by simulate_format: {off(first):.4f} and {off(second):.4f}")
assert torch.equal(by_hand, linear(nearest.quantise(x), nearest.quantise(model.linear.weight)))
assert not torch.equal(first, second)
assert off(by_hand) < 0.04 and min(off(first), off(second)) > 1.3 * off(by_hand)
EOF
"$dir/venv/bin/python" -W ignore "$dir/finding.py"
