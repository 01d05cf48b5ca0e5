#!/usr/bin/env bash
# torchao: one CastConfig() given for input, weight and grad_output casts gradients to E4M3; three equal ones, to E5M2.
# Packages: torchao==0.18.0 torch==2.13.0 numpy
# Expected: CastConfig is a frozen dataclass; passing one object three times means what passing three equal objects
# means.
# Source: torchao/float8/config.py: target_dtype's default None "will be set based on the recipe"
# Seen: Float8LinearConfig writes the default dtype into the CastConfig that it was given, first E4M3 for the input;
# the gradient then finds a dtype and keeps it. Without an error, and the object's other uses change, too.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
python3 -m venv "$dir/venv"
"$dir/venv/bin/python" -m pip install --quiet --no-compile torchao==0.18.0 torch==2.13.0 numpy
cat > "$dir/finding.py" <<'EOF'
import torchao
from torchao.float8 import CastConfig, Float8LinearConfig

one = CastConfig()
names = ("cast_config_input", "cast_config_weight", "cast_config_grad_output")
shared = Float8LinearConfig(**dict.fromkeys(names, one))
apart = Float8LinearConfig(**{name: CastConfig() for name in names})
found = [config.cast_config_grad_output.target_dtype for config in (shared, apart)]
print(f"torchao {torchao.__version__}: gradients' dtype with one CastConfig, with three equal ones: {found}")
print(f"the CastConfig that was passed: {one}; one that was not: {CastConfig()}")
assert [str(dtype) for dtype in found] == ["torch.float8_e4m3fn", "torch.float8_e5m2"]
assert one != CastConfig()
EOF
"$dir/venv/bin/python" -W ignore "$dir/finding.py"
