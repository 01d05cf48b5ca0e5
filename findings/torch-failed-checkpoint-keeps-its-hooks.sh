#!/usr/bin/env bash
# PyTorch 2.11: after a checkpointed function raised, plain code that runs while the error is held repeats it.
# Packages: torch==2.11.0 numpy
# Expected: a function in torch.utils.checkpoint that raised is over: a retry in the handler, without a checkpoint,
# has the gradients that it has otherwise.
# Source: https://docs.pytorch.org/docs/2.11/checkpoint.html (hooks are in force while the function runs)
# Seen: the non-reentrant checkpoint is a generator, which the error's frames keep alive, and with it the hooks on
# saved tensors. The backward of the retry reruns the function that failed and raises its error. 2.13.0 and 2.15.0
# do not.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
python3 -m venv "$dir/venv"
"$dir/venv/bin/python" -m pip install --quiet --no-compile torch==2.11.0 numpy
cat > "$dir/finding.py" <<'EOF'
import torch
from torch.utils.checkpoint import checkpoint

weight = torch.ones(3, requires_grad=True)
calls = []


def too_large(x):
    calls.append("called")
    raise MemoryError("too many tokens")


def retry():
    (torch.ones(3) * weight).exp().sum().backward()


try:
    checkpoint(too_large, torch.ones(3), use_reentrant=False)
except MemoryError:
    try:
        retry()
        inside = "ran"
    except MemoryError as error:
        inside = str(error)
called = len(calls)
retry()
print(f"torch {torch.__version__}: the retry in the handler: {inside!r}, the function was called {called} times;")
print(f"the retry behind it: gradient {weight.grad.tolist()}")
assert inside == "too many tokens" and called == 2
assert torch.equal(weight.grad, torch.ones(3).exp())
EOF
"$dir/venv/bin/python" -W ignore "$dir/finding.py"
