#!/usr/bin/env bash
# PyTorch: under activation_memory_budget = 0.99 a custom operator's GEMMs run again, aten.mm's do not.
# Packages: torch==2.13.0 numpy
# Expected: the budget recomputes what is cheap first: at 0.99 a ReLU or so, and no matrix product, whoever
# defined it.
# Source: torch/_functorch/config.py: activation_memory_budget, and the list of compute-intensive operators in
# torch/_functorch/partitioners.py
# Seen: four layers have 7 products in their backward; at 0.99 the same model has 8 with torch.mm, and 11 with a
# custom operator that calls it: all four forward products run twice.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
python3 -m venv "$dir/venv"
"$dir/venv/bin/python" -m pip install --quiet --no-compile torch==2.13.0 numpy
cat > "$dir/finding.py" <<'EOF'
import torch
import torch._functorch.config as config
from functorch.compile import min_cut_rematerialization_partition
from torch._dynamo.backends.common import aot_autograd


@torch.library.custom_op("finding::mm", mutates_args=())
def mm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a @ b


@mm.register_fake
def _(a, b):
    return a.new_empty(a.shape[0], b.shape[1])


def backward(ctx, grad):
    a, b = ctx.saved_tensors
    return mm(grad, b.t().contiguous()), mm(a.t().contiguous(), grad)


mm.register_autograd(backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs))
weights = [torch.randn(256, 256, requires_grad=True) for _ in range(4)]


def products_of_backward(multiply, budget):
    counts = []

    def compiler(graph, _):
        counts.append(sum("mm" in str(node.target) for node in graph.graph.nodes if node.op == "call_function"))
        return graph

    def model(x):
        for weight in weights:
            x = torch.relu(multiply(x, weight))
        return x.sum()

    torch._dynamo.reset()
    options = {"fw_compiler": compiler, "bw_compiler": compiler}
    backend = aot_autograd(**options, partition_fn=min_cut_rematerialization_partition)
    with config.patch(activation_memory_budget=budget):
        torch.compile(model, backend=backend)(torch.randn(512, 256)).backward()
    return counts[1]


found = {(one, budget): products_of_backward(op, budget) for one, op in (("aten", torch.mm), ("custom", mm)) for budget in (1.0, 0.99)}
print(f"torch {torch.__version__}: products in the backward: {found}")
assert found == {("aten", 1.0): 7, ("aten", 0.99): 8, ("custom", 1.0): 7, ("custom", 0.99): 11}
EOF
"$dir/venv/bin/python" -W ignore "$dir/finding.py"
