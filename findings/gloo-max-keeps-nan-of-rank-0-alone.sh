#!/usr/bin/env bash
# PyTorch: all_reduce(MAX) over gloo keeps a NaN of rank 0 and loses a NaN of rank 1.
# Packages: torch==2.13.0 numpy
# Expected: a NaN on any rank is NaN in the result, as torch.amax and torch.maximum propagate it, or is ignored
# on every rank.
# Source: https://docs.pytorch.org/docs/stable/generated/torch.maximum.html (if one of the elements is a NaN,
# NaN is returned); torch.distributed documents no rule for ReduceOp.MAX
# Seen: the same two numbers give NaN or 1, by the rank that holds the NaN, in fp32, bf16 and fp16. An amax that
# is reduced so hides the NaN of most ranks.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
python3 -m venv "$dir/venv"
"$dir/venv/bin/python" -m pip install --quiet --no-compile torch==2.13.0 numpy
cat > "$dir/finding.py" <<'EOF'
import os
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def reduced(mine, dtype):
    x = torch.full((4,), mine, dtype=dtype)
    dist.all_reduce(x, dist.ReduceOp.MAX)
    return x[0].item()


def main(rank, store):
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        first = reduced(float("nan") if rank == 0 else 1.0, dtype)
        second = reduced(float("nan") if rank == 1 else 1.0, dtype)
        if rank == 0:
            print(f"torch {torch.__version__}, {dtype}: NaN on rank 0 -> {first}, NaN on rank 1 -> {second}")
        assert first != first and second == 1.0
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    mp.spawn(main, (tempfile.mkdtemp() + "/store",), 2)
EOF
"$dir/venv/bin/python" -W ignore "$dir/finding.py"
