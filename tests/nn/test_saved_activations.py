"""``saved_activations="fp8"``: norms, activations and attention keep codes; the forward and its graph stay."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from recipes import RECIPES
from torch import nn
from torch._dynamo.backends.common import aot_autograd

import narrowcast as nc
from narrowcast import offload
from narrowcast.testing import assert_close


def block(saved: str | None, recipe: Any = nc.recipe.Float8CurrentScaling, width: int = 512) -> nn.Module:
    """A Transformer layer of the 8B shape over 8: heads of 128 channels, four to a key."""
    torch.manual_seed(0)
    return nc.TransformerLayer(
        width, width * 7 // 2, width // 128, num_gqa_groups=width // 512, activation="swiglu",
        normalization="RMSNorm", bias=False, hidden_dropout=0.0, attention_dropout=0.0, device="cpu",
        params_dtype=torch.bfloat16, self_attn_mask_type="causal",
        recipe=None if recipe is None else recipe(saved_activations=saved),
    )  # fmt: skip


def mlp(saved: str | None, name: str, dtype: torch.dtype = torch.bfloat16, **options: Any) -> Any:
    torch.manual_seed(0)
    kind: Any = type(RECIPES[name])
    recipe = kind(saved_activations=saved)
    options = {"activation": "swiglu", "normalization": "RMSNorm", **options}
    return nc.LayerNormMLP(192, 328, device="cpu", params_dtype=dtype, recipe=recipe, **options)


def given(rows: int = 7, width: int = 192, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(rows, 3, width, generator=generator).to(dtype).requires_grad_()


def saved_bytes(layer: nn.Module, x: torch.Tensor, run: Any = None, **others: Any) -> int:
    """What a forward keeps besides parameters, each storage once."""
    own = {p.data_ptr() for p in layer.parameters()}
    storages: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.data_ptr() not in own:
            storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        (layer if run is None else run)(x, **others)
    return sum(storage.nbytes() for storage in storages.values())


def gradients(layer: nn.Module, x: torch.Tensor, run: Any = None, **others: Any) -> list[torch.Tensor]:
    """Output, then gradients of input and parameters."""
    x = x.detach().requires_grad_()
    layer.zero_grad()
    out = (layer if run is None else run)(x, **others)
    out.float().square().mean().backward()
    return [out.detach(), x.grad, *(p.grad for p in layer.parameters())]  # type: ignore[list-item]


@pytest.mark.parametrize("name", ["current", "delayed", "mxfp8", "block"])
def test_the_forward_stays_and_gradients_are_close(name: str) -> None:
    plain, coded = (mlp(saved, name) for saved in (None, "fp8"))
    x = given()
    before, after = gradients(plain, x), gradients(coded, x)
    assert torch.equal(before[0], after[0])
    for expected, made in zip(before[1:], after[1:]):
        assert_close(made, expected, "fp8_saved_activations")
    assert not torch.equal(before[1], after[1])
    assert saved_bytes(coded, x) < saved_bytes(plain, x)


@pytest.mark.parametrize("options", [{}, {"normalization": "LayerNorm", "activation": "gelu"}], ids=str)
def test_compiled_and_recomputed_layers_have_the_same_bits(options: dict[str, Any]) -> None:
    layer, x = mlp("fp8", "current", torch.float32, **options), given(dtype=torch.float32)
    again = copy.deepcopy(layer)
    recomputing = mlp("fp8", "current", torch.float32, checkpoint=True, **options)
    recomputing.load_state_dict(layer.state_dict())
    expected = gradients(layer, x)
    compiled = torch.compile(again, fullgraph=True, backend="aot_eager")
    ways = {
        "compiled": gradients(again, x, compiled),
        "nc.checkpoint": gradients(layer, x, lambda x: nc.checkpoint(layer, x)),
        "checkpoint=True": gradients(recomputing, x),
    }
    for way, made in ways.items():
        for ours, theirs in zip(made, expected, strict=True):
            assert torch.equal(ours, theirs), way


def test_a_transformer_layer_keeps_little_more_than_half() -> None:
    """Bytes of a layer of the 8B shape over 8, counted by the hooks of saved tensors, beside bf16's."""
    rope, x = nc.RotaryPositionEmbedding(128)(32), given(32, 512)
    layers = {"bf16": block(None, None), "fp8 GEMMs": block(None), "fp8": block("fp8")}
    kept = {name: saved_bytes(layer, x, rotary_pos_emb=rope) for name, layer in layers.items()}
    assert 0.8 < kept["fp8 GEMMs"] / kept["bf16"] < 0.9 and kept["fp8"] / kept["bf16"] < 0.56, kept
    plain, coded = (gradients(layers[name], x, rotary_pos_emb=rope) for name in ("fp8 GEMMs", "fp8"))
    assert torch.equal(plain[0], coded[0])
    assert not torch.equal(plain[1], coded[1])
    for ours, theirs in zip(coded[1:], plain[1:], strict=True):
        assert_close(ours, theirs, "fp8_saved_activations")
    layer = layers["fp8"]
    recomputed = gradients(
        layer, x, lambda x, **others: nc.checkpoint(layer, x, **others), rotary_pos_emb=rope
    )
    assert all(torch.equal(a, b) for a, b in zip(recomputed, coded, strict=True))
    again = gradients(
        layer, x, torch.compile(layer, fullgraph=True, backend="aot_eager"), rotary_pos_emb=rope
    )
    assert all(torch.equal(a, b) for a, b in zip(again, coded, strict=True))


