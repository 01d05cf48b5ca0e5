"""Merging adapters into stored weights, and training against the merge; a stand-in has what PEFT's layers have.

``test_peft.py`` has the same with PEFT.
"""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from recipes import DEVICE, QUANTIZED
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import narrowcast as nc
from narrowcast.convert import adapters
from narrowcast.convert.adapters import base_copy
from narrowcast.convert.requantize import requantized
from narrowcast.convert.stored import FOUR_BITS
from narrowcast.quantizers import buffers_of

STORED = {
    "current": nc.Float8CurrentScalingQuantizer(nc.DType.kFloat8E4M3, columnwise=False),
    "block": nc.Float8BlockQuantizer(
        nc.DType.kFloat8E4M3, rowwise=True, columnwise=False, block_scaling_dim=2
    ),
    **FOUR_BITS,
}


class Lora(nn.Module):
    """What PEFT makes of a linear layer: a base layer, and adapters beside it."""

    def __init__(self, base: nn.Linear, rank: int, scaling: float = 2.0) -> None:
        super().__init__()
        like: Any = {"dtype": torch.bfloat16, "device": DEVICE, "bias": False}
        self.base_layer = base
        self.lora_A = nn.ModuleDict({"default": nn.Linear(base.in_features, rank, **like)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(rank, base.out_features, **like)})
        self.lora_dropout = nn.ModuleDict({"default": nn.Identity()})
        self.scaling, self.active_adapters = {"default": scaling}, ["default"]
        self.disable_adapters = self.merged = False

    def get_delta_weight(self, adapter: str) -> Tensor:
        return self.lora_B[adapter].weight @ self.lora_A[adapter].weight * self.scaling[adapter]  # type: ignore[operator,return-value]

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) + self.lora_B["default"](self.lora_A["default"](x)) * 2.0


class Merging(Lora):
    """Merges and unmerges in place, as PEFT's layers do; ``magnitude`` is a DoRA's, which PEFT multiplies by."""

    def __init__(self, base: nn.Linear, rank: int, magnitude: float = 1.0) -> None:
        self.merged_adapters: list[str] = []
        super().__init__(base, rank)
        self.magnitude = magnitude

    def get_base_layer(self) -> Any:
        return self.base_layer

    merged = property(lambda self: bool(self.merged_adapters), lambda self, _: None)  # type: ignore[assignment]

    @torch.no_grad()
    def merge(self) -> None:
        weight = self.base_layer.weight
        if self.magnitude == 1.0:
            weight.data += self.get_delta_weight("default")
        else:
            weight.data = self.magnitude * (weight.data + self.get_delta_weight("default"))
        self.merged_adapters.append("default")

    @torch.no_grad()
    def unmerge(self) -> None:
        weight = self.base_layer.weight
        if self.magnitude == 1.0:
            weight.data -= self.get_delta_weight("default")
        else:
            weight.data = weight.data / self.magnitude - self.get_delta_weight("default")
        self.merged_adapters.pop()


class Adapted(nn.Module):
    peft_config: Any = None

    def __init__(self, base: nn.Sequential, rank: int = 4) -> None:
        super().__init__()
        self.model = nn.Sequential(*[Lora(layer, rank) for layer in base])  # type: ignore[arg-type]

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x)  # type: ignore[no-any-return]

    def save_pretrained(self, folder: Any) -> None:
        folder.mkdir()
        torch.save({k: v for k, v in self.state_dict().items() if "lora_" in k}, folder / "adapter.pt")

    def unload(self) -> nn.Sequential:
        for i, layer in enumerate(self.model):
            self.model[i] = layer.base_layer  # type: ignore[assignment]
        return self.model


def adapted(recipe: Any, weights: Any, *sizes: int) -> Adapted:
    torch.manual_seed(0)
    base = nn.Sequential(*[nn.Linear(a, b) for a, b in zip(sizes, sizes[1:])]).to(DEVICE, torch.bfloat16)
    nc.convert(base.requires_grad_(False), recipe, weights=weights)
    return Adapted(base)


