#!/usr/bin/env bash
# torchao: enable_fsdp_float8_all_gather=True makes two parameters of a tied head and embedding; AdamW steps twice.
# Packages: torchao==0.18.0 torch==2.13.0 numpy
# Expected: a converted model has the parameters that it had: a head that is tied to the embedding stays tied, as with
# the flag off.
# Source: docstring of torchao.float8.convert_to_float8_training: swaps torch.nn.Linear with Float8Linear
# Seen: the head gets a parameter of its own over the same memory, so the model has 4,096 parameters in place of 2,048,
# and AdamW moves each weight by the step of the head and that of the embedding. No error and no warning.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
python3 -m venv "$dir/venv"
"$dir/venv/bin/python" -m pip install --quiet --no-compile torchao==0.18.0 torch==2.13.0 numpy
cat > "$dir/finding.py" <<'EOF'
import torch
import torchao
from torch import nn
from torchao.float8 import Float8LinearConfig, convert_to_float8_training


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(64, 32)
        self.head = nn.Linear(32, 64, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, words):
        return self.head(self.embedding(words))


found = {}
for flag in (False, True):
    torch.manual_seed(0)
    model = Words()
    convert_to_float8_training(model, config=Float8LinearConfig(enable_fsdp_float8_all_gather=flag, emulate=True))
    before = model.embedding.weight.detach().clone()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.0)
    model(torch.arange(64)).logsumexp(1).mean().backward()
    optimizer.step()
    moved = (model.embedding.weight.detach() - before).abs().max().item()
    found[flag] = sum(p.numel() for p in model.parameters()), round(moved, 4)
print(f"torchao {torchao.__version__}, flag: (parameters, largest step of AdamW at lr 0.01): {found}")
assert found == {False: (2048, 0.01), True: (4096, 0.02)}
EOF
"$dir/venv/bin/python" -W ignore "$dir/finding.py"
