#!/usr/bin/env bash
# PyTorch and ml_dtypes: casts from float64 to bf16 and FP8 round twice, by way of float32; NumPy's own float16 does not.
# Packages: torch==2.13.0 numpy==2.4.6 ml_dtypes==0.6.0
# Expected: a cast rounds to the nearest number of the target: 1 + 2**-8 + 2**-40 lies above the middle between
# two bf16 numbers, so it goes up.
# Source: IEEE 754-2019, 4.3.1 (roundTiesToEven); numpy.float64.astype(numpy.float16) follows it
# Seen: the value becomes the middle in float32 and then rounds to even, down, in torch (bf16, fp16, E4M3) and
# ml_dtypes (bf16, E4M3). An fp64 oracle that ends in one of these casts is wrong.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
python3 -m venv "$dir/venv"
"$dir/venv/bin/python" -m pip install --quiet --no-compile torch==2.13.0 numpy==2.4.6 ml_dtypes==0.6.0
cat > "$dir/finding.py" <<'EOF'
import ml_dtypes
import numpy as np
import torch

TINY = 2.0**-40
cases = [("bf16", 1 + 2.0**-8, torch.bfloat16, ml_dtypes.bfloat16, 1 + 2.0**-7)]
cases += [("fp16", 1 + 2.0**-11, torch.float16, np.float16, 1 + 2.0**-10)]
cases += [("E4M3", 1 + 2.0**-4, torch.float8_e4m3fn, ml_dtypes.float8_e4m3fn, 1.125)]
for name, middle, dtype, numpys, nearest in cases:
    found = torch.tensor(middle + TINY, dtype=torch.float64).to(dtype).double().item()
    other = float(np.array([middle + TINY], np.float64).astype(numpys).astype(np.float64)[0])
    print(f"{name}: nearest {nearest}, torch {torch.__version__} {found}, NumPy or ml_dtypes {other}")
    assert found == 1.0 != nearest
    assert other == (nearest if name == "fp16" else 1.0)
EOF
"$dir/venv/bin/python" -W ignore "$dir/finding.py"
