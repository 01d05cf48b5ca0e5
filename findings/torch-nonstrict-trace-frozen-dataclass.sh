#!/usr/bin/env bash
# torch: a frozen dataclass that is registered as a constant cannot be given to a nonstrict_trace function; a class can.
# Packages: torch==2.13.0 numpy
# Expected: inputs may be of user-defined classes registered with torch.utils._pytree.register_constant, whose examples
# and requirement (__eq__ and __hash__) a frozen dataclass fulfills; and of Python primitives and containers.
# Source: docstrings of torch._dynamo.nonstrict_trace and of torch.utils._pytree.register_constant
# Seen: a plain class with __eq__ and __hash__ compiles; a frozen dataclass with the same field raises
# InternalTorchDynamoError "currently can't reconstruct arbitrary frozen dataclass instances" (2.11 to 2.15). None as an
# argument is refused as an invalid input type (2.11, 2.13; not 2.15), which torch.compiler.allow_in_graph takes.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
python3 -m venv "$dir/venv"
"$dir/venv/bin/python" -m pip install --quiet --no-compile torch==2.13.0 numpy
cat > "$dir/finding.py" <<'EOF'
import dataclasses

import torch
from torch.utils import _pytree as pytree


class Plain:
    def __init__(self, scale):
        self.scale = scale

    def __eq__(self, other):
        return self.scale == other.scale

    def __hash__(self):
        return hash(self.scale)


@dataclasses.dataclass(frozen=True)
class Frozen:
    scale: float


pytree.register_constant(Plain)
pytree.register_constant(Frozen)


def multiplied(x, how):
    return x * (2.0 if how is None else how.scale)


nonstrict = torch._dynamo.nonstrict_trace(multiplied)
allowed = torch.compiler.allow_in_graph(lambda x, how: multiplied(x, how))


def result(function, how):
    torch._dynamo.reset()
    try:
        return torch.compile(lambda x: function(x, how), fullgraph=True, backend="eager")(torch.ones(1)).item()
    except Exception as error:
        return f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"


print(f"torch {torch.__version__}")
plain, frozen, none = result(nonstrict, Plain(2.0)), result(nonstrict, Frozen(2.0)), result(nonstrict, None)
print(f"nonstrict_trace, a plain class: {plain}")
print(f"nonstrict_trace, a frozen dataclass: {frozen}")
print(f"nonstrict_trace, None: {none}")
print(f"allow_in_graph, None: {result(allowed, None)}")
assert plain == 2.0 and result(allowed, None) == 2.0
assert frozen.startswith("InternalTorchDynamoError") and "frozen dataclass" in frozen
assert none.startswith("Unsupported")
EOF
"$dir/venv/bin/python" -W ignore "$dir/finding.py"
