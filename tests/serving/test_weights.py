"""Tensors for servers: what the training GEMMs read, named as the checkpoint names it, one weight at a time."""

from __future__ import annotations

from typing import Any

import pytest
import safetensors.torch
import torch
from convert.models import Llama4TextExperts
from recipes import DEVICE, QUANTIZED
from torch import nn

import narrowcast as nc
from serving.test_export import decoded, stack, trained


class Experts(nn.Module):
    """Experts as Transformers 5 stacks them, of odd sizes."""

    has_gate, has_bias, is_transposed, has_post_expert_norm = True, False, False, False

    def __init__(self, experts: int, hidden: int, inner: int) -> None:
        super().__init__()
        self.num_experts = experts
        self.gate_up_proj = nn.Parameter(torch.randn(experts, 2 * inner, hidden))
        self.down_proj = nn.Parameter(torch.randn(experts, hidden, inner))

    def _apply_gate(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = x.chunk(2, -1)
        return nn.functional.silu(gate) * up

    def forward(self, x: torch.Tensor, index: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


def mixture(recipe: Any, inner: int) -> nn.ModuleDict:
    torch.manual_seed(0)
    model = nn.ModuleDict({"experts": Experts(3, 96, inner), "proj": nn.Linear(96, 96)}).to(
        DEVICE, torch.bfloat16
    )
    nc.convert(model, recipe, routers=True, small=True)
    nc.set_recipe(model, recipe)
    if recipe.delayed():
        x, index = (
            torch.randn(8, 96, device=DEVICE, dtype=torch.bfloat16),
            torch.arange(8, device=DEVICE)[:, None] % 3,
        )
        y = model["experts"](x, index, torch.ones(8, 1, device=DEVICE, dtype=torch.bfloat16)) + model["proj"](
            x
        )
        y.sum().backward()
        nc.renew_delayed_scaling(model)
    return model


@pytest.mark.parametrize("name", ["delayed", "current", "mxfp8", "nvfp4"])
def test_experts_are_served_one_by_one_with_the_values_that_the_grouped_gemm_multiplies(name: str) -> None:
    model = mixture(QUANTIZED[name], 32 if "fp" in name else 28).eval()
    served = {key: value.cpu() for key, value in nc.serving.weights(model, "compressed-tensors")}
    layer: Any = model["experts"]
    for slots in layer.delayed_slots():
        slots.scale.fill_(1.0)  # of the inputs
    for stage, parts in zip(layer._stages, (("gate_proj", "up_proj"), ("down_proj",))):
        columns = getattr(layer, stage.weight).shape[2]
        rows = torch.eye(columns, dtype=torch.bfloat16, device=DEVICE).repeat(3, 1)
        splits = torch.full((3,), columns, device=DEVICE)
        values = (
            layer._grouped(stage, rows, splits).detach().view(3, columns, -1).transpose(1, 2).float().cpu()
        )
        for i in range(3):
            found = torch.cat([decoded(served, f"experts.{i}.{part}.weight") for part in parts])
            torch.testing.assert_close(found.bfloat16().float(), values[i], rtol=2**-8, atol=0)
    assert "experts.gate_up_proj" not in served and served["proj.bias"].dtype == torch.bfloat16


@pytest.mark.parametrize("name", ["current", "block", "nvfp4"])
def test_experts_of_llama_4_are_served_one_by_one(name: str) -> None:
    """Transposed in the model, (N, K) for servers, with the values that the grouped GEMM multiplies."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"experts": Llama4TextExperts(3, 96, 128)}).to(DEVICE, torch.bfloat16)
    nc.convert(model, QUANTIZED[name], routers=True, small=True, blocks=True)
    served_as = "hf-fp8-block128" if name == "block" else "compressed-tensors"
    served = {key: value.cpu() for key, value in nc.serving.weights(model, served_as)}
    assert len({key.split(".weight")[0] for key in served}) == 9
    layer: Any = model["experts"]
    for stage, parts in zip(layer._stages, (("gate_proj", "up_proj"), ("down_proj",))):
        columns = getattr(layer, stage.weight).shape[1]
        rows = torch.eye(columns, dtype=torch.bfloat16, device=DEVICE).repeat(3, 1)
        values = layer._grouped(stage, rows, torch.full((3,), columns, device=DEVICE)).detach()
        values = values.view(3, columns, -1).transpose(1, 2).float().cpu()
        for i in range(3):
            found = torch.cat([decoded(served, f"experts.{i}.{part}.weight") for part in parts])
            torch.testing.assert_close(found.bfloat16().float(), values[i], rtol=2**-8, atol=0)


def test_tiles_that_two_experts_matrices_share_stay_in_high_precision(tmp_path: Any) -> None:
    """128 rows of up follow 128 of gate; 96 and 96 share a tile, so their scales are not those of one matrix."""
    whole = dict(nc.serving.weights(mixture(QUANTIZED["block"], 128), "hf-fp8-block128"))
    assert whole["experts.2.up_proj.weight_scale_inv"].shape == (1, 1)
    assert whole["experts.0.down_proj.weight"].dtype == torch.float8_e4m3fn
    result = nc.export(mixture(QUANTIZED["block"], 96), tmp_path / "out", format="hf-fp8-block128")
    reasons = [one.reason for one in result.weights]
    assert reasons == [*["its parts begin within tiles of 128 rows"] * 2, ""], "all experts have one format"
    tensors = safetensors.torch.load_file(tmp_path / "out/model.safetensors")
    assert tensors["experts.gate_up_proj"].dtype == tensors["experts.down_proj"].dtype == torch.bfloat16


@pytest.mark.parametrize("single", [False, True])
def test_groups_and_parts_have_names_and_scales_of_their_own(single: bool) -> None:
    common: dict[str, Any] = dict(
        recipe=QUANTIZED["current"], params_dtype=torch.bfloat16, device=DEVICE, bias=False
    )
    model = nn.Sequential(
        nc.Linear(48, 40, parameters_split={"query": 24, "key": 9, "value": 7}, **common),
        nc.GroupedLinear(2, 48, 40, single_grouped_weight=single, **common),
    )
    served = {name: value.cpu() for name, value in nc.serving.weights(model, "compressed-tensors")}
    parts = [f"0.{part}_weight" for part in ("query", "key", "value")]
    groups = [f"1.{group}.weight" if single else f"1.weight{group}" for group in (0, 1)]
    assert list(served) == [name + suffix for name in (*parts, *groups) for suffix in ("", "_scale")]
    assert len({served[f"{part}_scale"].item() for part in parts}) == 1, "one GEMM reads one scale"
    assert len({served[f"{group}_scale"].item() for group in groups}) == 2
    whole = torch.cat([decoded(served, part) for part in parts])
    with torch.no_grad():
        multiplied = model[0](torch.eye(48, dtype=torch.bfloat16, device=DEVICE)).t().float().cpu()
    torch.testing.assert_close(whole.bfloat16().float(), multiplied, rtol=2**-8, atol=0)


@pytest.mark.parametrize("single", [False, True])
def test_stored_groups_under_another_recipe_are_quantized_again(single: bool) -> None:
    with nc.quantized_model_init(recipe=QUANTIZED["block"]):
        model = nc.GroupedLinear(2, 160, 96, bias=False, single_grouped_weight=single, device=DEVICE)
    nc.set_recipe(model, QUANTIZED["block"])
    values = [weight.detach().dequantize() for weight in model.parameters()]
    served = dict(nc.serving.weights(model, "mxfp8", recipe=QUANTIZED["mxfp8"]))
    plain = nc.GroupedLinear(2, 160, 96, bias=False, single_grouped_weight=single, device=DEVICE)
    for weight, value in zip(plain.parameters(), values, strict=True):
        weight.data.copy_(value)
    nc.set_recipe(plain, QUANTIZED["mxfp8"])
    wanted = dict(nc.serving.weights(plain, "mxfp8"))
    assert list(served) == list(wanted) and all(torch.equal(served[name], wanted[name]) for name in wanted)


def peak(model: nn.Module) -> tuple[int, int]:
    """The most bytes alive while a model's tensors are made and dropped, and bytes of all."""
    total = 0
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        for _, tensor in nc.serving.weights(model, "compressed-tensors"):
            total += tensor.nbytes
    found: Any = profile.profiler.kineto_results.events()  # type: ignore[union-attr]
    events = sorted((e for e in found if e.name() == "[memory]"), key=lambda e: e.start_ns())
    now, most = 0, 0
    for event in events:
        now += event.nbytes()
        most = max(most, now)
    return most, total


@pytest.mark.skipif(DEVICE != "cpu", reason="counts the host's allocations")
def test_no_more_is_alive_than_for_one_layer() -> None:
    few, many = (trained(QUANTIZED["block"], *[256] * layers).cpu() for layers in (3, 13))
    (most_of_few, _), (most, total) = peak(few), peak(many)
    assert 0 < most < most_of_few + 16384 and most < total  # a layer is made in fp32, and has 65536 codes


def test_weights_in_high_precision_are_the_models_own_memory() -> None:
    model: Any = stack(32, 48, dtype=torch.bfloat16)
    served = dict(nc.serving.weights(model, "bf16"))
    assert served["0.weight"].data_ptr() == model[0].weight.data_ptr()


def test_wrong_inputs_are_refused_before_the_first_tensor() -> None:
    with pytest.raises(ValueError, match="format is 'gguf'"):
        nc.serving.weights(stack(32, 32), "gguf")
    for way, remedy in (("stored", "compressed-tensors"), ("plain", "bf16")):
        with pytest.raises(ValueError, match=f"'{way}', a word for weights= of .*convert; use '{remedy}'$"):
            nc.serving.weights(nn.Linear(8, 8), way)
    with pytest.raises(TypeError, match="model is"):
        nc.serving.weights(lambda x: x, "bf16")  # type: ignore[arg-type]
    for dtype in (torch.float8_e4m3fn, torch.float64, "bf16"):
        with pytest.raises(ValueError, match="^dtype is .*; leave it out, or use torch.bfloat16"):
            nc.serving.weights(stack(32, 32), "bf16", dtype=dtype)  # type: ignore[arg-type]
