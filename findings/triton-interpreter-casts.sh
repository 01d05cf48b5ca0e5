#!/usr/bin/env bash
# Triton's interpreter: casts to bf16 truncate, and casts to FP8 make infinity finite and finite numbers not finite.
# Packages: triton==3.9.0 torch==2.13.0 numpy
# Expected: x.to(tl.bfloat16) and x.to(tl.float8e4nv) round to the nearest number, ties to even, as tl.cast
# documents, and as the compiled kernel does.
# Source: https://triton-lang.org/main/python-api/generated/triton.language.cast.html (fp_downcast_rounding:
# default rtne)
# Seen: 1 + 2**-8 + 2**-9 becomes 1 in bf16; in E4M3 the tie 1.0625 goes up, 1.5 * 2**-10 becomes 0, 465 becomes
# 480 (the code of NaN), inf becomes 256 and NaN 384. Tests in the interpreter that compare such bits pass or
# fail for the wrong reason.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
python3 -m venv "$dir/venv"
"$dir/venv/bin/python" -m pip install --quiet --no-compile triton==3.9.0 torch==2.13.0 numpy
cat > "$dir/finding.py" <<'EOF'
import os

os.environ["TRITON_INTERPRET"] = "1"
import torch
import triton
import triton.language as tl


@triton.jit
def cast(x, y, DTYPE: tl.constexpr, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(y + at, tl.load(x + at).to(DTYPE).to(tl.float32))


def run(values, dtype):
    y = torch.empty(len(values))
    cast[(1,)](torch.tensor(values), y, dtype, len(values))
    return y.tolist()


above = 1 + 2.0**-8 + 2.0**-9
wide = run([above, -above], tl.bfloat16)
values = [1.0625, 1.5 * 2.0**-10, 465.0, float("inf")]
narrow = run(values, tl.float8e4nv)
nearest = torch.tensor(values).to(torch.float8_e4m3fn).float().tolist()
print(f"triton {triton.__version__}: bf16 of {above}: {wide[0]}; torch: {torch.tensor(above).bfloat16().item()}")
print(f"E4M3 of {values}: {narrow}; torch: {nearest}")
assert wide == [1.0, -1.0] and torch.tensor(above).bfloat16() == 1 + 2.0**-7
assert narrow == [1.125, 0.0, 480.0, 256.0]
assert nearest == [1.0, 2.0**-9, 448.0, 448.0]
EOF
"$dir/venv/bin/python" -W ignore "$dir/finding.py"
