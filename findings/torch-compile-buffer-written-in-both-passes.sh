#!/usr/bin/env bash
# torch.compile: a buffer that an operator writes in the forward and in the backward works eagerly and fails compiled.
# Packages: torch==2.13.0 numpy
# Expected: operators that declare mutates_args compile as they run, also in an autograd.Function's backward.
# Source: https://docs.pytorch.org/docs/2.13/library.html#torch.library.custom_op
# Seen: each of two buffers, one written in the forward and one in the backward, works. One buffer for both works as
# long as each backward follows its forward. With two forwards before the backwards, as in a pipeline or with gradient
# accumulation of summed losses, the compiled backward raises "modified by an inplace operation": the graph saves the
# buffer's value of its forward and writes a value computed from that. 2.11.0 and 2.15.0 do the same.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
python3 -m venv "$dir/venv"
"$dir/venv/bin/python" -m pip install --quiet --no-compile torch==2.13.0 numpy
cat > "$dir/finding.py" <<'EOF'
import torch


@torch.library.custom_op("finding::largest", mutates_args=("seen",))
def largest(x: torch.Tensor, seen: torch.Tensor, place: int) -> torch.Tensor:
    seen[place] = torch.maximum(seen[place], x.abs().max())
    return x.clone()


@largest.register_fake
def _(x, seen, place):
    return torch.empty_like(x)


class Observed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, forwards, backwards):
        ctx.seen = forwards if backwards is None else backwards
        return largest(x, forwards, 0)

    @staticmethod
    def backward(ctx, grad):
        return largest(grad, ctx.seen, 1), None, None


class Layer(torch.nn.Module):
    def __init__(self, one):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(()))
        self.register_buffer("forwards", torch.zeros(2))
        self.register_buffer("backwards", None if one else torch.zeros(2))

    def forward(self, x):
        return Observed.apply(x * self.weight, self.forwards, self.backwards)


def seen(one, backend, late):
    torch._dynamo.reset()
    layer = Layer(one)
    run = torch.compile(layer, fullgraph=True, backend=backend) if backend else layer
    try:
        if late:
            first, second = run(torch.tensor([1.0])), run(torch.tensor([5.0]))
            (3 * first).sum().backward()
            (7 * second).sum().backward()
        else:
            (3 * run(torch.tensor([1.0]))).sum().backward()
            (7 * run(torch.tensor([5.0]))).sum().backward()
    except RuntimeError as error:
        return "modified by an inplace operation" if "inplace operation" in str(error) else str(error)
    both = layer.forwards if one else torch.maximum(layer.forwards, layer.backwards)
    return both.tolist()


print(f"torch {torch.__version__}")
for one in (False, True):
    for late in (False, True):
        found = [seen(one, backend, late) for backend in (None, "aot_eager")]
        print(f"{'one buffer' if one else 'two buffers'}, backwards {'late' if late else 'at once'}: {found}")
        wanted = "modified by an inplace operation" if one and late else [5.0, 7.0]
        assert found == [[5.0, 7.0], wanted]
EOF
"$dir/venv/bin/python" -W ignore "$dir/finding.py"
