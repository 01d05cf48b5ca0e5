#!/usr/bin/env bash
# AutoRound: without tuning (iters=0) it writes MXINT4 with the scales of FP4, and quantizes mx_int8 and E5M2 as E4M3.
# Packages: auto-round==0.16.1 transformers==5.24.0 torch==2.13.0 numpy
# Expected: MXINT4 keeps a weight within 12%, and data_type selects the element format, with optimized scales (the
# default) or without (disable_opt_rtn=True).
# Source: https://github.com/intel/auto-round/blob/main/docs/step_by_step.md (schemes; opt-RTN improves the accuracy of RTN)
# Seen: the optimized path has its own names, opt_rtn_mx_int4 and so on, and takes a name that it does not know for FP4 or
# E4M3 of the same width. The MXINT4 file is 51% off, since its scales are a quarter of what the codes need. mx_int8 and
# mx_fp8e5m2 give the weights of mx_fp8e4m3, bit by bit. No error and no warning.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
python3 -m venv "$dir/venv"
"$dir/venv/bin/python" -m pip install --quiet --no-compile auto-round==0.16.1 transformers==5.24.0 torch==2.13.0 numpy
cat > "$dir/finding.py" <<'EOF'
import glob
import tempfile

import auto_round
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

KEY = "model.layers.0.mlp.down_proj.weight"
SIZES = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 1, "vocab_size": 64}
SIZES |= {"num_attention_heads": 2, "num_key_value_heads": 2, "tie_word_embeddings": False}
words = models.WordLevel({str(word): word for word in range(64)}, unk_token="0")
tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words), unk_token="0", pad_token="0")
sample = {"input_ids": torch.arange(8)[None], "attention_mask": torch.ones(1, 8, dtype=torch.long)}


def write(file_format, **config):
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES, architectures=["LlamaForCausalLM"])).bfloat16()
    weight, folder = model.get_parameter(KEY).detach().float(), tempfile.mkdtemp()
    run = {"iters": 0, "nsamples": 4, "seqlen": 8, "dataset": [sample] * 4, "device_map": "cpu"}
    tuner = auto_round.AutoRound(model, tokenizer, enable_torch_compile=False, **run, **config)
    tuner.quantize_and_save(folder, format=file_format)
    (path,) = glob.glob(f"{folder}/**/*.safetensors", recursive=True)
    return weight, load_file(path)


def error_of_mxint4(**config):
    weight, tensors = write("auto_round", scheme="MXINT4", **config)
    packed, scale = tensors[KEY + "_packed"], tensors[KEY + "_scale"].float()
    code = torch.stack([packed & 15, packed >> 4], -1).reshape(weight.shape).int()
    value = (code & 7) / 4 * (1 - 2 * (code >> 3))  # a sign, and a magnitude in quarters
    value = value.unflatten(-1, (-1, 32)) * torch.exp2(scale - 127)[..., None]
    return ((value.flatten(-2) - weight).norm() / weight.norm()).item()


def weights_of(data_type, **config):
    return write("fake", data_type=data_type, bits=8, group_size=32, sym=True, act_bits=16, **config)[1][KEY]


default, plain = error_of_mxint4(), error_of_mxint4(disable_opt_rtn=True)
print(f"auto-round {auto_round.__version__}: MXINT4 is {default:.3f} off by default, {plain:.3f} with disable_opt_rtn")
assert plain < 0.13 and default > 0.4
e4m3, plain_e4m3 = weights_of("mx_fp8e4m3"), weights_of("mx_fp8e4m3", disable_opt_rtn=True)
for name in ("mx_int8", "mx_fp8e5m2"):
    same, plain_same = torch.equal(weights_of(name), e4m3), torch.equal(weights_of(name, disable_opt_rtn=True), plain_e4m3)
    print(f"{name} is E4M3: {same} by default, {plain_same} with disable_opt_rtn")
    assert same and not plain_same
EOF
HF_HUB_OFFLINE=1 TMPDIR=$dir "$dir/venv/bin/python" -W ignore "$dir/finding.py" 2> "$dir/log" || { tail -5 "$dir/log"; exit 1; }
