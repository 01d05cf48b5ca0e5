"""Models of Transformers, as that package makes, trains, saves and runs them; tiny, from configurations."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import narrowcast as nc

transformers = pytest.importorskip("transformers", reason="needs transformers: pip install 'narrowcast[hf]'")
accelerate = pytest.importorskip("accelerate", reason="needs accelerate: pip install 'narrowcast[hf]'")

CURRENT = nc.recipe.Float8CurrentScaling()
SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
GROUPED = {**SIZES, "num_key_value_heads": 2}
MIXTURE = {**GROUPED, "num_experts_per_tok": 2}
DROPLESS = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
WORDS = torch.arange(24).view(2, 12)
# model, configuration, its arguments, and the modules that stay in high precision
ZOO: dict[str, tuple[str, str, dict[str, Any], tuple[str, ...]]] = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", GROUPED, ()),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", {**GROUPED, "head_dim": 8, "tie_word_embeddings": True}, ()),
    "mixtral": ("MixtralForCausalLM", "MixtralConfig", {**MIXTURE, "num_local_experts": 4}, ("gate",)),
    "qwen3-moe": (
        "Qwen3MoeForCausalLM",
        "Qwen3MoeConfig",
        {**MIXTURE, "head_dim": 8, "num_experts": 4, "moe_intermediate_size": 32},
        ("gate",),
    ),
    "gpt-oss": (
        "GptOssForCausalLM",
        "GptOssConfig",
        {**MIXTURE, "head_dim": 8, "num_local_experts": 4, "max_position_embeddings": 4096 * 32},
        ("router",),
    ),
    "deepseek": (
        "DeepseekV3ForCausalLM",
        "DeepseekV3Config",
        {**SIZES, "num_key_value_heads": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
        | {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
        | {"kv_lora_rank": 32, "q_lora_rank": 32, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8}
        | {"v_head_dim": 8},
        ("gate",),
    ),
    "llama4": (
        "Llama4ForCausalLM",
        "Llama4TextConfig",
        {
            **MIXTURE,
            "num_experts_per_tok": 1,
            "head_dim": 8,
            "num_local_experts": 4,
            "intermediate_size_mlp": 64,
        },
        ("router",),
    ),
    "gpt2": (
        "GPT2LMHeadModel",
        "GPT2Config",
        {"vocab_size": 96, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
        | {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 0},
        (),
    ),
    "bert": ("BertForMaskedLM", "BertConfig", {**SIZES, **DROPLESS}, ()),
    "t5": (
        "T5ForConditionalGeneration",
        "T5Config",
        {"vocab_size": 96, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
        | {"dropout_rate": 0.0, "decoder_start_token_id": 0},
        (),
    ),
    "vit": (
        "ViTForImageClassification",
        "ViTConfig",
        {**SIZES, **DROPLESS, "image_size": 16, "patch_size": 8, "num_labels": 3},
        ("projection",),
    ),
}


def make(name: str) -> Any:
    model, config, sizes, _ = ZOO[name]
    arguments = {key: value for key, value in sizes.items() if name != "vit" or "vocab" not in key}
    torch.manual_seed(0)
    return getattr(transformers, model)(getattr(transformers, config)(**arguments)).train()


def loss_of(model: Callable[..., Any], name: str) -> Tensor:
    if name == "vit":
        images = torch.linspace(-1, 1, 2 * 3 * 16 * 16).view(2, 3, 16, 16)
        return model(pixel_values=images, labels=torch.tensor([0, 2])).loss
    return model(input_ids=WORDS, labels=WORDS).loss


def gradients(model: nn.Module, name: str) -> dict[str, Tensor]:
    model.zero_grad()
    loss_of(model, name).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def hashes(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}


def kept(receipt: Any) -> set[str]:
    return {one.name.rsplit(".", 1)[-1] for one in receipt.gemms if one.decision == "kept"}


@pytest.mark.parametrize("name", ZOO)
def test_a_family_trains_and_turns_back(name: str) -> None:
    model = make(name)
    plain, state = gradients(model, name), {k: v.clone() for k, v in model.state_dict().items()}
    head = {"bert": "decoder", "vit": "classifier"}.get(name, "lm_head")
    assert kept(nc.convert(model, CURRENT, dry_run=True)) == {*ZOO[name][3], head}
    receipt = nc.receipt(nc.convert(model, CURRENT, heads=True, small=True))
    assert kept(receipt) == set(ZOO[name][3])
    assert list(model.state_dict()) == list(state)
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    with receipt.recording():
        ours = gradients(model, name)
    ran = receipt.ran()
    assert not ran.idle
    assert all(one.name for one in ran)
    assert ours.keys() == plain.keys()
    for key, gradient in plain.items():
        if gradient.norm() > 1e-6:  # of a key's bias it is zero but for rounding
            assert torch.cosine_similarity(ours[key].flatten(), gradient.flatten(), 0) > 0.9, key
    nc.revert(model)
    again = gradients(model, name)
    assert all(torch.equal(again[key], gradient) for key, gradient in plain.items())


@pytest.mark.parametrize("name", ZOO)
def test_what_is_saved_is_the_plain_model_and_loads(name: str, tmp_path: Path) -> None:
    model = make(name)
    model.save_pretrained(tmp_path / "plain")
    nc.convert(model, CURRENT)
    model.save_pretrained(tmp_path / "converted")
    assert hashes(tmp_path / "plain") == hashes(tmp_path / "converted")
    loaded = type(model).from_pretrained(tmp_path / "converted").train()
    state = model.state_dict()
    assert all(torch.equal(value, state[key]) for key, value in loaded.state_dict().items())
    nc.convert(loaded, CURRENT)
    loaded.load_state_dict(state, strict=True)
    assert torch.equal(loss_of(loaded, name), loss_of(model, name))


@pytest.mark.parametrize("name", ["llama", "mixtral", "gpt2"])
def test_a_converted_model_generates(name: str) -> None:
    model = make(name).eval()
    nc.convert(model, CURRENT)
    words = model.generate(WORDS[:, :4], max_new_tokens=4, do_sample=False, pad_token_id=0)
    assert words.shape == (2, 8)


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not"])
@pytest.mark.filterwarnings("ignore::FutureWarning:transformers")
def test_gradient_checkpointing_changes_nothing(reentrant: bool) -> None:
    model = make("llama")
    nc.convert(model, nc.recipe.DelayedScaling())
    state = {key: value.clone() for key, value in model.state_dict().items()}
    plain = gradients(model, "llama")
    plain = {key: value.clone() for key, value in plain.items()}
    model.load_state_dict(state)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    if reentrant:
        model.enable_input_require_grads()
    ours = gradients(model, "llama")
    assert all(torch.equal(ours[key], value) for key, value in plain.items())


@pytest.mark.slow
def test_a_converted_model_compiles() -> None:
    model = make("llama")
    receipt = nc.receipt(nc.convert(model, CURRENT, skip="lm_head"))
    model.config.use_cache = False
    plain = {key: value.clone() for key, value in gradients(model, "llama").items()}
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    model.zero_grad()
    with receipt.recording():
        loss_of(compiled, "llama").backward()
    assert all(one.compiled for one in receipt.ran()) and not receipt.ran().idle
    for key, parameter in model.named_parameters():
        assert torch.allclose(parameter.grad, plain[key], atol=1e-5), key


def test_the_experts_of_jetmoe_run() -> None:
    cls, config, sizes, _ = ROUTERS["jetmoe"]
    torch.manual_seed(0)
    model = getattr(transformers, cls)(getattr(transformers, config)(**sizes)).train()
    before = loss_of(model, "jetmoe")
    receipt = nc.receipt(nc.convert(model, CURRENT))
    assert {one.name.rpartition(".")[2] for one in receipt.gemms if one.decision == "kept"} == {
        "layer",
        "lm_head",
    }
    with receipt.recording():
        loss = loss_of(model, "jetmoe")
        loss.backward()
    assert not receipt.idle and all(one.name for one in receipt.ran())
    assert torch.isclose(loss, before, rtol=0.01)


def test_the_projection_of_a_mamba_that_is_never_called_stays() -> None:
    sizes = {
        "vocab_size": 96,
        "hidden_size": 64,
        "state_size": 16,
        "num_hidden_layers": 1,
        "time_step_rank": 64,
    }
    receipts = []
    for name in ("Mamba", "FalconMamba"):
        config = getattr(transformers, f"{name}Config")(**sizes)
        model = nc.convert(getattr(transformers, f"{name}ForCausalLM")(config).train(), CURRENT)
        receipts.append(nc.receipt(model))
        with receipts[-1].recording():
            loss_of(model, "mamba").backward()
    for receipt in receipts:
        (found,) = (one for one in receipt.gemms if one.name.endswith("dt_proj"))
        assert found.reason.endswith("reads its weight itself") and not receipt.idle


class Words(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        words = (torch.arange(12) * (index + 1)) % 96
        return {"input_ids": words, "labels": words}


def trainer_of(folder: Path, recipe: Any, steps: int) -> Any:
    model = make("llama")
    nc.convert(model, recipe, skip="lm_head")
    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        max_grad_norm=0.5,
        learning_rate=1e-3,
        max_steps=4,
        save_steps=2,
        bf16=True,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        seed=1,
    )
    stop = transformers.TrainerCallback()
    stop.on_step_end = lambda args, state, control, **_: setattr(  # type: ignore[method-assign]
        control, "should_training_stop", state.global_step >= steps
    )
    return transformers.Trainer(model, arguments, train_dataset=Words(), callbacks=[stop])


@pytest.mark.parametrize("recipe", [CURRENT, nc.recipe.DelayedScaling()], ids=["current", "delayed"])
def test_the_trainer_trains_in_bf16_and_resumes(recipe: Any, tmp_path: Path) -> None:
    whole = trainer_of(tmp_path / "whole", recipe, 4)
    whole.train()
    trainer_of(tmp_path / "parts", recipe, 2).train()
    rest = trainer_of(tmp_path / "parts", recipe, 4)
    rest.train(resume_from_checkpoint=True)
    begun = make("llama").state_dict()
    ours, theirs = rest.model.state_dict(), whole.model.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(value, theirs[key]) for key, value in ours.items())
    assert not torch.equal(
        begun["model.layers.0.mlp.up_proj.weight"], ours["model.layers.0.mlp.up_proj.weight"]
    )


def test_accelerate_needs_nothing_more() -> None:
    model = make("llama")
    receipt = nc.receipt(nc.convert(model, CURRENT))
    accelerator = accelerate.Accelerator(mixed_precision="bf16", gradient_accumulation_steps=2, cpu=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.utils.data.DataLoader(Words(), batch_size=4)
    model, optimizer, data = accelerator.prepare(model, optimizer, data)
    losses = []
    with receipt.recording():
        for batch in data:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
    assert {one.calls for one in receipt.ran()} == {4} and not receipt.ran().idle
    assert all(torch.tensor(losses).isfinite())


ROUTERS: dict[str, tuple[str, str, dict[str, Any], set[str]]] = {
    "hunyuan": (
        "HunYuanMoEV1ForCausalLM",
        "HunYuanMoEV1Config",
        {**MIXTURE, "num_experts": 4, "moe_topk": 2, "head_dim": 8},
        {"wg"},
    ),
    "switch": (
        "SwitchTransformersForConditionalGeneration",
        "SwitchTransformersConfig",
        {
            "vocab_size": 96,
            "d_model": 32,
            "d_kv": 8,
            "d_ff": 64,
            "num_layers": 2,
            "num_heads": 4,
            "num_experts": 4,
        }
        | {"num_decoder_layers": 2, "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1},
        {"classifier"},
    ),
    "jetmoe": (
        "JetMoeForCausalLM",
        "JetMoeConfig",
        {
            **SIZES,
            "num_key_value_heads": 2,
            "kv_channels": 8,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
        },
        {"layer"},
    ),
    "qwen2-moe": (
        "Qwen2MoeForCausalLM",
        "Qwen2MoeConfig",
        {**MIXTURE, "num_experts": 4, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32},
        {"shared_expert_gate"},
    ),
}


@pytest.mark.parametrize("name", ROUTERS)
def test_routers_stay_in_high_precision(name: str) -> None:
    cls, config, sizes, routers = ROUTERS[name]
    torch.manual_seed(0)
    model = getattr(transformers, cls)(getattr(transformers, config)(**sizes))
    receipt = nc.receipt(nc.convert(model, CURRENT))
    found = {one.name for one in receipt.gemms if one.reason.startswith("a router")}
    assert {one.rpartition(".")[2] for one in found} == routers
    assert all(type(model.get_submodule(one)) is nn.Linear for one in found)
    assert not any(
        part in one for one in found for part in ("q_proj", "k_proj", "v_proj", "kv_proj", "lm_head")
    )
    again = nc.receipt(nc.convert(model, CURRENT, routers=True))
    assert {one.name for one in again.gemms if one.decision == "converted"} >= found
