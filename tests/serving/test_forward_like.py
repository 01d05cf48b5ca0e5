"""Log-probabilities of a trained model and of engines' references, written from the engines' own descriptions."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from recipes import DEVICE
from torch import Tensor, nn

import narrowcast as nc
from narrowcast.serving.forward_like import FORMATS, GROUPS
from serving.test_export import decoded
from serving.test_weights import mixture

E4M3 = torch.float8_e4m3fn


class Words(nn.Module):
    """A small language model of odd sizes: linear layers, norms, a head in high precision."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(61, 200)
        self.layers: Any = nn.ModuleList(
            nn.ModuleDict({"up": nn.Linear(200, 328), "down": nn.Linear(328, 200)}) for _ in range(2)
        )
        self.norm, self.head = nn.LayerNorm(200), nn.Linear(200, 61, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:  # each position also sees the one before
            x = x + layer["down"](F.silu(layer["up"](self.norm(x + x.roll(1, 1)))))
        return self.head(self.norm(x))


def batch() -> Tensor:
    return torch.randint(61, (3, 11), generator=torch.Generator().manual_seed(2)).to(DEVICE)


def log_probabilities(model: nn.Module) -> Tensor:
    """Of every token but the first, given those before it."""
    tokens = batch()
    with torch.no_grad():
        found = model(tokens).float().log_softmax(-1)
    return found[:, :-1].gather(-1, tokens[:, 1:, None]).squeeze(-1)


def k3(reference: Tensor, trained: Tensor) -> float:
    """The estimator of the KL divergence that reinforcement learning reports, averaged over tokens."""
    d = (reference - trained).double()
    return (d.exp() - d - 1).mean().item()


def trained(engine: str, format: str, dtype: torch.dtype = torch.float32) -> Words:
    """A model after two optimizer steps with the forward of an engine."""
    torch.manual_seed(0)
    model = Words().to(DEVICE, dtype)
    nc.convert(model, nc.recipe.Float8CurrentScaling())
    assert nc.serving.forward_like(model, engine, format=format) is model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(2):
        logits = model(batch())
        F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), batch()[:, 1:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()


def vllm_token(x: Tensor) -> tuple[Tensor, Tensor]:
    """dynamic_per_token_scaled_fp8_quant: a floor of the scale, and a division."""
    scale = (x.abs().amax(-1, keepdim=True) / 448).clamp(min=1 / (448 * 512))
    return (x / scale).clamp(-448, 448).to(E4M3), scale


def vllm_group(x: Tensor) -> tuple[Tensor, Tensor]:
    """per_token_group_quant_fp8 with fp32 scales: a floor of the amax, and a division."""
    scale = x.abs().amax(-1, keepdim=True).clamp(min=1e-10) / 448
    return (x / scale).clamp(-448, 448).to(E4M3), scale


def sglang_token(x: Tensor) -> tuple[Tensor, Tensor]:
    """sgl_per_token_quant_fp8: a product with the reciprocal."""
    scale = x.abs().amax(-1, keepdim=True) / 448
    return (x * torch.where(scale == 0, 0, 1 / scale)).clamp(-448, 448).to(E4M3), scale


def sglang_group(x: Tensor) -> tuple[Tensor, Tensor]:
    """sgl_per_token_group_quant_fp8: two factors, each rounded by itself."""
    amax = x.abs().amax(-1, keepdim=True).clamp(min=1e-10)
    factor = torch.full_like(amax, 448) / amax  # PyTorch divides a number by multiplying with the reciprocal
    return (x * factor).clamp(-448, 448).to(E4M3), amax * torch.tensor(1.0 / 448)


def transformers_quant(x: Tensor) -> tuple[Tensor, Tensor]:
    """fp8_act_quant of the finegrained-fp8 kernels: the floor is only in the divisor."""
    scale = x.abs().amax(-1, keepdim=True) / 448
    return (x / scale.clamp(min=1e-12)).to(E4M3), scale


TOKENS = {"vllm": vllm_token, "sglang": sglang_token, "transformers": transformers_quant}
IN_GROUPS = {"vllm": vllm_group, "sglang": sglang_group, "transformers": transformers_quant}


class Rows(nn.Module):
    """A layer as CUTLASS runs it: one product of codes, multiplied by the scales of rows and columns."""

    def __init__(self, weight: Tensor, scale: Tensor, bias: Tensor, quantize: Callable[..., Any]) -> None:
        super().__init__()
        self.weight, self.scale, self.bias, self.quantize = weight.float(), scale, bias, quantize

    def forward(self, x: Tensor) -> Tensor:
        codes, scale = self.quantize(x.float())
        return (codes.float() @ self.weight.t() * scale * self.scale.view(-1) + self.bias).to(x.dtype)


class Blocks(nn.Module):
    """A layer as DeepGEMM describes it: products of 128 columns, scaled and then added in fp32."""

    def __init__(self, weight: Tensor, scale: Tensor, bias: Tensor, quantize: Callable[..., Any]) -> None:
        super().__init__()
        self.weight, self.scale, self.bias, self.quantize = weight.float(), scale, bias, quantize

    def forward(self, x: Tensor) -> Tensor:
        out = torch.zeros(*x.shape[:-1], len(self.weight), device=x.device)
        for i, start in enumerate(range(0, x.shape[-1], 128)):
            codes, scale = self.quantize(x[..., start : start + 128].float())
            of_rows = self.scale[:, i].repeat_interleave(128)[: len(self.weight)]
            out += codes.float() @ self.weight[:, start : start + 128].t() * scale * of_rows
        return (out + self.bias).to(x.dtype)


class Static(Rows):
    """static_scaled_fp8_quant: a product with the reciprocal of one scale."""

    def __init__(self, weight: Tensor, scale: Tensor, bias: Tensor, of_inputs: Tensor) -> None:
        def quantize(x: Tensor) -> tuple[Tensor, Tensor]:
            return (x * (1 / of_inputs)).clamp(-448, 448).to(E4M3), of_inputs

        super().__init__(weight, scale, bias, quantize)


def engine_of(model: Words, engine: str, format: str) -> Words:
    """The model as an engine loads it: from served tensors by their names."""
    served_as = format if format in ("hf-fp8-block128", "fp8-static") else "compressed-tensors"
    served = dict(nc.serving.weights(model, served_as))
    other = nc.revert(copy.deepcopy(model))
    for name in [name for name, _ in other.named_modules()]:
        if f"{name}.weight_scale" in served:
            scale = served[f"{name}.weight_scale"]
            parts = served[f"{name}.weight"], scale, served[f"{name}.bias"]
            of_inputs = served.get(f"{name}.input_scale")
            quantized = Rows(*parts, TOKENS[engine]) if of_inputs is None else Static(*parts, of_inputs)
        elif f"{name}.weight_scale_inv" in served:
            scale = served[f"{name}.weight_scale_inv"]
            quantized = Blocks(served[f"{name}.weight"], scale, served[f"{name}.bias"], IN_GROUPS[engine])
        else:
            continue
        owner, _, last = name.rpartition(".")
        other.get_submodule(owner)[last] = quantized  # type: ignore[index]
    return other


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("engine", GROUPS)
def test_log_probabilities_are_those_of_the_engine(engine: str, format: str) -> None:
    model = trained(engine, format)
    own = log_probabilities(model)
    served = engine_of(model, engine, format)
    assert sum(isinstance(one, (Rows, Blocks)) for one in served.modules()) == 4
    assert k3(log_probabilities(served), own) <= 1e-5
    nc.set_recipe(model, nc.recipe.Float8CurrentScaling())
    assert k3(log_probabilities(served), log_probabilities(model)) > 1e-5, "another forward"


@pytest.mark.parametrize("engine", GROUPS)
@torch.no_grad()
def test_the_operands_are_those_of_the_engine_to_the_bit(engine: str) -> None:
    """The same products of the same operands are equal: what remains is the order of sums."""
    x = torch.randn(9, 300, device=DEVICE)
    for format, quantize, group in (("fp8-channel", TOKENS, 300), ("hf-fp8-block128", IN_GROUPS, 128)):
        model: Any = nn.Sequential(nn.Linear(300, 72)).to(DEVICE)
        nc.convert(model, nc.recipe.Float8CurrentScaling())
        nc.serving.forward_like(model, engine, format=format, emulate=True)
        served = {
            key: value.cpu()
            for key, value in nc.serving.weights(model, format.replace("fp8-channel", "compressed-tensors"))
        }
        parts = [quantize[engine](part) for part in x.split(group, -1)]
        decoded_x = torch.cat([codes.float() * scale for codes, scale in parts], -1)
        expected = F.linear(decoded_x, decoded(served, "0.weight").to(DEVICE), model[0].bias)
        if DEVICE == "cpu":
            assert torch.equal(model(x), expected)
        else:  # the library adds the bias elsewhere
            sizes = decoded_x.abs() @ decoded(served, "0.weight").to(DEVICE).abs().t()
            assert bool(((model(x) - expected).abs() <= sizes * 2**-20).all())


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
@torch.no_grad()
def test_experts_multiply_the_operands_of_the_engine(engine: str) -> None:
    x, splits = torch.randn(9, 96).to(DEVICE, torch.bfloat16), torch.tensor([2, 3, 4], device=DEVICE)
    for format, quantize, inner in (("fp8-channel", TOKENS, 28), ("hf-fp8-block128", IN_GROUPS, 128)):
        model = mixture(nc.recipe.Float8CurrentScaling(), inner)
        nc.serving.forward_like(model, engine, format=format, emulate=True)
        served_as = "compressed-tensors" if format == "fp8-channel" else format
        served = {key: value.cpu() for key, value in nc.serving.weights(model, served_as)}
        layer: Any = model["experts"]
        found = layer._grouped(layer._stages[0], x, splits).cpu()
        codes, scale = quantize[engine](x.float().cpu())  # 96 columns are one group
        for i, rows in enumerate((codes.float() * scale).split(splits.tolist())):
            parts = [decoded(served, f"experts.{i}.{part}.weight") for part in ("gate_proj", "up_proj")]
            expected = (rows @ torch.cat(parts).t()).bfloat16()
            torch.testing.assert_close(found.split(splits.tolist())[i], expected, rtol=2**-8, atol=1e-5)


def test_layers_without_a_recipe_and_compiled_code() -> None:
    model = trained("vllm", "fp8-channel")
    layer: Any = model.layers[0]["up"]
    assert not hasattr(model.head, "recipe") and not layer.recipe.emulate
    x = torch.randn(4, 200, device=DEVICE)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x), layer(x))


def test_wrong_inputs() -> None:
    with pytest.raises(ValueError, match="engine is 'trt'; use one of 'vllm'"):
        nc.serving.forward_like(nn.Linear(4, 4), "trt")
    with pytest.raises(ValueError, match="format is 'int8'"):
        nc.serving.forward_like(nn.Linear(4, 4), "vllm", format="int8")
    with pytest.raises(ValueError, match="scales inputs, which engine='weight-only' leaves"):
        nc.serving.forward_like(trained("weight-only", "fp8-tensor"), "weight-only", format="fp8-static")
    with pytest.raises(ValueError, match="no layer of the model has a recipe"):
        nc.serving.forward_like(nn.Linear(4, 4), "vllm")
