#!/usr/bin/env bash
# torch.compile: of two constants of one name, in two modules that a user's Triton kernel reaches, compiled code has one.
# Packages: torch==2.15.0 triton==3.9.0 numpy
# Expected: a Triton function reads the constants of its own module in a compiled graph, as it does when Triton runs it.
# Source: https://docs.pytorch.org/tutorials/recipes/torch_compile_user_defined_triton_kernel_tutorial.html
# Seen: Inductor writes the kernel and all it reaches into one file, and knows functions and constants by their names
# alone. The first of a name wins and nothing is said: `tenfold` multiplies by 2, where Triton's own code multiplies by
# 10. No GPU is needed, for the text that Inductor writes shows it. 2.11.0 with Triton 3.6.0 does the same.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
python3 -m venv "$dir/venv"
"$dir/venv/bin/python" -m pip install --quiet --no-compile torch==2.15.0 triton==3.9.0 numpy
cat > "$dir/twos.py" <<'EOF'
import triton
import triton.language as tl

FACTOR = tl.constexpr(2.0)


@triton.jit
def twice(x):
    return x * FACTOR
EOF
sed 's/2\.0/10.0/; s/twice/tenfold/' "$dir/twos.py" > "$dir/tens.py"
cat > "$dir/kernels.py" <<'EOF'
import triton
import triton.language as tl
from tens import tenfold
from twos import twice


@triton.jit
def kernel(x_ptr, y_ptr, z_ptr):
    x = tl.load(x_ptr)
    tl.store(y_ptr, twice(x))
    tl.store(z_ptr, tenfold(x))
EOF
cat > "$dir/finding.py" <<'EOF'
import kernels
import tens
import torch
import triton
import twos
from torch._inductor.codegen.wrapper import user_defined_triton_kernel_transitive_closure_source_code as copied

print(f"torch {torch.__version__}, triton {triton.__version__}")
text = copied(kernels.kernel)
constants = [line for line in text.splitlines() if line.startswith("FACTOR")]
print("the modules:", twos.FACTOR.value, tens.FACTOR.value, "- what Inductor writes:", constants)
assert (twos.FACTOR.value, tens.FACTOR.value) == (2.0, 10.0)
assert "def twice" in text and "def tenfold" in text
assert len(constants) == 1 and "2.0" in constants[0]
EOF
PYTHONPATH=$dir TRITON_INTERPRET=0 "$dir/venv/bin/python" -W ignore "$dir/finding.py"
