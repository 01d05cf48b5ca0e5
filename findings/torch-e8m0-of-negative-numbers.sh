#!/usr/bin/env bash
# PyTorch: a cast of -1 to float8_e8m0fnu gives +1, and of 0 gives 2**-127; ml_dtypes gives NaN for both.
# Packages: torch==2.13.0 numpy ml_dtypes==0.6.0
# Expected: E8M0 has neither a sign nor a zero, and NaN has a code, so numbers that it cannot hold become NaN.
# Source: OCP Microscaling Formats (MX) v1.0 on E8M0; the ml_dtypes README says of float8_e8m0fnu: no zero, no
# sign, one NaN
# Seen: PyTorch drops the sign and turns 0 into the smallest scale, without an error; 3.4e38, above the range,
# does become NaN.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
python3 -m venv "$dir/venv"
"$dir/venv/bin/python" -m pip install --quiet --no-compile torch==2.13.0 numpy ml_dtypes==0.6.0
cat > "$dir/finding.py" <<'EOF'
import ml_dtypes
import numpy as np
import torch

values = [-1.0, -6.0, 0.0, 3.4e38, 1.5]
torchs = torch.tensor(values).to(torch.float8_e8m0fnu).float()
others = np.array(values, np.float32).astype(ml_dtypes.float8_e8m0fnu).astype(np.float32)
print(f"torch {torch.__version__}: {values} -> {torchs.tolist()}")
print(f"ml_dtypes {ml_dtypes.__version__}: {others.tolist()}")
assert torchs[:3].tolist() == [1.0, 8.0, 2.0**-127]
assert torchs[3].isnan() and torchs[4] == 2
assert np.isnan(others[:4]).all() and others[4] == 2
EOF
"$dir/venv/bin/python" -W ignore "$dir/finding.py"
