#!/usr/bin/env bash
# torch: nn.Linear().compile(fullgraph=True) raises, torch.compile(nn.Linear(), fullgraph=True) does not.
# Packages: torch==2.13.0 numpy
# Expected: Module.compile compiles the module's __call__ with torch.compile, and takes all of its arguments.
# Source: https://docs.pytorch.org/docs/2.13/generated/torch.nn.Module.html#torch.nn.Module.compile
# Seen: for every module of torch.nn the call raises RuntimeError "found no compiled frames": Module._call_impl and the
# forward, which are PyTorch's own code, are skipped. A module of the user's compiles in both ways, as all do on 2.11 and
# 2.15. Without fullgraph the method returns eager results, and compiles nothing.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
python3 -m venv "$dir/venv"
"$dir/venv/bin/python" -m pip install --quiet --no-compile torch==2.13.0 numpy
cat > "$dir/finding.py" <<'EOF'
import torch
from torch import nn


class Own(nn.Module):
    def forward(self, x):
        return x * 2


def runs(make, how, fullgraph):
    torch._dynamo.reset()
    graphs = []
    backend = lambda graph, _: graphs.append(graph) or graph.forward
    module = make()
    try:
        if how == "method":
            module.compile(fullgraph=fullgraph, backend=backend)
            module(torch.ones(2, 4))
        else:
            torch.compile(module, fullgraph=fullgraph, backend=backend)(torch.ones(2, 4))
    except RuntimeError as error:
        return str(error).partition(". ")[0]
    return f"{len(graphs)} graphs"


print(f"torch {torch.__version__}")
makers = {"nn.Linear": lambda: nn.Linear(4, 4), "nn.LayerNorm": lambda: nn.LayerNorm(4),
          "nn.Sequential": lambda: nn.Sequential(nn.Linear(4, 4)), "a user's": Own}
for name, make in makers.items():
    found = {how: [runs(make, how, full) for full in (True, False)] for how in ("method", "function")}
    print(f"{name}: fullgraph and not: {found}")
    assert found["function"] == ["1 graphs", "1 graphs"]
    if name == "a user's":
        assert found["method"] == ["1 graphs", "1 graphs"]
    else:
        assert "found no compiled frames" in found["method"][0] and found["method"][1] == "0 graphs"
EOF
"$dir/venv/bin/python" -W ignore "$dir/finding.py"