def inputs(features: int) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(24, features, generator=generator).to(DEVICE, torch.bfloat16).requires_grad_(True)


@pytest.mark.parametrize("quantizer", STORED.values(), ids=STORED)
@pytest.mark.parametrize("shape", [(200, 160), (33, 7), (1, 1)])
def test_values_of_a_copy_give_its_codes_again(quantizer: Any, shape: tuple[int, int]) -> None:
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(2)).to(DEVICE) * 0.02
    weight[0] = 0.0
    stored = quantizer.quantize(weight.bfloat16())
    again = requantized(stored, stored.dequantize(dtype=torch.float32))
    assert again.dtype == stored.dtype and type(again) is type(stored)
    for ours, theirs in zip(again.get_data_tensors(), stored.get_data_tensors()):
        assert (ours is None and theirs is None) or torch.equal(ours, theirs)


@pytest.mark.parametrize("quantizer", STORED.values(), ids=STORED)
def test_kept_scales_move_fewer_codes_and_err_no_more_than_new_ones(quantizer: Any) -> None:
    generator = torch.Generator().manual_seed(3)
    weight = (torch.randn(192, 160, generator=generator) * 0.02).to(DEVICE)
    stored = quantizer.quantize(weight.bfloat16())
    before = stored.dequantize(dtype=torch.float32)
    moved = before + torch.randn(192, 160, generator=generator).to(DEVICE) * 0.0004
    kept, new = requantized(stored, moved), quantizer.quantize(moved)

    def compare(tensor: Any) -> tuple[float, float]:
        values = tensor.dequantize(dtype=torch.float32)
        return (values - moved).norm().item(), (values != before).float().mean().item()

    (error, codes), (error_of_new, codes_of_new) = compare(kept), compare(new)
    assert error <= 1.01 * error_of_new and codes <= codes_of_new
    # a block that outgrows its scale gets another one; the others keep theirs
    moved[0, 0] = 3.0 * before.abs().max()
    grown = requantized(stored, moved).dequantize(dtype=torch.float32)
    assert abs(grown[0, 0] - moved[0, 0]) <= moved[0, 0] / 6
    if quantizer is STORED["block"] or quantizer is STORED["mxfp4"]:
        assert torch.equal(grown[128:], kept.dequantize(dtype=torch.float32)[128:])


@pytest.mark.parametrize("name, weights", [("current", "stored"), ("block", "mxfp4"), ("current", "nvfp4")])
def test_a_merge_whose_sum_is_representable_gives_the_logits_of_training(name: str, weights: Any) -> None:
    """An adapter of zeros, and one that changes the sign of a row: every sum is a code."""
    model = adapted(QUANTIZED[name], weights, 64, 48)
    lora: Any = model.model[0]
    with torch.no_grad():
        lora.lora_A["default"].weight.zero_()
        lora.lora_B["default"].weight.zero_()
    x, before = inputs(64), model.model[0].base_layer.weight
    trained = model(x)
    merged = nc.merge_adapters(copy.deepcopy(model))
    assert torch.equal(merged(x), trained)
    assert torch.equal(merged[0].weight.dequantize(), before.dequantize())  # type: ignore[index]
    value = before.dequantize().float()
    delta = torch.where(torch.arange(48, device=DEVICE)[:, None] == 5, -2.0 * value, 0.0)[5]
    with torch.no_grad():
        lora.lora_A["default"].weight[0] = delta / 2
        lora.lora_B["default"].weight[5, 0] = 1.0
    value[5] *= -1
    assert torch.equal(nc.merge_adapters(model)[0].weight.dequantize().float(), value)  # type: ignore[index]


CASES = [
    ("current", "stored"),
    ("current", "plain"),
    ("block", "stored"),
    ("block", "mxfp4"),
    ("current", "nvfp4"),
    ("mxfp8", "mxfp4"),
]


