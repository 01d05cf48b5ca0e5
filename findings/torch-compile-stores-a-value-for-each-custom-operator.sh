#!/usr/bin/env bash
# PyTorch: what Inductor computes is stored once for every custom operator that reads it, in memory of its own.
# Packages: torch==2.13.0 numpy
# Expected: one store, which all readers share, as for two products of one computed matrix.
# Source: torch/_inductor/config.py: custom_op_default_layout_constraint, "needs_exact_strides";
# torch/_inductor/ir.py, ExternKernel.require_strides, copies what is not in memory yet
# Seen: three operators that read a sum store it three times; under the tag needs_exact_strides, which is the
# default, too; under flexible_layout, or if an operator before has put it into memory, once. The graph computes
# the sum once: the stores are those of one kernel. Three products of the same matrix store it once.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
python3 -m venv "$dir/venv"
"$dir/venv/bin/python" -m pip install --quiet --no-compile torch==2.13.0 numpy
cat > "$dir/finding.py" <<'EOF'
import re

import torch
from torch._inductor.utils import run_and_get_code

library = torch.library.Library("finding", "DEF")
TAGS = {"default": (), "exact": (torch.Tag.needs_exact_strides,), "flexible": (torch.Tag.flexible_layout,)}
for name, tags in TAGS.items():
    library.define(f"{name}(Tensor x, int power) -> Tensor", tags=tags)
    library.impl(name, lambda x, power: (x**power).sum(), "CompositeExplicitAutograd")
    torch.library.register_fake(f"finding::{name}", lambda x, power: x.new_empty(()), lib=library)


def stores(function):
    torch._dynamo.reset()
    a, b = torch.randn(2, 96, 96)
    result, (code,) = run_and_get_code(torch.compile(function), a, b)
    assert torch.allclose(result, function(a, b), rtol=1e-4)
    call = code.split("def call(")[1]
    (kernel,) = [line for line in call.splitlines() if "cpp_fused" in line and "arg0_1" in line and "arg1_1" in line]
    return len(re.findall(r"buf\d+", kernel))


def readers(read):
    return lambda a, b: sum(read((c := a + b) if power == 1 else c, power) for power in (1, 2, 3))


found = {name: stores(readers(getattr(torch.ops.finding, name))) for name in TAGS}


def in_memory(a, b):
    c = a + b
    return (c @ c).sum() + sum(torch.ops.finding.default(c, power) for power in (1, 2))


def products(a, b):
    c = a + b
    return (c @ c).sum() + (c @ c.t()).sum() + (c.t() @ c).sum()


found |= {"behind a product": stores(in_memory), "products": stores(products)}
print(f"torch {torch.__version__}: stores of one sum: {found}")
assert found == {"default": 3, "exact": 3, "flexible": 1, "behind a product": 1, "products": 1}
EOF
"$dir/venv/bin/python" -W ignore "$dir/finding.py"
