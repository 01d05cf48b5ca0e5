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


def transformers_token(x: Tensor) -> tuple[Tensor, Tensor]:
    """quantize_fp8_per_row on a GPU, where PyTorch divides by a number with its reciprocal."""
    scale = x.abs().amax(-1, keepdim=True) * torch.tensor(1.0 / 448)
    return (x / scale).clamp(-448, 448).to(E4M3), scale


def transformers_group(x: Tensor) -> tuple[Tensor, Tensor]:
    """fp8_act_quant_inline of the finegrained-fp8 kernels, with divisions that round: the floor is in the divisor."""
    scale = x.abs().amax(-1, keepdim=True) / 448
    return (x / scale.clamp(min=1e-12)).to(E4M3), scale


def compressed_token(x: Tensor) -> tuple[Tensor, Tensor]:
    """fake_quantize of compressed-tensors, whose scales and quotients have the dtype of the model, here fp32."""
    scale = x.abs().amax(-1, keepdim=True) / 448
    return (x / scale).clamp(-448, 448).to(E4M3), scale


TOKENS = {
    "vllm": vllm_token,
    "sglang": sglang_token,
    "transformers": transformers_token,
    "compressed-tensors": compressed_token,
}
IN_GROUPS = {"vllm": vllm_group, "sglang": sglang_group, "transformers": transformers_group}
ROUNDS = [(engine, format) for format in FORMATS for engine in GROUPS]
ROUNDS += [("compressed-tensors", format) for format in ("fp8-channel", "fp8-tensor")]


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


@pytest.mark.parametrize(("engine", "format"), ROUNDS)
def test_log_probabilities_are_those_of_the_engine(engine: str, format: str) -> None:
    model = trained(engine, format)
    own = log_probabilities(model)
    served = engine_of(model, engine, format)
    assert sum(isinstance(one, (Rows, Blocks)) for one in served.modules()) == 4
    found = k3(log_probabilities(served), own)
    assert found <= 1e-5
    nc.set_recipe(model, nc.recipe.Float8CurrentScaling())
    assert k3(log_probabilities(served), log_probabilities(model)) > max(2 * found, 2e-6), "another forward"


@pytest.mark.parametrize("engine", TOKENS)
@torch.no_grad()
def test_the_operands_are_those_of_the_engine_to_the_bit(engine: str) -> None:
    """The same products of the same operands are equal: what remains is the order of sums."""
    x = torch.randn(9, 300, device=DEVICE)
    for format, quantize, group in (("fp8-channel", TOKENS, 300), ("hf-fp8-block128", IN_GROUPS, 128)):
        if engine not in quantize or (engine == "transformers" and group == 128 and DEVICE != "cpu"):
            continue  # a GPU divides as Triton does: the next test
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
        # a library may add the bias, or the products, in another order
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


@torch.no_grad()
def test_in_bf16_compressed_tensors_computes_in_bf16() -> None:
    """Scales, quotients and decoded values of inputs are rounded to bf16, and those of weights are bf16."""
    x = torch.randn(9, 304, device=DEVICE).bfloat16()
    scale = x.abs().amax(-1, keepdim=True) / torch.tensor(448.0, device=DEVICE).bfloat16()
    decoded_x = (x / scale).clamp(-448, 448).to(E4M3).bfloat16() * scale
    for format in ("fp8-channel", "fp8-tensor"):
        model: Any = nn.Sequential(nn.Linear(304, 72)).to(DEVICE, torch.bfloat16)
        nc.convert(model, nc.recipe.Float8CurrentScaling())
        nc.serving.forward_like(model, "compressed-tensors", format=format)
        served = dict(nc.serving.weights(model, "compressed-tensors"))
        scales = served["0.weight_scale"]
        assert torch.equal(scales, scales.bfloat16().float())
        weight = served["0.weight"].bfloat16() * scales.bfloat16()
        if DEVICE == "cpu":  # the library multiplies decoded values in fp32
            expected = F.linear(decoded_x.float(), weight.float(), model[0].bias.float()).bfloat16()
        else:
            expected = F.linear(decoded_x, weight, model[0].bias)
        assert torch.equal(model(x), expected)


@pytest.mark.gpu
@torch.no_grad()
def test_a_gpu_computes_the_bits_of_kernels_that_quantize_inside() -> None:
    """With one sum along the contraction; zeros and values halfway between two codes are among the inputs."""
    from serving.fused_kernel import matmul

    for width, rows in ((256, 130), (2048, 70)):
        model: Any = nn.Sequential(nn.Linear(width, 384, bias=False)).to(DEVICE, torch.bfloat16)
        nc.convert(model, nc.recipe.Float8CurrentScaling())
        nc.serving.forward_like(model, "transformers")
        served = dict(nc.serving.weights(model, "hf-fp8-block128"))
        x = torch.randn(rows, width, device=DEVICE).bfloat16()
        x[1], x[2, 1:] = 0, torch.arange(1, width, device=DEVICE)
        expected = matmul(x, served["0.weight"], served["0.weight_scale_inv"])
        nc.set_deterministic("batch-invariant", processes=1)
        try:
            assert torch.equal(model(x), expected) and torch.equal(model(x[5:6]), expected[5:6])
        finally:
            nc.set_deterministic(None)
        few, many = model(x[:7]).float(), expected[:7].float()  # few rows are quantized by this rule, too
        assert (few - many).norm() < 0.005 * many.norm()


@pytest.mark.gpu
@torch.no_grad()
def test_a_gpu_multiplies_rows_as_the_library_does() -> None:
    """Of sizes that its GEMM takes: the bits of Transformers' layer, which calls it."""
    for rows, format in ((7, "fp8-channel"), (130, "fp8-tensor")):
        model: Any = nn.Sequential(nn.Linear(304, 80)).to(DEVICE, torch.bfloat16)
        nc.convert(model, nc.recipe.Float8CurrentScaling())
        nc.serving.forward_like(model, "transformers", format=format)
        served = dict(nc.serving.weights(model, "compressed-tensors"))
        x = torch.randn(rows, 304, device=DEVICE).bfloat16()
        scale = x.float().abs().amax(-1, keepdim=True) / 448
        codes = (x.float() / scale).clamp(-448, 448).to(E4M3)
        by_row = F.ScalingType.RowWise
        columns = served["0.weight_scale"].reshape(1, -1).expand(1, 80).contiguous()
        options = {"bias": model[0].bias, "output_dtype": torch.bfloat16}
        expected = F.scaled_mm(codes, served["0.weight"].t(), scale, by_row, columns, by_row, **options)
        assert torch.equal(model(x), expected)


def test_wrong_inputs() -> None:
    with pytest.raises(
        ValueError, match="format='hf-fp8-block128' is not one of engine='compressed-tensors'"
    ):
        nc.serving.forward_like(trained("vllm", "fp8-tensor"), "compressed-tensors")
    with pytest.raises(ValueError, match="engine is 'trt'; use one of 'vllm'"):
        nc.serving.forward_like(nn.Linear(4, 4), "trt")
    with pytest.raises(ValueError, match="format is 'int8'"):
        nc.serving.forward_like(nn.Linear(4, 4), "vllm", format="int8")
    with pytest.raises(ValueError, match="scales inputs, which engine='weight-only' leaves"):
        nc.serving.forward_like(trained("weight-only", "fp8-tensor"), "weight-only", format="fp8-static")
    with pytest.raises(ValueError, match="no layer of the model has a recipe"):
        nc.serving.forward_like(nn.Linear(4, 4), "vllm")
