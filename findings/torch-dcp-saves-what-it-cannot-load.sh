#!/usr/bin/env bash
# torch.distributed.checkpoint: a wrapper subclass of Tensor is saved, and cannot be loaded again.
# Packages: torch==2.13.0 numpy
# Expected: what dcp.save accepts without a word, dcp.load reads into an equal tensor; or save refuses.
# Source: https://docs.pytorch.org/docs/stable/distributed.checkpoint.html (save and load of a state_dict of
# tensors)
# Seen: save writes the subclass; load raises a CheckpointException. Who looks into the checkpoint only when it
# is needed has none.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
python3 -m venv "$dir/venv"
"$dir/venv/bin/python" -m pip install --quiet --no-compile torch==2.13.0 numpy
cat > "$dir/finding.py" <<'EOF'
import tempfile

import torch
import torch.distributed.checkpoint as dcp
from torch.utils._pytree import tree_map


class Halves(torch.Tensor):
    @staticmethod
    def __new__(cls, a, b):
        return torch.Tensor._make_wrapper_subclass(cls, a.shape, dtype=a.dtype, device=a.device)

    def __init__(self, a, b):
        self.a, self.b = a, b

    def __tensor_flatten__(self):
        return ["a", "b"], None

    @staticmethod
    def __tensor_unflatten__(inner, context, size, stride):
        return Halves(inner["a"], inner["b"])

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        def run(name):
            return function(*tree_map(lambda x: getattr(x, name) if isinstance(x, Halves) else x, args), **(kwargs or {}))

        a, b = run("a"), run("b")
        return Halves(a, b) if isinstance(a, torch.Tensor) else a


path = tempfile.mkdtemp()
dcp.save({"x": Halves(torch.ones(3), torch.zeros(3))}, checkpoint_id=path)
print(f"torch {torch.__version__}: saved")
try:
    dcp.load({"x": Halves(torch.zeros(3), torch.zeros(3))}, checkpoint_id=path)
except dcp.api.CheckpointException as error:
    print("load raises", type(error).__name__, str(error).strip().splitlines()[-1])
else:
    raise SystemExit("it loads now")
EOF
"$dir/venv/bin/python" -W ignore "$dir/finding.py"