def attention(saved: Any) -> Any:
    torch.manual_seed(0)
    return nc.MultiheadAttention(
        96, 3, kv_channels=32, attention_dropout=0.0, device="cpu", params_dtype=torch.bfloat16, bias=False,
        attn_mask_type="causal", recipe=nc.recipe.Float8CurrentScaling(saved_activations=saved),
    )  # fmt: skip


def graphs_of(layer: nn.Module, run: Any, x: torch.Tensor) -> tuple[list[torch.Tensor], list[int], Any]:
    """Return gradients of a compiled run, the attentions in its forward and backward, and the compiled run."""
    attentions = []

    def compiler(graph: Any, inputs: Any) -> Any:
        names = [str(node.target) for node in graph.graph.nodes]
        attentions.append(sum("dot_product" in name or "softmax." in name for name in names))
        return make_boxed_func(graph.forward)

    backend = aot_autograd(fw_compiler=compiler, partition_fn=min_cut_rematerialization_partition)
    compiled = torch.compile(run, fullgraph=True, backend=backend)
    return gradients(layer, x, compiled), attentions, compiled


def test_a_graph_keeps_codes_of_attention_and_computes_it_once() -> None:
    x = given(70, 96)
    plain, coded = attention(None), attention("fp8")
    expected = gradients(coded, x)
    made, counts, compiled = graphs_of(coded, coded, x)
    assert counts == [1, 1]  # forward and backward
    assert all(torch.equal(a, b) for a, b in zip(made, expected, strict=True))
    assert not torch.equal(made[1], gradients(plain, x)[1])
    assert saved_bytes(coded, x, compiled) < 0.75 * saved_bytes(plain, x)  # and codes of weights
    inside, _, _ = graphs_of(coded, lambda x: nc.checkpoint(coded, x), x)
    assert all(torch.equal(a, b) for a, b in zip(inside, made, strict=True))


@pytest.mark.parametrize("keys", [32, 33])
def test_a_mask_is_no_tensor_of_heads_whatever_its_size(keys: int) -> None:
    """PyTorch saves the mask as numbers in the dtype of the queries; here its rows may be as long as a head's."""
    plain, coded = attention(None), attention("fp8")
    x, masked_out = given(keys, 96), torch.ones(keys, keys, dtype=torch.bool).triu(1)
    masked_out[2] = True  # sees nothing
    mask = {"attention_mask": masked_out[None, None], "attn_mask_type": "arbitrary"}
    expected, made = gradients(plain, x, **mask), gradients(coded, x, **mask)
    assert torch.equal(made[0], expected[0]) and not torch.equal(made[1], expected[1])
    for ours, theirs in zip(made[1:], expected[1:], strict=True):
        assert_close(ours, theirs, "fp8_saved_activations")
    compiled = torch.compile(coded, fullgraph=True, backend="aot_eager")
    for ours, theirs in zip(gradients(coded, x, compiled, **mask), made, strict=True):
        assert torch.equal(ours, theirs)


def test_a_graph_keeps_codes_of_attention_with_dropout() -> None:
    x, coded = given(70, 96), attention("fp8")
    coded.core_attention.attention_dropout = 0.1
    runs = []
    for run in (coded, torch.compile(coded, fullgraph=True, backend="aot_eager")):
        torch.manual_seed(3)
        runs.append(gradients(coded, x, run))
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def test_offloading_moves_the_codes(monkeypatch: pytest.MonkeyPatch) -> None:
    moved: list[torch.dtype] = []
    to_host = offload._Moved.to_host
    monkeypatch.setattr(offload, "LEAST_ELEMENTS", 2048)
    monkeypatch.setattr(offload._Moved, "to_host", lambda x: (to_host(x), moved.append(x.on_host.dtype))[0])
    layers, x = nn.ModuleList([block("fp8") for _ in range(2)]), given(16, 512)

    def run(offloads: bool) -> list[torch.Tensor]:
        context, sync = (
            nc.get_cpu_offload_context(True, 1, 2) if offloads else (contextlib.nullcontext(), None)
        )
        inp = out = x.detach().requires_grad_()
        for layer in layers:
            with context:
                out = layer(out)
            out = out if sync is None else sync(out)
        layers.zero_grad()
        out.float().square().mean().backward()
        return [inp.grad, *(p.grad for p in layers.parameters())]  # type: ignore[list-item]

    expected, made = run(False), run(True)
    assert all(torch.equal(a, b) for a, b in zip(expected, made, strict=True))
    assert moved.count(torch.uint8) >= 8 and torch.bfloat16 not in moved


def test_the_receipt_names_the_layers_that_keep_codes() -> None:
    model = nn.Sequential(mlp("fp8", "current"), mlp(None, "current"), nc.Linear(192, 192, device="cpu"))
    nc.set_recipe(model, {"2": nc.recipe.Float8CurrentScaling(saved_activations="fp8")})
    receipt = nc.receipt(model)
    assert [one.saved_activations for one in receipt.gemms] == ["fp8", "fp8", "", "", ""]
    assert "saved activations: fp8 around 2 weights" in str(receipt)
    assert "saved activations" not in str(nc.receipt(model[1]))


@pytest.mark.parametrize("name", nc.recipe.NAMES)
def test_the_option_is_a_value_of_every_recipe(name: str) -> None:
    chosen = nc.recipe.recipe_from_name(name, saved_activations="fp8")
    assert nc.recipe.recipes_from_json(nc.recipe.recipes_to_json({"": chosen})) == {"": chosen}
    assert chosen != nc.recipe.recipe_from_name(name)
    with pytest.raises(ValueError, match="saved_activations is 'fp16'; use None or 'fp8'"):
        nc.recipe.recipe_from_name(name, saved_activations="fp16")
