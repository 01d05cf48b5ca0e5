#!/usr/bin/env bash
# bitsandbytes: with double quantization, rows that are small beside the others come back in 4 bits magnified or negated.
# Packages: bitsandbytes==0.50.2 torch==2.13.0 numpy
# Expected: quantizing the scales, too, costs each scale a percent or so: a row is within 10% with it as without it.
# Source: https://huggingface.co/docs/transformers/quantization/bitsandbytes (nested quantization saves 0.4 bits per
# parameter at no additional performance cost); https://arxiv.org/abs/2305.14314 (double quantization)
# Seen: the mean of the tensor's scales is subtracted before they are rounded to 8 bits, and added again afterwards. The
# error is a percent of the mean, which is ten times the scale of a row of a thousandth: the row comes back 11 times as
# large, or with the opposite sign where the sum falls below 0. The error of the tensor stays at 9% and shows nothing.
# FP4 does the same.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
python3 -m venv "$dir/venv"
"$dir/venv/bin/python" -m pip install --quiet --no-compile bitsandbytes==0.50.2 torch==2.13.0 numpy
cat > "$dir/finding.py" <<'EOF'
import bitsandbytes
import torch
from bitsandbytes.functional import dequantize_4bit, quantize_4bit


def read_back(quant_type, largest, double):
    size = torch.linspace(1, 2, 256)
    size[::16], size[1] = 1e-3, largest
    weight = size[:, None] * torch.linspace(-1, 1, 64)
    read = dequantize_4bit(*quantize_4bit(weight, quant_type=quant_type, compress_statistics=double))
    ratio = ((read * weight).sum(1) / (weight * weight).sum(1))[::16]
    error = ((read - weight).norm() / weight.norm()).item()
    return round(ratio.min().item(), 2), round(ratio.max().item(), 2), round(error, 3)


print(f"bitsandbytes {bitsandbytes.__version__}, torch {torch.__version__}")
for quant_type in ("nf4", "fp4"):
    for largest in (2.0, 3.6):
        for double in (False, True):
            low, high, error = read_back(quant_type, largest, double)
            print(f"{quant_type}, largest row {largest}, double={double}: small rows by {low} to {high}, tensor off by {error}")
            assert error < 0.12
            if not double:
                assert 0.9 < low and high < 1.1
            elif largest == 2.0:
                assert low > 8
            else:
                assert high < -8
EOF
"$dir/venv/bin/python" -W ignore "$dir/finding.py" 2> "$dir/log" || { tail -5 "$dir/log"; exit 1; }
