#!/usr/bin/env bash
# ModelOpt: the export of a linear layer whose weight is zero has NaN codes (FP8) or NaN scales (NVFP4).
# Packages: nvidia-modelopt==0.47.0 transformers==5.24.0 accelerate==1.15.0 torch==2.13.0 numpy requests
# Expected: a weight of zeros, as LoRA-like and zero-initialized layers have, is exported as zeros.
# Source: the docstring of modelopt.torch.export.export_hf_checkpoint: exports a checkpoint that serving engines
# load
# Seen: 0 / 0: FP8 writes NaN codes and weight_scale 0, NVFP4 writes NaN weight_scale and weight_scale_2 0;
# MXFP4 is right. A server that loads the file computes NaN.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
python3 -m venv "$dir/venv"
"$dir/venv/bin/python" -m pip install --quiet --no-compile nvidia-modelopt==0.47.0 transformers==5.24.0 accelerate==1.15.0 torch==2.13.0 numpy requests
cat > "$dir/finding.py" <<'EOF'
import copy
import tempfile

import modelopt
import modelopt.torch.quantization as mtq
import torch
from modelopt.torch.export import export_hf_checkpoint
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "vocab_size": 64}
sizes |= {"num_attention_heads": 2, "num_key_value_heads": 2, "tie_word_embeddings": False}
key = "model.layers.0.mlp.down_proj.weight"
found = {}
for name in ("FP8_DEFAULT_CFG", "NVFP4_DEFAULT_CFG", "MXFP4_DEFAULT_CFG"):
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**sizes, architectures=["LlamaForCausalLM"])).bfloat16()
    folder = tempfile.mkdtemp()
    with torch.no_grad():
        model.get_parameter(key).zero_()
        mtq.quantize(model, copy.deepcopy(getattr(mtq, name)), lambda m: m(torch.arange(8)[None]))
        export_hf_checkpoint(model, export_dir=folder)
    tensors = load_file(folder + "/model.safetensors")
    found[name] = {one.removeprefix(key): tensors[one].float() for one in tensors if one.startswith(key)}
    print(modelopt.__version__, name, {k or "codes": v.flatten()[0].item() for k, v in found[name].items()})
assert found["FP8_DEFAULT_CFG"][""].isnan().all() and found["FP8_DEFAULT_CFG"]["_scale"] == 0
assert found["NVFP4_DEFAULT_CFG"]["_scale"].isnan().all() and found["NVFP4_DEFAULT_CFG"]["_scale_2"] == 0
assert (found["MXFP4_DEFAULT_CFG"]["_scale"] == 0).all() and (found["MXFP4_DEFAULT_CFG"][""] == 0x88).all()
EOF
"$dir/venv/bin/python" -W ignore "$dir/finding.py"