@pytest.mark.covering(1)
@pytest.mark.parametrize("scales", ["kept", "new"])
@pytest.mark.parametrize("name, weights", CASES)
def test_trained_against_its_merge_a_model_merges_to_the_same_bits(
    name: str, weights: Any, scales: Any
) -> None:
    model = adapted(QUANTIZED[name], weights, 64, 96, 32)
    x = inputs(64)
    beside, apart = model(x), copy.deepcopy(model)
    apart(x).float().square().sum().backward()
    nc.train_merged(model, scales=scales)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    first: dict[str, Tensor] = {}
    for _ in range(2):
        optimizer.zero_grad()
        model(x).float().square().sum().backward()
        first = first or {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        optimizer.step()
    assert set(first) == {name for name, p in apart.named_parameters() if p.grad is not None}
    for key, parameter in apart.named_parameters():
        if parameter.grad is not None:  # the forward differs by the rounding of the merge alone
            assert (
                torch.cosine_similarity(first[key].flatten().float(), parameter.grad.flatten().float(), 0)
                > 0.9
            )
    trained, gradient = model(x), torch.autograd.grad(model(x).float().sum(), x)[0]
    merged = nc.merge_adapters(copy.deepcopy(model), scales)
    assert torch.equal(merged(x), trained) and not torch.equal(trained, beside)
    assert torch.equal(torch.autograd.grad(merged(x).float().sum(), x)[0], gradient)
    base: Any = base_copy(model)
    assert base[0].weight is model.model[0].base_layer.weight
    nc.train_merged(model, enabled=False)
    assert not torch.equal(model(x), trained) and "forward" not in vars(model.model[0])


def test_only_the_copies_are_saved_for_the_backward() -> None:
    model = nc.train_merged(adapted(QUANTIZED["current"], "nvfp4", 512, 512))
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        model(inputs(512))
    assert sum(x.nbytes for x in saved) < 512 * 512  # half of what the merged weight takes in bf16


def test_what_cannot_be_merged_says_so() -> None:
    model = adapted(QUANTIZED["current"], "stored", 64, 48)
    lora: Any = model.model[0]
    with pytest.raises(ValueError, match="scales is 'old'; use 'kept' or 'new'"):
        nc.merge_adapters(model, "old")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="scales is 'old'; use 'kept' or 'new'"):
        nc.train_merged(model, scales="old")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="without adapters; pass what peft.get_peft_model returned"):
        nc.merge_adapters(model.model)
    nc.train_merged(model)
    lora.base_layer.weight.requires_grad_(True)
    refused = pytest.raises(
        RuntimeError, match=r"the weight \(48, 64\) .* requires_grad=True.*freeze the base"
    )
    with refused:
        model(inputs(64))
    with torch.no_grad():
        model(inputs(64))
    nc.train_merged(model, enabled=False)
    with refused:
        nc.train_merged(model)
    lora.base_layer.weight.requires_grad_(False)
    lora.lora_dropout["default"] = nn.Dropout(0.1)
    with pytest.raises(ValueError, match="has dropout 0.1, which no merge has"):
        nc.train_merged(model)
    lora.merged = True
    with pytest.raises(ValueError, match="is merged already"):
        nc.merge_adapters(model)
    lora.merged, lora.active_adapters = False, []
    with pytest.raises(ValueError, match="no active LoRA adapter"):
        nc.merge_adapters(model)
    lora.base_layer = nn.Embedding(4, 4)
    with pytest.raises(ValueError, match="LoRA and DoRA around nn.Linear are merged"):
        nc.merge_adapters(model)


