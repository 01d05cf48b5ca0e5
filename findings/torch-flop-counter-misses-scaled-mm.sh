#!/usr/bin/env bash
# PyTorch: FlopCounterMode counts no operation of F.scaled_mm and F.grouped_mm; of torch._scaled_mm it counts all.
# Packages: torch==2.13.0 numpy
# Expected: a product of 64x128 by 128x96 has 2 * 64 * 128 * 96 operations, whichever function computes it.
# Source: https://docs.pytorch.org/docs/stable/nn.functional.html (scaled_mm, grouped_mm: matrix products);
# torch/utils/flop_counter.py: the registry of operators
# Seen: the public functions count 0, so the FLOPs of an FP8 model or of a mixture of experts are too few, without a
# word. The same in 2.15.0.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
python3 -m venv "$dir/venv"
"$dir/venv/bin/python" -m pip install --quiet --no-compile torch==2.13.0 numpy
cat > "$dir/finding.py" <<'EOF'
import torch
import torch.nn.functional as F
from torch.nn.functional import ScalingType
from torch.utils.flop_counter import FlopCounterMode

a, b, one = torch.randn(64, 128), torch.randn(96, 128), torch.ones(())
a8, b8 = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn)
experts, ends = torch.randn(2, 128, 96).bfloat16(), torch.tensor([16, 64], dtype=torch.int32)
calls = {
    "a @ b": lambda: a @ b.t(),
    "torch._scaled_mm": lambda: torch._scaled_mm(a8, b8.t(), one, one, out_dtype=torch.bfloat16),
    "F.scaled_mm": lambda: F.scaled_mm(
        a8, b8.t(), one, ScalingType.TensorWise, one, ScalingType.TensorWise, output_dtype=torch.bfloat16
    ),
    "F.grouped_mm": lambda: F.grouped_mm(a.bfloat16(), experts, offs=ends),
}
found = {}
for name, call in calls.items():
    with FlopCounterMode(display=False) as counter:
        assert call().shape == (64, 96)
    found[name] = counter.get_total_flops()
print(f"torch {torch.__version__}: {found}")
whole = 2 * 64 * 128 * 96
assert found == {"a @ b": whole, "torch._scaled_mm": whole, "F.scaled_mm": 0, "F.grouped_mm": 0}
EOF
"$dir/venv/bin/python" -W ignore "$dir/finding.py"
