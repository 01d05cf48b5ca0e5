#!/usr/bin/env bash
# PyTorch: an optimizer's step post hook runs for a step that wrote nothing, and twice for one step of ZeRO.
# Packages: torch==2.13.0 numpy
# Expected: a post hook runs once for each step that was taken, and not for a step that GradScaler skips.
# Source: https://docs.pytorch.org/docs/stable/generated/torch.optim.Optimizer.register_step_post_hook.html
# (called after optimizer step)
# Seen: after an infinity in a gradient GradScaler skips Adam (0 calls) but calls a fused Adam, which writes
# nothing (1 call). A global hook runs twice for ZeroRedundancyOptimizer, on two objects.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
python3 -m venv "$dir/venv"
"$dir/venv/bin/python" -m pip install --quiet --no-compile torch==2.13.0 numpy
cat > "$dir/finding.py" <<'EOF'
import tempfile

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

calls = []
register_optimizer_step_post_hook(lambda optimizer, *_: calls.append(type(optimizer).__name__))


def skipped(fused):
    calls.clear()
    weight = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.Adam([weight], fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale((weight * float("inf")).sum()).backward()
    scaler.step(optimizer)
    assert (weight == 1).all()
    return list(calls)


plain, fused = skipped(False), skipped(True)
print(f"torch {torch.__version__}: skipped step, for-loop {plain}, fused {fused}")
assert plain == [] and fused == ["Adam"]
dist.init_process_group("gloo", init_method=f"file://{tempfile.mkdtemp()}/store", rank=0, world_size=1)
weight = nn.Parameter(torch.ones(3))
zero = ZeroRedundancyOptimizer([weight], torch.optim.Adam, lr=0.1)
weight.grad = torch.ones(3)
calls.clear()
zero.step()
print(f"one step of ZeRO: {calls}")
assert calls == ["Adam", "ZeroRedundancyOptimizer"]
dist.destroy_process_group()
EOF
"$dir/venv/bin/python" -W ignore "$dir/finding.py"