@pytest.mark.parametrize("merge", ["kept", "beside"])
def test_an_exported_model_gives_the_logits_of_training(merge: Any, tmp_path: Any) -> None:
    model = adapted(QUANTIZED["block"], "mxfp4", 64, 96, 32)
    if merge == "kept":
        nc.train_merged(model)
    trained = model(inputs(64))
    with pytest.raises(ValueError, match="has adapters of PEFT; say with merge="):
        nc.export(model, tmp_path / "out", format="mxfp4")
    with pytest.raises(ValueError, match="has adapters of PEFT; say with merge="):
        nc.serving.weights(model, "mxfp4")
    with pytest.raises(ValueError, match="'0' has adapters of PEFT, under whose names no server finds"):
        nc.serving.weights(model.model, "mxfp4")
    path = nc.export(model, tmp_path / "out", format="mxfp4", merge=merge).path
    served = nn.Sequential(nn.Linear(64, 96), nn.Linear(96, 32)).to(DEVICE, torch.bfloat16)
    nc.load_quantized(served, path)
    if merge == "beside":
        state = torch.load(path / "adapter" / "adapter.pt")
        again = Adapted(served)
        again.load_state_dict(state, strict=False)
        assert torch.equal(again(inputs(64)), trained)
    else:
        assert torch.equal(served(inputs(64)), trained)
    with pytest.raises(TypeError, match="without adapters"):
        nc.export(served, tmp_path / "again", format="mxfp4", merge="new")


@pytest.mark.parametrize("format", ["compressed-tensors", "bf16"])
@pytest.mark.parametrize("scales", ["kept", "new"])
@pytest.mark.parametrize("weights", ["plain", "stored", "mxfp4"])
def test_a_server_gets_merged_weights_and_the_model_stays(weights: Any, scales: Any, format: str) -> None:
    model = adapted(QUANTIZED["current"], weights, 64, 96, 32)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    expected = dict(nc.serving.weights(nc.merge_adapters(copy.deepcopy(model), scales), format))
    served = dict(nc.serving.weights(model, format, merge=scales))
    of_base = dict(nc.serving.weights(model, format, merge="beside"))
    assert list(served) == list(expected) == list(of_base)
    assert all(torch.equal(served[name], expected[name]) for name in expected)
    assert not all(torch.equal(served[name], of_base[name]) for name in expected)
    assert all(map(torch.equal, before, model.parameters()))
    assert all(type(layer) is Lora for layer in model.model)


def test_each_weight_is_merged_when_a_server_asks_for_it(monkeypatch: Any) -> None:
    model, merged = adapted(QUANTIZED["current"], "plain", 64, 96, 32), []
    real = adapters._merged_weight
    monkeypatch.setattr(adapters, "_merged_weight", lambda *given: merged.append(given) or real(*given))
    pairs = nc.serving.weights(model, "bf16", merge="kept")
    assert not merged
    for name, _ in pairs:
        assert len(merged) == 1 + int(name.split(".")[0]), name
    with pytest.raises(ValueError, match="merge is True; use 'kept', 'new' or 'beside'"):
        nc.serving.weights(model, "bf16", merge=True)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="without adapters"):
        nc.serving.weights(nn.Linear(8, 8), "bf16", merge="kept")


def test_weights_that_were_tied_are_served_with_the_adapter_of_each() -> None:
    model = adapted(QUANTIZED["current"], "plain", 64, 64, 64)
    first, second = model.model
    second.base_layer.weight = first.base_layer.weight
    expected = dict(nc.serving.weights(nc.merge_adapters(copy.deepcopy(model)), "bf16"))
    served = dict(nc.serving.weights(model, "bf16", merge="kept"))
    assert list(served) == list(expected) and not torch.equal(served["0.weight"], served["1.weight"])
    assert all(torch.equal(served[name], expected[name]) for name in expected)


def gradients(model: Any, x: Tensor, run: Any = None) -> list[Tensor]:
    """Output, then gradients of the input and of the adapters."""
    x = x.detach().requires_grad_()
    model.zero_grad()
    out = (model if run is None else run)(x)
    out.float().square().sum().backward()
    return [out.detach(), x.grad, *(p.grad for p in model.parameters() if p.requires_grad)]  # type: ignore[list-item]


def distance(made: Tensor, expected: Tensor) -> float:
    return ((made.float() - expected.float()).norm() / expected.float().norm()).item()


