"""Exported models, read by Transformers and compressed-tensors themselves: the values, and what the model says."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from recipes import QUANTIZED

import narrowcast as nc
from serving.test_export import decoded

transformers = pytest.importorskip("transformers", reason="needs transformers: pip install 'narrowcast[hf]'")

RECIPES = {**QUANTIZED, "mxfp6": nc.recipe.MXFP6BlockScaling()}
WORDS = torch.arange(32).view(2, 16)
CONFIG: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 256,
    "intermediate_size": 384,  # Transformers decodes whole tiles of 128 x 128 only
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def llama(recipe: Any) -> Any:
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**CONFIG)).to(torch.bfloat16)
    nc.convert(model, recipe, skip="lm_head")
    model(input_ids=WORDS, labels=WORDS).loss.backward()
    return model.eval()


def divergence(a: torch.Tensor, b: torch.Tensor) -> float:
    """KL divergence of b from a, in nats per word."""
    p, q = a.float().log_softmax(-1), b.float().log_softmax(-1)
    return (p.exp() * (p - q)).sum(-1).mean().item()


@pytest.mark.parametrize(
    ("format", "name"),
    [
        ("hf-fp8-block128", "block"),
        ("compressed-tensors", "delayed"),
        ("compressed-tensors", "current"),
        ("compressed-tensors", "block"),
        ("mxfp8", "mxfp8"),
        ("nvfp4", "nvfp4"),
        ("bf16", "current"),
    ],
)
@torch.no_grad()
def test_the_loaded_model_says_what_the_trained_one_does(format: str, name: str, tmp_path: Path) -> None:
    recipe = QUANTIZED[name]
    with torch.enable_grad():
        model = llama(recipe)
    path = nc.export(model, tmp_path / "out", format=format).path
    extra: dict[str, Any] = {}
    if format == "hf-fp8-block128":
        extra["quantization_config"] = transformers.FineGrainedFP8Config(dequantize=True)
    elif format != "bf16":
        pytest.importorskip(
            "compressed_tensors", reason="needs compressed-tensors: pip install compressed-tensors"
        )
        extra["quantization_config"] = transformers.CompressedTensorsConfig(run_compressed=False)
    again = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16, **extra)
    layer, loaded = model.model.layers[0].mlp.up_proj, again.model.layers[0].mlp.up_proj
    if format != "bf16":
        bits = torch.eye(CONFIG["hidden_size"], dtype=torch.bfloat16)
        torch.testing.assert_close(loaded.weight, layer(bits).t(), rtol=2**-8, atol=0)
    assert divergence(model(WORDS).logits, again(WORDS).logits) < (5e-3 if name == "nvfp4" else 5e-4)


ODD = {"hf-fp8-block128": (256, 384), "mxfp8": (224, 352), "mxfp4": (224, 352), "nvfp4": (208, 336)}
"""Hidden and intermediate sizes that are as odd as a format, or its reader, takes."""
KINDS = [
    ("hf-fp8-block128", "block"),
    ("hf-fp8-block128", "transformers"),
    ("compressed-tensors", "delayed"),
    ("compressed-tensors", "current"),
    ("compressed-tensors", "fp8-channel"),
    ("compressed-tensors", "fp8-tensor"),
    ("fp8-static", "delayed"),
    ("mxfp8", "mxfp8"),
    ("nvfp4", "nvfp4"),
    ("mxfp4", "mxfp4"),
    ("bf16", "current"),
]


@pytest.mark.parametrize(("format", "name"), KINDS)
def test_odd_sizes_and_tied_weights_load_as_training_read_them(
    format: str, name: str, tmp_path: Path
) -> None:
    pytest.importorskip(
        "compressed_tensors", reason="needs compressed-tensors: pip install compressed-tensors"
    )
    torch.manual_seed(0)
    hidden, inner = ODD.get(format, (232, 328))
    sizes = CONFIG | {"hidden_size": hidden, "intermediate_size": inner, "vocab_size": 97}
    sizes["head_dim"] = 24 if format in ODD else 26
    config = transformers.LlamaConfig(**sizes, tie_word_embeddings=True)
    model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
    recipe: Any = (
        nc.recipe.MXFP4BlockScaling() if name == "mxfp4" else QUANTIZED.get(name, QUANTIZED["current"])
    )
    nc.convert(model, recipe, blocks=True)
    if name not in (*QUANTIZED, "mxfp4"):
        engine, kind = ("transformers", format) if name == "transformers" else ("compressed-tensors", name)
        nc.serving.forward_like(model, engine, format=kind)
    model(input_ids=WORDS, labels=WORDS).loss.backward()
    nc.renew_delayed_scaling(model)
    path = nc.export(model.eval(), tmp_path / "out", format=format).path
    files = safetensors.torch.load_file(path / "model.safetensors")
    method: dict[str, Any] = {}
    if format != "bf16":
        decode = transformers.CompressedTensorsConfig(run_compressed=False)
        method["quantization_config"] = (
            transformers.FineGrainedFP8Config(dequantize=True) if format.startswith("hf") else decode
        )
    again = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16, **method)
    assert again.lm_head.weight is again.model.embed_tokens.weight and "lm_head.weight" not in files
    seen = 0
    for key, layer in model.named_modules():
        if isinstance(layer, nc.Linear):
            loaded = again.get_submodule(key).weight
            if format != "bf16":
                torch.testing.assert_close(
                    loaded,
                    decoded(files, f"{key}.weight").bfloat16(),
                    rtol=2**-7 if format == "nvfp4" else 0,
                    atol=0,
                )
                bits, alike = torch.eye(layer.in_features, dtype=torch.bfloat16), copy.deepcopy(layer)
                for slots in alike.delayed_slots():
                    slots.scale.fill_(1.0)  # of the input, whose ones are codes then
                torch.testing.assert_close(loaded, alike(bits).t(), rtol=2**-7, atol=0)
            seen += 1
    assert seen == 14
    with torch.no_grad():
        assert divergence(model(WORDS).logits, again(WORDS).logits) < (
            2e-2 if format.endswith("fp4") else 5e-4
        )


def test_a_checkpoint_loads_for_lora_without_a_round_trip(tmp_path: Path) -> None:
    model = llama(QUANTIZED["block"])
    path = nc.export(model, tmp_path / "out", format="hf-fp8-block128").path
    again = (
        transformers.LlamaForCausalLM(transformers.AutoConfig.from_pretrained(path)).to(torch.bfloat16).eval()
    )
    nc.load_quantized(again, path)
    assert torch.equal(again(WORDS).logits, model(WORDS).logits)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_tied_embeddings_are_written_as_transformers_writes_them(dtype: Any, tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**CONFIG, tie_word_embeddings=True)
    model = transformers.LlamaForCausalLM(config).float()
    model.save_pretrained(tmp_path / "theirs")
    nc.convert(model, QUANTIZED["current"], heads=True)
    path = nc.export(
        model, tmp_path / "out", format="bf16" if dtype else "compressed-tensors", dtype=dtype
    ).path
    ours, theirs = (
        safetensors.torch.load_file(folder / "model.safetensors") for folder in (path, tmp_path / "theirs")
    )
    assert "lm_head.weight" not in ours and "model.embed_tokens.weight" in ours
    assert {key for key in ours if not key.endswith("_scale")} == set(theirs)
    if dtype:
        again = transformers.AutoModelForCausalLM.from_pretrained(path)
        assert again.lm_head.weight is again.model.embed_tokens.weight
        assert torch.equal(again.lm_head.weight, model.model.embed_tokens.weight.to(dtype))


def mixture(kind: str, recipe: Any, inner: int) -> Any:
    """A mixture of experts of odd sizes, converted."""
    torch.manual_seed(0)
    sizes = CONFIG | {"num_hidden_layers": 1, "hidden_size": 128, "num_experts_per_tok": 2}
    if kind == "Mixtral":
        config = transformers.MixtralConfig(**sizes | {"intermediate_size": inner}, num_local_experts=3)
    else:
        config = transformers.Qwen3MoeConfig(**sizes, num_experts=3, moe_intermediate_size=inner, head_dim=32)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).to(torch.bfloat16)
    nc.convert(model, recipe)
    return model.eval()


NAMES = {
    "Mixtral": ("model.layers.0.block_sparse_moe.experts.{}.", ("w1", "w3", "w2")),
    "Qwen3Moe": ("model.layers.0.mlp.experts.{}.", ("gate_proj", "up_proj", "down_proj")),
}


@pytest.mark.parametrize(
    ("kind", "format", "name", "inner"),
    [
        ("Mixtral", "hf-fp8-block128", "block", 256),
        ("Mixtral", "compressed-tensors", "fp8-channel", 72),
        ("Qwen3Moe", "hf-fp8-block128", "block", 128),
        ("Qwen3Moe", "compressed-tensors", "current", 72),
    ],
)
def test_experts_load_under_the_names_of_their_architecture(
    kind: str, format: str, name: str, inner: int, tmp_path: Path
) -> None:
    model = mixture(kind, QUANTIZED["current" if name == "fp8-channel" else name], inner)
    if name == "fp8-channel":
        nc.serving.forward_like(model, "transformers", format=name)
    path = nc.export(model, tmp_path / "out", format=format).path
    files = safetensors.torch.load_file(path / "model.safetensors")
    plain = {key for key, _ in nc.serving.weights(model, "bf16")}
    model.save_pretrained(tmp_path / "theirs")
    assert plain == set(safetensors.torch.load_file(tmp_path / "theirs/model.safetensors"))
    method: Any = transformers.FineGrainedFP8Config(dequantize=True)
    if format != "hf-fp8-block128":
        pytest.importorskip(
            "compressed_tensors", reason="needs compressed-tensors: pip install compressed-tensors"
        )
        method = transformers.CompressedTensorsConfig(run_compressed=False)
    again = transformers.AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.bfloat16, quantization_config=method
    )
    prefix, parts = NAMES[kind]
    experts = again.model.layers[0].mlp.experts
    for i in range(3):
        gate, up, down = (decoded(files, f"{prefix.format(i)}{part}.weight").bfloat16() for part in parts)
        assert torch.equal(experts.gate_up_proj[i], torch.cat([gate, up]))
        assert torch.equal(experts.down_proj[i], down)
    ours = nc.load_quantized(transformers.AutoModelForCausalLM.from_config(again.config).bfloat16(), path)
    for key, value in ours.state_dict().items():
        assert torch.equal(value, again.state_dict()[key]), key
    assert {one.decision for one in nc.receipt(ours).gemms if "experts" in one.name} == {"converted"}


def test_experts_that_stay_are_named_for_transformers_and_for_servers(tmp_path: Path) -> None:
    """Tiles of 128 x 128 that gate and up share; Transformers loads the experts in high precision."""
    model = mixture("Mixtral", QUANTIZED["block"], 192)
    path = nc.export(model, tmp_path / "out", format="hf-fp8-block128").path
    kept = json.loads((path / "config.json").read_text())["quantization_config"]["modules_to_not_convert"]
    assert {"lm_head", "model.layers.0.mlp.experts", "model.layers.0.block_sparse_moe.experts.2.w3"} <= set(
        kept
    )
    again = transformers.AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.bfloat16, quantization_config=transformers.FineGrainedFP8Config(dequantize=True)
    )
    experts, own = again.model.layers[0].mlp.experts, model.model.layers[0].mlp.experts
    assert torch.equal(experts.gate_up_proj, own.gate_up_proj)
    ours = nc.load_quantized(transformers.AutoModelForCausalLM.from_config(again.config).bfloat16(), path)
    assert torch.equal(ours.model.layers[0].mlp.experts.gate_up_proj, own.gate_up_proj)


@pytest.mark.parametrize("kind", ["Phi3", "GptOss", "GraniteMoe", "Llava", "Llama4"])
@pytest.mark.parametrize(
    ("format", "name"), [("hf-fp8-block128", "block"), ("nvfp4", "nvfp4"), ("mxfp6", "mxfp6")]
)
def test_exports_of_fused_projections_and_of_other_experts_load_back(
    kind: str, format: str, name: str, tmp_path: Path
) -> None:
    """The same files again, also under names that Transformers changes."""
    sizes = CONFIG | {"num_hidden_layers": 1, "hidden_size": 128, "intermediate_size": 128, "pad_token_id": 0}
    more = {"num_experts_per_tok": 1, "num_local_experts": 3, "head_dim": 32, "intermediate_size_mlp": 256}
    config = {
        "Phi3": lambda: transformers.Phi3Config(**sizes),
        "GptOss": lambda: transformers.GptOssConfig(**sizes | more),
        "Llama4": lambda: transformers.Llama4TextConfig(**sizes | more),
        "GraniteMoe": lambda: transformers.GraniteMoeConfig(
            **sizes, num_local_experts=3, num_experts_per_tok=2
        ),
        "Llava": lambda: transformers.LlavaConfig(
            text_config={"model_type": "llama", **sizes},
            vision_config={"model_type": "clip_vision_model", "num_hidden_layers": 1, "hidden_size": 64}
            | {"intermediate_size": 128, "num_attention_heads": 2, "image_size": 16, "patch_size": 8},
            image_token_index=70,
        ),
    }[kind]()
    models = []
    for seed in range(2):
        torch.manual_seed(seed)
        name_of = f"{kind}For{'ConditionalGeneration' if kind == 'Llava' else 'CausalLM'}"
        models.append(getattr(transformers, name_of)(config).bfloat16())
    model, again = models
    nc.convert(model, RECIPES[name], blocks=True)
    path = nc.export(model, tmp_path / "out", format=format).path
    nc.load_quantized(again, path)
    files = safetensors.torch.load_file(path / "model.safetensors")
    same = nc.export(again, tmp_path / "again", format=format).path
    for key, value in safetensors.torch.load_file(same / "model.safetensors").items():
        assert torch.equal(value.view(torch.uint8), files[key].view(torch.uint8)), key


@pytest.mark.parametrize(
    ("format", "dtype", "bound"),
    [
        ("fp8-channel", torch.float32, 0.0),
        ("hf-fp8-block128", torch.float32, 0.0),
        ("fp8-tensor", torch.float32, 1e-12),
        ("hf-fp8-block128", torch.bfloat16, 1e-5),
    ],
)
def test_log_probabilities_after_two_steps(format: str, dtype: Any, bound: float, tmp_path: Path) -> None:
    """On a CPU Transformers decodes weights; tied embeddings, and odd sizes where it takes them."""
    torch.manual_seed(0)
    odd = {} if format.startswith("hf") else {"intermediate_size": 372}
    config = transformers.LlamaConfig(**CONFIG | odd, tie_word_embeddings=True)
    model = transformers.LlamaForCausalLM(config).to(dtype)
    nc.convert(model, QUANTIZED["current"])
    nc.serving.forward_like(model, "weight-only", format=format)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(2):
        model(input_ids=WORDS, labels=WORDS).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    method: Any = transformers.FineGrainedFP8Config(dequantize=True)
    if not format.startswith("hf"):
        pytest.importorskip(
            "compressed_tensors", reason="needs compressed-tensors: pip install compressed-tensors"
        )
        method = transformers.CompressedTensorsConfig(run_compressed=False)
    served_as = format if format.startswith("hf") else "compressed-tensors"
    path = nc.export(model.eval(), tmp_path / "out", format=served_as).path
    again = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=dtype, quantization_config=method)
    with torch.no_grad():
        found, own = (
            one(WORDS).logits.double().log_softmax(-1)[:, :-1].gather(-1, WORDS[:, 1:, None])
            for one in (again, model)
        )
    d = found - own
    assert (d.exp() - d - 1).mean().item() <= bound
