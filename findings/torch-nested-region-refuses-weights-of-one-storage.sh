#!/usr/bin/env bash
# torch.compiler.nested_compile_region: two weights that are parts of one tensor make a region fail, with a hint that
# does not apply.
# Packages: torch==2.13.0 numpy
# Expected: a module whose parameters are halves of one tensor, as of fused projections or flattened parameters, compiles
# inside a region as it does outside.
# Source: https://docs.pytorch.org/docs/2.13/generated/torch.compiler.nested_compile_region.html
# Seen: with fullgraph=True the region raises UncapturedHigherOrderOpError, "Input-to-input aliasing detected". Nothing
# returns an input, and the hint is "Replace `return input` with `return input.clone()`". Without a region, or with two
# tensors, the same module runs. 2.15.0 does the same.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
python3 -m venv "$dir/venv"
"$dir/venv/bin/python" -m pip install --quiet --no-compile torch==2.13.0 numpy
cat > "$dir/finding.py" <<'EOF'
import torch


class Block(torch.nn.Module):
    def __init__(self, one_tensor):
        super().__init__()
        if one_tensor:
            first, second = torch.randn(32, 16).split(16)
        else:
            first, second = torch.randn(16, 16), torch.randn(16, 16)
        self.first, self.second = torch.nn.Parameter(first), torch.nn.Parameter(second)

    def forward(self, x):
        return torch.tanh(x @ self.first) @ self.second


class Region(torch.nn.Module):
    def __init__(self, block):
        super().__init__()
        self.block = block

    @torch.compiler.nested_compile_region
    def forward(self, x):
        return self.block(x)


def outcome(one_tensor, region):
    torch._dynamo.reset()
    model = Region(Block(one_tensor)) if region else Block(one_tensor)
    try:
        torch.compile(model, fullgraph=True, backend="aot_eager")(torch.randn(4, 16)).sum().backward()
    except Exception as error:
        assert "Input-to-input aliasing" in str(error) and "Replace `return input`" in str(error)
        return type(error).__name__
    return "runs"


print(f"torch {torch.__version__}")
for one_tensor in (False, True):
    for region in (False, True):
        found = outcome(one_tensor, region)
        print(f"{'parts of one tensor' if one_tensor else 'two tensors'}, {'region' if region else 'no region'}: {found}")
        assert found == ("UncapturedHigherOrderOpError" if one_tensor and region else "runs")
EOF
"$dir/venv/bin/python" -W ignore "$dir/finding.py"