@pytest.mark.covering(1)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("in_gemm", [False, True])
@pytest.mark.parametrize("name, weights", CASES)
def test_fused_adapters_give_what_they_give_beside(
    name: str, weights: Any, in_gemm: bool, dropout: float, dtype: torch.dtype
) -> None:
    model = (
        adapted(QUANTIZED[name], weights, 63, 40)
        if weights == "plain"
        else adapted(QUANTIZED[name], weights, 64, 48)
    )
    lora: Any = model.model[0]
    if dropout:
        lora.lora_dropout["default"] = nn.Dropout(dropout)
    lora.lora_A.to(dtype), lora.lora_B.to(dtype)
    x = inputs(lora.base_layer.in_features)

    def beside(x: Tensor) -> Tensor:
        wide = lora.lora_dropout["default"](x)
        return lora.base_layer(x) + (lora.lora_B["default"](lora.lora_A["default"](wide.to(dtype))) * 2.0).to(
            x.dtype
        )

    torch.manual_seed(2)
    expected = gradients(model, x, beside)
    assert nc.fuse_adapters(model) is model
    lora.adds_in_gemm |= in_gemm  # as on a GPU
    torch.manual_seed(2)
    made = gradients(model, x)
    assert [one.dtype for one in made] == [one.dtype for one in expected]
    assert max(map(distance, made, expected)) < 0.02
    if not dropout and weights == "stored":
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        assert all(map(torch.equal, gradients(model, x, compiled), made))
    nc.fuse_adapters(model, enabled=False)
    assert "forward" not in vars(lora)


def test_an_adapter_is_added_in_both_gemms_of_per_tensor_fp8() -> None:
    model, x = adapted(QUANTIZED["current"], "stored", 64, 48), inputs(64)
    lora: Any = model.model[0]
    expected = gradients(model, x)
    nc.fuse_adapters(model)
    lora.adds_in_gemm = True  # as on a GPU
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        made = gradients(model, x)
    assert max(map(distance, made, expected)) < 0.02
    calls = {event.key: event.count for event in profile.key_averages()}
    assert calls["narrowcast::gemm_with_product"] == 2


def test_two_fused_adapters_and_a_frozen_input() -> None:
    model = adapted(QUANTIZED["current"], "stored", 64, 48)
    lora: Any = model.model[0]
    for part, size in ((lora.lora_A, (64, 3)), (lora.lora_B, (3, 48))):
        part["other"] = nn.Linear(*size, bias=False, dtype=torch.bfloat16, device=DEVICE)
    lora.lora_dropout["other"], lora.scaling["other"] = nn.Identity(), 0.5
    lora.active_adapters = ["default", "other"]
    nc.fuse_adapters(model)
    for x in (inputs(64), inputs(64).detach()):
        h = [lora.lora_B[name](lora.lora_A[name](x)) * lora.scaling[name] for name in lora.active_adapters]
        expected = lora.base_layer(x) + h[0] + h[1]
        assert distance(model(x), expected) < 0.005
        ours, theirs = (
            torch.autograd.grad(
                out.float().square().sum(), [p for p in model.parameters() if p.requires_grad]
            )
            for out in (model(x), expected)
        )
        assert max(map(distance, ours, theirs)) < 0.01
    with torch.no_grad():
        assert distance(model(x), expected) < 0.005


def test_fused_adapters_keep_the_input_once_and_their_thin_products() -> None:
    model = nc.fuse_adapters(adapted(QUANTIZED["current"], "stored", 512, 256))
    x, saved = inputs(512) * 1.0, {}  # type: ignore[var-annotated]
    known = {p.data_ptr() for p in model.parameters()}
    base: Any = model.model[0].base_layer  # type: ignore[union-attr]
    known |= {buffer.data_ptr() for buffer in base.weight.get_data_tensors() if buffer is not None}

    def keep(tensor: Tensor) -> Tensor:
        if tensor.data_ptr() not in known:
            saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model(x)
    thin = x.shape[0] * 4 * 2 + 256 * 4 * 2
    assert sum(saved.values()) <= x.nbytes + thin + 256


