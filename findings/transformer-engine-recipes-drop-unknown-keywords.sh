#!/usr/bin/env bash
# Transformer Engine's recipes take any keyword and drop what they do not know: a setting has no effect, in silence.
# Packages: transformer-engine==2.20.2 pydantic==2.13.4
# Expected: TypeError, as dataclasses and functions raise for an unknown keyword. The recipes are documented as
# dataclasses with these parameters:
# https://docs.nvidia.com/deeplearning/transformer-engine/user-guide/api/common.html
# Seen: DelayedScaling(override_linear_precision=(False, False, True)) is made, and has no such attribute. Releases of
# 1.x had the parameter, which keeps weight gradients in high precision; Megatron-LM's core 0.19.2 still passes it for
# fp8_wgrad=False (megatron/core/extensions/transformer_engine.py, TEDelayedScaling), which therefore changes nothing.
# pydantic's dataclasses ignore what they do not know by default ("extra"), other than Python's own.
# The file of the recipes is loaded alone: it needs neither the package's compiled parts nor a GPU.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
python3 -m venv "$dir/venv"
"$dir/venv/bin/python" -m pip install --quiet --no-compile pydantic==2.13.4
"$dir/venv/bin/python" -m pip install --quiet --no-compile --no-deps transformer-engine==2.20.2
cat > "$dir/finding.py" <<'EOF'
import dataclasses
import importlib.metadata
import importlib.util
import sys

package = importlib.metadata.distribution("transformer-engine")
path = package.locate_file("transformer_engine/common/recipe/__init__.py")
spec = importlib.util.spec_from_file_location("recipe", path)
recipe = sys.modules["recipe"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(recipe)

made = recipe.DelayedScaling(amax_history_len=16, override_linear_precision=(False, False, True))
print(f"transformer-engine {package.version}, pydantic {importlib.metadata.version('pydantic')}")
print(f"made: {made}")
kept = hasattr(made, "override_linear_precision")
print(f"override_linear_precision kept: {kept}")
assert not kept and made.amax_history_len == 16


@dataclasses.dataclass
class Plain:
    amax_history_len: int = 1024


try:
    Plain(amax_history_len=16, override_linear_precision=(False, False, True))
except TypeError as error:
    print(f"a dataclass of Python's: {error}")
else:
    raise SystemExit("Python's dataclass took it, too")
EOF
"$dir/venv/bin/python" "$dir/finding.py"
