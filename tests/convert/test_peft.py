"""LoRA and DoRA of PEFT on converted models, and on models that are converted afterwards."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import narrowcast as nc

transformers = pytest.importorskip("transformers", reason="needs transformers: pip install 'narrowcast[hf]'")
peft = pytest.importorskip("peft", reason="needs peft: pip install 'narrowcast[peft]'")

CURRENT = nc.recipe.Float8CurrentScaling()
WORDS = torch.arange(24).view(2, 12)
PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def make() -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=96,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    return transformers.LlamaForCausalLM(config)


def logits(model: Any) -> Tensor:
    model.eval()
    with torch.no_grad():
        return model(WORDS).logits


@pytest.mark.parametrize("modules", [["q_proj", "v_proj"], "all-linear"], ids=["named", "all"])
@pytest.mark.parametrize("dora", [False, True], ids=["lora", "dora"])
@pytest.mark.parametrize("weights", ["plain", "stored"])
def test_peft_finds_trains_merges_and_saves(modules: Any, dora: bool, weights: Any, tmp_path: Path) -> None:
    base = make().requires_grad_(False)
    receipt = nc.receipt(nc.convert(base, CURRENT, skip="lm_head", weights=weights))
    config = peft.LoraConfig(r=8, target_modules=modules, use_dora=dora, init_lora_weights=False)
    model = peft.get_peft_model(base, config)
    wrapped = {
        name.rsplit(".", 2)[1] for name, module in model.named_modules() if name.endswith(".base_layer")
    }
    assert wrapped == set(PROJECTIONS if modules == "all-linear" else modules)
    with receipt.recording():
        model.train()(input_ids=WORDS, labels=WORDS).loss.backward()
    trained = {name for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert trained and all("lora_" in name for name in trained)
    assert "wgrad" not in {one.gemm for one in receipt.ran()}  # the weights are frozen
    plain = logits(model)
    model.save_pretrained(tmp_path)
    other = make().requires_grad_(False)
    nc.convert(other, CURRENT, skip="lm_head", weights=weights)
    assert torch.equal(logits(peft.PeftModel.from_pretrained(other, str(tmp_path))), plain)
    model.merge_adapter()
    merged = logits(model)
    assert torch.cosine_similarity(merged.flatten(), plain.flatten(), 0) > 0.98
    assert not torch.equal(merged, plain)
    model.unmerge_adapter()
    assert torch.cosine_similarity(logits(model).flatten(), plain.flatten(), 0) > 0.9999
    for _ in range(0 if weights == "plain" else 30):
        model.merge_adapter(safe_merge=dora)
        model.unmerge_adapter()
        assert torch.equal(logits(model), plain)
    unloaded = model.merge_and_unload()
    if weights == "plain":
        assert torch.equal(logits(unloaded), merged)
    assert torch.cosine_similarity(logits(unloaded).flatten(), merged.flatten(), 0) > 0.99
    nc.revert(unloaded)
    assert type(unloaded.model.layers[0].self_attn.q_proj) is torch.nn.Linear


def test_a_model_that_has_adapters_is_converted_around_them() -> None:
    model = peft.get_peft_model(make(), peft.LoraConfig(r=8, target_modules="all-linear"))
    plain = logits(model)
    receipt = nc.receipt(nc.convert(model, CURRENT, skip="**.lora_*"))
    converted = [one.name for one in receipt.gemms if one.decision == "converted"]
    assert len(converted) == 14 and all(name.endswith(".base_layer") for name in converted)
    model.train()(input_ids=WORDS, labels=WORDS).loss.backward()
    nc.revert(model)
    assert torch.equal(logits(model), plain)


def test_gpt2_adapters_know_its_transposed_weights() -> None:
    config = transformers.GPT2Config(vocab_size=96, n_embd=32, n_layer=1, n_head=4, n_positions=64)
    base = transformers.GPT2LMHeadModel(config)
    nc.convert(base, CURRENT, skip="lm_head")
    lora = peft.LoraConfig(r=4, target_modules="all-linear", fan_in_fan_out=True, init_lora_weights=False)
    model = peft.get_peft_model(base, lora)
    model(input_ids=WORDS, labels=WORDS).loss.backward()
    plain = logits(model)
    assert torch.cosine_similarity(logits(model.merge_and_unload()).flatten(), plain.flatten(), 0) > 0.98


@pytest.mark.parametrize("recipe, weights", [("current", "nvfp4"), ("block", "mxfp4")])
def test_adapters_on_four_bits_train_with_checkpointing_and_merge(recipe: str, weights: Any) -> None:
    def trained(weights: Any) -> tuple[Any, float]:
        base = make().bfloat16().requires_grad_(False)
        if weights is not None:
            nc.convert(base, recipe, skip="lm_head", weights=weights)
        torch.manual_seed(1)
        model = peft.get_peft_model(base, peft.LoraConfig(r=8, target_modules="all-linear"))
        model.gradient_checkpointing_enable()
        model.enable_input_require_grads()
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 1e-2)
        for _ in range(8):
            loss = model.train()(input_ids=WORDS, labels=WORDS).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return model, loss.item()

    (model, ours), (_, theirs) = trained(weights), trained(None)
    assert theirs < 4.3 and abs(ours - theirs) < 0.02 * theirs
    beside = logits(model)
    merged = logits(nc.train_merged(model))
    assert torch.cosine_similarity(merged.flatten(), beside.flatten(), 0) > 0.95
    assert torch.equal(logits(nc.merge_adapters(model)), merged)
    assert {one.stored_as for one in nc.receipt(model.model).gemms if one.stored} == {weights}


@pytest.mark.parametrize("dora", [False, True], ids=["lora", "dora"])
def test_a_merge_in_eight_bits_loses_little(dora: bool) -> None:
    base = nc.convert(make().requires_grad_(False), CURRENT, skip="lm_head", weights="stored")
    config = peft.LoraConfig(r=8, target_modules="all-linear", use_dora=dora, init_lora_weights=False)
    model = peft.get_peft_model(base, config)
    beside = logits(model)
    assert torch.cosine_similarity(logits(nc.merge_adapters(model)).flatten(), beside.flatten(), 0) > 0.99


def test_fused_adapters_train_as_those_of_peft() -> None:
    base = make().bfloat16().requires_grad_(False)
    nc.convert(base, nc.recipe.Float8BlockScaling(), skip="lm_head", weights="stored")
    config = peft.LoraConfig(r=8, target_modules="all-linear", init_lora_weights=False)
    model = peft.get_peft_model(base, config)

    def gradients() -> dict[str, Tensor]:
        model.zero_grad()
        model.train()(input_ids=WORDS, labels=WORDS).loss.backward()
        return {name: p.grad.flatten() for name, p in model.named_parameters() if p.grad is not None}

    expected, plain = gradients(), logits(model)
    fused = gradients() if nc.fuse_adapters(model) is model else {}
    assert fused.keys() == expected.keys() and len(fused) == 2 * 2 * len(PROJECTIONS)
    assert min(torch.cosine_similarity(fused[name], expected[name], 0) for name in fused) > 0.95
    assert torch.cosine_similarity(logits(model).flatten(), plain.flatten(), 0) > 0.99
    layer: Any = model.base_model.model.model.layers[0].mlp
    assert (
        layer.gate_proj.shared_input is layer.up_proj.shared_input
        and layer.gate_proj.shared_input.inp is None
    )
    with model.disable_adapter():
        assert not torch.equal(logits(model), plain)


@pytest.mark.parametrize("remedy", [False, True])
@pytest.mark.parametrize("weights", ["stored", "nvfp4"])
def test_a_stored_layer_that_modules_to_save_trains_warns_of_lost_steps(weights: Any, remedy: bool) -> None:
    base = nc.convert(make().requires_grad_(False), CURRENT, skip="lm_head", weights=weights)
    config = peft.LoraConfig(r=8, target_modules=["q_proj"], modules_to_save=["down_proj"])
    model = peft.get_peft_model(base, config)
    copies = [module for name, module in model.named_modules() if name.endswith("modules_to_save.default")]
    for copied in copies if remedy else ():
        nc.revert(copied)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4)
    model.train()(input_ids=WORDS, labels=WORDS).loss.backward()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer.step()
    told = [str(one.message) for one in caught if "small steps change nothing" in str(one.message)]
    assert bool(told) != remedy and all("master_weights=True" in one for one in told)
    stored = [one for one in model.parameters() if isinstance(one, nc.QuantizedTensor)]
    assert len(copies) == 2 and len(stored) == (14 if remedy else 16)


EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


def make_mixture(inner: int = 96) -> Any:
    torch.manual_seed(0)
    config = transformers.Qwen3MoeConfig(
        vocab_size=96,
        hidden_size=128,
        moe_intermediate_size=inner,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=4,
        num_experts_per_tok=2,
    )
    return transformers.Qwen3MoeForCausalLM(config).bfloat16().requires_grad_(False)


@pytest.mark.parametrize("weights", ["stored", "mxfp4"])
def test_adapters_of_stored_experts_train_merge_and_unmerge(weights: Any) -> None:
    base = nc.convert(make_mixture(), nc.recipe.Float8BlockScaling(), weights=weights)
    plain = logits(base)
    experts = base.model.layers[0].mlp.experts
    model = peft.get_peft_model(base, peft.LoraConfig(r=4, target_modules=[], target_parameters=EXPERTS))
    assert torch.equal(logits(model), plain)
    model.train()(input_ids=WORDS, labels=WORDS).loss.backward()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    assert len(trained) == 4 and all(parameter.grad is not None for parameter in trained)
    torch.optim.SGD(trained, lr=100.0).step()
    tuned = logits(model)
    assert not torch.equal(tuned, plain)
    before = [[*weight.get_data_tensors()] for weight in (experts.gate_up_proj, experts.down_proj)]
    before = [[None if buffer is None else buffer.clone() for buffer in buffers] for buffers in before]
    for _ in range(3):
        model.merge_adapter()
        merged = [buffer for buffer in experts.down_proj.get_data_tensors() if buffer is not None]
        assert not all(map(torch.equal, merged, filter(lambda one: one is not None, before[1])))
        model.unmerge_adapter()
    for weight, buffers in zip((experts.gate_up_proj, experts.down_proj), before):
        held = zip(weight.get_data_tensors(), buffers)
        assert all(a is None if b is None else torch.equal(a, b) for a, b in held)
    assert torch.equal(logits(model), tuned)


def adapted_mixture(base: Any, *names: str) -> Any:
    """Return a mixture with adapters of experts and of ``q_proj`` under these names."""
    torch.manual_seed(1)
    lora = peft.LoraConfig(r=4, target_modules=["q_proj"], target_parameters=EXPERTS, init_lora_weights=False)
    model = peft.get_peft_model(base, lora, names[0])
    for name in names[1:]:
        model.add_adapter(name, lora)
    return model


def adapted_weights(model: Any) -> list[tuple[Any, Any]]:
    """Return the layers of adapters, with the weight of each."""
    found = [module for module in model.modules() if hasattr(module, "merged_adapters")]
    return [(one, getattr(one.get_base_layer(), getattr(one, "parameter_name", "weight"))) for one in found]


@pytest.mark.parametrize("weights", ["stored", "nvfp4"])
def test_several_adapters_merge_with_one_rounding(weights: Any) -> None:
    base = nc.convert(make_mixture(), nc.recipe.Float8BlockScaling(), weights=weights)
    model = adapted_mixture(base, "a", "b")
    layers = adapted_weights(model)
    assert len(layers) == 3
    before = [weight.detach().clone() for _, weight in layers]
    model.merge_adapter(["a", "b"])
    for (layer, weight), codes in zip(layers, before, strict=True):
        expected, values = codes.clone(), codes.dequantize()
        with torch.no_grad():
            for name in ("a", "b"):
                values += layer.get_delta_weight(name)
            expected.copy_(values)
        assert torch.equal(weight.dequantize(), expected.dequantize())
    for merges in ((["b"],), (["a"], ["b"]), (["a", "b"], [])):
        model.unmerge_adapter()
        assert all(torch.equal(weight, codes) for (_, weight), codes in zip(layers, before, strict=True))
        for names in merges:
            model.merge_adapter(names)


def test_a_write_between_two_merges_is_not_undone() -> None:
    base = nc.convert(make_mixture(), nc.recipe.Float8BlockScaling(), weights="stored")
    model = adapted_mixture(base, "a", "b")
    before = [weight.detach().clone() for _, weight in adapted_weights(model)]
    model.merge_adapter(["a"])
    with torch.no_grad():
        for _, weight in adapted_weights(model):
            weight.mul_(2.0)
    model.merge_adapter(["b"])
    model.unmerge_adapter()
    for (_, weight), codes in zip(adapted_weights(model), before, strict=True):
        assert weight.dequantize().norm() > 1.5 * codes.dequantize().norm()


def test_a_merge_that_fails_leaves_the_codes() -> None:
    base = nc.convert(make_mixture(), nc.recipe.Float8BlockScaling(), weights="nvfp4")
    model = adapted_mixture(base, "a")
    with torch.no_grad():
        for layer, _ in adapted_weights(model):
            layer.lora_B["a"].weight.fill_(float("nan"))
    for layer, weight in adapted_weights(model):
        codes = weight.detach().clone()
        with pytest.raises(ValueError, match="NaNs detected"):
            layer.merge(safe_merge=True)
        held = getattr(layer.get_base_layer(), getattr(layer, "parameter_name", "weight"))
        assert held is weight and not layer.merged and torch.equal(weight, codes)


@pytest.mark.parametrize("weights", ["stored", "nvfp4"])
@pytest.mark.parametrize("in_fp32", [False, True])
def test_adapters_of_stored_experts_step_with_master_weights(weights: Any, in_fp32: bool) -> None:
    recipe = nc.recipe.Float8BlockScaling()
    stored = nc.convert(make_mixture(), recipe, weights=weights)
    plain = make_mixture()
    plain.load_state_dict(stored.state_dict())
    losses: list[list[float]] = []
    for base in (stored, nc.convert(plain, recipe)):
        torch.manual_seed(1)
        lora = peft.LoraConfig(r=4, target_modules=["q_proj"], target_parameters=EXPERTS)
        model = peft.get_peft_model(base, lora, autocast_adapter_dtype=in_fp32)
        optimizer = nc.optimizers.FusedAdam(model.parameters(), lr=1e-2, master_weights=True)
        losses.append([])
        for _ in range(4):
            loss = model.train()(input_ids=WORDS, labels=WORDS).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[-1].append(loss.item())
        assert len(optimizer.state) == 6  # of the adapters alone
    assert losses[0] == losses[1] and losses[0][-1] < losses[0][0] - 0.1


def test_stored_experts_are_served_beside_their_adapters(tmp_path: Path) -> None:
    base, format = nc.convert(make_mixture(128), "block", weights="stored"), "hf-fp8-block128"
    expected = dict(nc.serving.weights(base, format))
    model = adapted_mixture(base, "default")
    tuned = logits(model)
    served = dict(nc.serving.weights(model, format, merge="beside"))
    assert [*served] == [*expected]
    assert all(
        torch.equal(served[name].view(torch.uint8), expected[name].view(torch.uint8)) for name in expected
    )
    with pytest.raises(ValueError, match=r"mlp.experts' is ParamWrapper .* others with merge_and_unload"):
        nc.export(model, tmp_path / "kept", format=format, merge="kept")
    path = nc.export(model, tmp_path / "beside", format=format, merge="beside").path
    again = nc.load_quantized(make_mixture(128), path)
    assert torch.equal(logits(peft.PeftModel.from_pretrained(again, str(path / "adapter"))), tuned)
    assert torch.equal(logits(model), tuned)
    model.merge_adapter()
    with pytest.raises(ValueError, match="is merged already"):
        nc.serving.weights(model, format, merge="beside")
