#!/usr/bin/env bash
# PyTorch: AveragedModel of a bf16 model never moves with a decay of 0.999; of an fp32 model it follows.
# Packages: torch==2.13.0 numpy
# Expected: after 5,000 updates with decay 0.999 the average of a weight that went from 0.5 to 1 is 0.997.
# Source: https://docs.pytorch.org/docs/stable/optim.html#averaged-models-swa-and-ema
# Seen: the average is kept in the model's dtype; a thousandth of the difference is below half a step of bf16, and each
# update rounds back to 0.5. No error and no warning. The same in 2.15.0.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
python3 -m venv "$dir/venv"
"$dir/venv/bin/python" -m pip install --quiet --no-compile torch==2.13.0 numpy
cat > "$dir/finding.py" <<'EOF'
import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

found = {}
for dtype in (torch.float32, torch.bfloat16):
    model = torch.nn.Linear(4, 4, dtype=dtype)
    with torch.no_grad():
        model.weight.fill_(0.5)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.999))
    average.update_parameters(model)
    with torch.no_grad():
        model.weight.fill_(1.0)
    for _ in range(5000):
        average.update_parameters(model)
    found[dtype] = average.module.weight[0, 0].item()
print(f"torch {torch.__version__}: average of 0.5, then 5,000 times 1: {found}")
assert 0.99 < found[torch.float32] < 1.0
assert found[torch.bfloat16] == 0.5
EOF
"$dir/venv/bin/python" -W ignore "$dir/finding.py"
