#!/usr/bin/env bash
# PyTorch: a cast of infinity to float8_e4m3fn gives 448, a finite number, on a CPU; other FP8 dtypes keep it.
# Packages: torch==2.13.0 numpy ml_dtypes==0.6.0
# Expected: E4M3 has no infinity, so infinity and values above 464 become NaN, as in ml_dtypes and in PyTorch up
# to 2.11, and an overflow stays visible.
# Source: the OCP 8-bit Floating Point Specification (OFP8): a conversion that does not saturate gives NaN;
# https://github.com/jax-ml/ml_dtypes (README, float8_e4m3fn)
# Seen: inf becomes 448 and 1e9 becomes 448 (since 2.12), while float8_e5m2 gives inf and float8_e4m3fnuz NaN:
# an overflow is silent in one dtype of four.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
python3 -m venv "$dir/venv"
"$dir/venv/bin/python" -m pip install --quiet --no-compile torch==2.13.0 numpy ml_dtypes==0.6.0
cat > "$dir/finding.py" <<'EOF'
import ml_dtypes
import numpy as np
import torch

values = [464.0, 465.0, 1e9, float("inf"), -float("inf")]
x = torch.tensor(values)
found = x.to(torch.float8_e4m3fn).float().tolist()
other = np.array(values, np.float32).astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
print(f"torch {torch.__version__}: {values} -> {found}; ml_dtypes {ml_dtypes.__version__}: {other.tolist()}")
assert found == [448.0, 448.0, 448.0, 448.0, -448.0]
assert other[0] == 448 and np.isnan(other[1:]).all()
infinite = x[3:]
print("float8_e5m2:", infinite.to(torch.float8_e5m2).float().tolist())
print("float8_e4m3fnuz:", infinite.to(torch.float8_e4m3fnuz).float().tolist())
assert infinite.to(torch.float8_e5m2).float().isinf().all()
assert infinite.to(torch.float8_e4m3fnuz).float().isnan().all()
EOF
"$dir/venv/bin/python" -W ignore "$dir/finding.py"