def test_an_adapter_that_is_not_two_matrices_runs_as_peft_has_it(monkeypatch: Any) -> None:
    model, calls = adapted(QUANTIZED["current"], "stored", 64, 48), []
    x, lora = inputs(64), model.model[0]
    expected = model(x)
    inputs_of = adapters.adapter_inputs
    monkeypatch.setattr(adapters, "adapter_inputs", lambda x, a: calls.append(len(a)) or inputs_of(x, a))
    nc.fuse_adapters(model)
    lora.lora_variant = {"default": object()}  # type: ignore[assignment]
    assert torch.equal(model(x), expected) and not calls
    del lora.lora_variant
    assert distance(model(x), expected) < 0.005 and calls == [1]
    with pytest.raises(TypeError, match="without adapters"):
        nc.fuse_adapters(model.model)


class Attention(nn.Module):
    """Projections as Transformers names them; keys and values may have an input of their own."""

    peft_config: Any = None

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        for name, features in (("q_proj", 48), ("k_proj", 32), ("v_proj", 32)):
            base = nn.Linear(64, features, bias=False, dtype=torch.bfloat16, device=DEVICE)
            nc.convert(base.requires_grad_(False), QUANTIZED["block"], weights="stored")
            setattr(self, name, Lora(base, 4))

    def unload(self) -> None:
        raise NotImplementedError

    def forward(self, x: Tensor, other: Tensor | None = None) -> Tensor:
        other = x if other is None else other
        return torch.cat([self.q_proj(x), self.k_proj(other), self.v_proj(other)], -1)


def test_projections_of_one_input_share_its_products(monkeypatch: Any) -> None:
    model, calls = Attention(), []
    x = inputs(64)
    apart = gradients(nc.fuse_adapters(model), x, lambda x: model(x, x + 0))
    inputs_of = adapters.adapter_inputs
    monkeypatch.setattr(adapters, "adapter_inputs", lambda x, a: calls.append(len(a)) or inputs_of(x, a))
    nc.fuse_adapters(model)
    together = gradients(model, x)
    assert calls == [3] and max(map(distance, together, apart)) < 0.01
    checkpointed = gradients(model, x, lambda x: checkpoint(model, x, use_reentrant=False))
    assert calls == [3, 3, 3] and all(map(torch.equal, checkpointed, together))
    compiled = gradients(model, x, torch.compile(model, fullgraph=True, backend="aot_eager"))
    assert all(map(torch.equal, compiled, together))
    calls.clear()
    for _ in range(2):  # another input ends the sharing
        model(x, x + 0)
    assert calls == [3, 1, 1, 1, 1, 1]


@pytest.mark.parametrize("magnitude", [1.0, 1.3], ids=["lora", "dora"])
@pytest.mark.parametrize("weights", ["stored", "nvfp4", "mxfp4"])
@pytest.mark.parametrize("converted_last", [False, True])
def test_unmerging_gives_back_the_codes(weights: Any, magnitude: float, converted_last: bool) -> None:
    torch.manual_seed(0)
    base = nn.Linear(96, 33).to(DEVICE, torch.bfloat16).requires_grad_(False)
    if not converted_last:
        nc.convert(base, "current", weights=weights)
    layer: Any = Merging(base, 4, magnitude)
    if converted_last:
        nc.convert(layer, "current", weights=weights, skip="lora_*")
    before = [buffer.clone() for buffer in buffers_of(base.weight).rowwise]
    layer = copy.deepcopy(layer)
    weight = layer.base_layer.weight
    for _ in range(30):
        layer.merge()
        layer = pickle.loads(pickle.dumps(layer))
        assert not torch.equal(buffers_of(layer.base_layer.weight).rowwise[0], before[0])
        layer.unmerge()
    weight = layer.base_layer.weight
    assert all(map(torch.equal, buffers_of(weight).rowwise, before))
    layer.merge()
    with torch.no_grad():
        weight.copy_(torch.zeros_like(weight))  # by other code: what it wrote is not replaced
    layer.unmerge()
    assert not all(map(torch.equal, buffers_of(weight).rowwise, before))
