"""TransformerLayer and MultiheadAttention against the same in plain PyTorch, and Transformer Engine's names."""

from __future__ import annotations

import copy
from typing import Any

import plain_transformer as plain
import pytest
import torch
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from modules import assert_same, randomized, step
from recipes import DEVICE, EMULATE, QUANTIZED
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd

import narrowcast as nc
from narrowcast.layers import LinearLayer
from narrowcast.layers.parameters import named_layer
from narrowcast.testing import assert_close

H, FFN, HEADS, LENGTH, BATCH = 32, 48, 4, 7, 2
DROPLESS = {"hidden_dropout": 0.0, "attention_dropout": 0.0}


def make_layer(**options: Any) -> nc.TransformerLayer:
    torch.manual_seed(1)
    wide = {"init_method": lambda w: nn.init.normal_(w, std=0.3)}
    options = {
        **DROPLESS,
        "device": DEVICE,
        "output_layer_init_method": wide["init_method"],
        **wide,
        **options,
    }
    return randomized(nc.TransformerLayer(H, FFN, HEADS, **options))


def make_attention(**options: Any) -> nc.MultiheadAttention:
    torch.manual_seed(1)
    wide = {"init_method": lambda w: nn.init.normal_(w, std=0.3)}
    options = {"device": DEVICE, "attention_dropout": 0.0, **wide, **options}
    return randomized(nc.MultiheadAttention(H, HEADS, **options))


def rows(length: int, seed: int) -> Tensor:
    """(BATCH, length, H)"""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(BATCH, length, H, generator=generator).to(DEVICE).requires_grad_(True)


def in_format(x: Tensor, fmt: str) -> Tensor:
    return {"bshd": x, "sbhd": x.transpose(0, 1), "thd": x.flatten(0, 1)}[fmt]


def lengths(length: int) -> Tensor:
    return torch.arange(0, (BATCH + 1) * length, length, dtype=torch.int32, device=DEVICE)


def compare_with_plain(module: Any, expected: Any, options: dict[str, Any], fmt: str, **inputs: Any) -> None:
    """Output and gradients of the input, the encoder's output and all parameters, against ``expected``."""
    x = rows(LENGTH, 2)
    encoder = rows(LENGTH + 2, 3) if options.pop("cross", False) else None
    if fmt == "thd":
        inputs |= {"cu_seqlens_q": lengths(LENGTH), "cu_seqlens_kv": lengths(LENGTH)}
    if encoder is not None:
        inputs["encoder_output"] = in_format(encoder, fmt)
    state = {name: p.detach().clone().requires_grad_(True) for name, p in module.named_parameters()}
    options = {"dim": module_dim(module), **options}
    theirs = torch.stack(
        [expected(state, x[i], None if encoder is None else encoder[i], options) for i in range(BATCH)]
    )
    wanted = [x, *([] if encoder is None else [encoder])]
    their_grads = torch.autograd.grad(theirs.square().sum(), [*wanted, *state.values()])
    ours = module(in_format(x, fmt), **inputs)
    ours = ours[0] if isinstance(ours, tuple) else ours
    our_grads = torch.autograd.grad(ours.square().sum(), [*wanted, *module.parameters()])
    assert_close(ours, in_format(theirs, fmt), "fp32_layer")
    for a, b in zip(our_grads, their_grads, strict=True):
        if b.norm() > 1e-4 * theirs.detach().norm():  # the gradient of a key's bias is rounding alone
            assert_close(a, b, "fp32_layer")


def module_dim(module: Any) -> int:
    return module.kv_channels if hasattr(module, "kv_channels") else module.self_attention.kv_channels


LAYER_OPTIONS: dict[str, dict[str, Any]] = {
    "pre_norm": {},
    "llama": {
        "num_gqa_groups": 2, "normalization": "RMSNorm", "activation": "swiglu", "bias": False, "rope": True,
        "attn_input_format": "bshd",
    },
    "fused_qkv_gqa": {"fuse_qkv_params": True, "num_gqa_groups": 2, "kv_channels": 6},
    "fused_qkv_not_interleaved": {"fuse_qkv_params": True, "num_gqa_groups": 2, "qkv_weight_interleaved": False},
    "post_norm_residual": {"apply_residual_connection_post_layernorm": True, "zero_centered_gamma": True},
    "output_norm": {"output_layernorm": True, "normalization": "RMSNorm"},
    "parallel": {"parallel_attention_mlp": True, "fuse_qkv_params": True},
    "decoder": {"layer_type": "decoder", "num_gqa_groups": 2, "cross": True},
    "decoder_fused": {
        "layer_type": "decoder", "num_gqa_groups": 2, "cross": True, "fuse_qkv_params": True,
        "attn_input_format": "bshd", "apply_residual_connection_post_layernorm": True,
    },
    "packed": {"attn_input_format": "thd", "self_attn_mask_type": "padding_causal", "rope": True},
    "packed_fused_rope": {
        "attn_input_format": "thd", "self_attn_mask_type": "padding_causal", "rope": True, "fuse_qkv_params": True,
        "num_gqa_groups": 2, "rotary_pos_interleaved": True,
    },
    "fused_rope_norm": {"fuse_qkv_params": True, "num_gqa_groups": 2, "rope": True, "qk_norm_type": "RMSNorm"},
    "fused_norm_rope": {
        "fuse_qkv_params": True, "attn_input_format": "bshd", "rope": True, "qk_norm_type": "RMSNorm",
        "qk_norm_before_rope": True,
    },
    "qk_norm_rms": {"qk_norm_type": "RMSNorm", "rope": True, "qk_norm_before_rope": True},
    "qk_norm_layer": {"qk_norm_type": "LayerNorm", "rope": True, "rotary_pos_interleaved": True},
    "qk_norm_l2": {"qk_norm_type": "L2Normalization", "qk_norm_eps": 1e-3},
    "no_mask": {"self_attn_mask_type": "no_mask", "causal": False, "layernorm_epsilon": 1e-3},
}  # fmt: skip
NOT_OF_THE_LAYER = ("rope", "cross", "causal")


def angles(dim: int, options: dict[str, Any], base: float = 100.0) -> Tensor:
    embedding = nc.RotaryPositionEmbedding(
        dim, rotary_base=base, interleaved=options.get("rotary_pos_interleaved", False)
    )
    return embedding.to(DEVICE)(16)


@pytest.mark.parametrize("name", LAYER_OPTIONS)
def test_layer_equals_plain_pytorch(name: str) -> None:
    options = dict(LAYER_OPTIONS[name])
    layer = make_layer(**{k: v for k, v in options.items() if k not in NOT_OF_THE_LAYER})
    turns, inputs = None, {}
    if options.get("rope"):
        inputs["rotary_pos_emb"] = angles(layer.self_attention.kv_channels, options)
        turns = (inputs["rotary_pos_emb"][:, 0, 0],) * 2

    def expected(state: plain.State, x: Tensor, encoder: Tensor | None, options: dict[str, Any]) -> Tensor:
        return plain.layer(state, x, HEADS, options, encoder, turns)

    compare_with_plain(layer, expected, options, options.get("attn_input_format", "sbhd"), **inputs)


ATTENTION_OPTIONS: dict[str, dict[str, Any]] = {
    "self": {},
    "fused": {"fuse_qkv_params": True, "bias": False, "num_gqa_groups": 1},
    "normed": {"input_layernorm": True, "num_gqa_groups": 2, "qkv_format": "bshd"},
    "cross": {"attention_type": "cross", "cross": True},
    "cross_fused": {"attention_type": "cross", "cross": True, "fuse_qkv_params": True, "num_gqa_groups": 2},
    "cross_not_interleaved": {
        "attention_type": "cross", "cross": True, "fuse_qkv_params": True, "qkv_weight_interleaved": False,
        "input_layernorm": True, "kv_channels": 6,
    },
    "rotary_pair": {"rope": True},
    "rotary_pair_fused": {"rope": True, "fuse_qkv_params": True, "qkv_format": "bshd"},
}  # fmt: skip


@pytest.mark.parametrize("name", ATTENTION_OPTIONS)
def test_attention_equals_plain_pytorch(name: str) -> None:
    options = dict(ATTENTION_OPTIONS[name])
    mask = "no_mask" if "cross" in options else "causal"
    made = {k: v for k, v in options.items() if k not in NOT_OF_THE_LAYER}
    module = make_attention(attn_mask_type=mask, **made)
    turns, inputs = None, {}
    if options.get("rope"):
        pair = (angles(module.kv_channels, options), angles(module.kv_channels, options, 10.0))
        inputs["rotary_pos_emb"], turns = pair, (pair[0][:, 0, 0], pair[1][:, 0, 0])

    def expected(state: plain.State, x: Tensor, encoder: Tensor | None, options: dict[str, Any]) -> Tensor:
        return plain.attention(state, "", x, HEADS, options, encoder, turns)[0]

    compare_with_plain(module, expected, options, options.get("qkv_format", "sbhd"), **inputs)


def test_attention_returns_bias_and_norm() -> None:
    extra = {"return_bias": True, "input_layernorm": True, "return_layernorm_output": True}
    module, alone = make_attention(**extra), make_attention(input_layernorm=True)
    x = in_format(rows(LENGTH, 2), "sbhd")
    out, bias, normalized = module(x)
    assert bias is module.proj.bias
    assert_close(out + bias, alone(x), "fp32_sum_order")
    norm = module.layernorm_qkv
    assert_close(
        normalized,
        torch.nn.functional.layer_norm(x, (H,), norm.layer_norm_weight, norm.layer_norm_bias, 1e-5),
        "fp32_layer",
    )
    assert isinstance(make_attention(return_layernorm_output=True)(x), Tensor)  # there is no norm


@pytest.mark.parametrize("fused", [False, True])
def test_rotary_positions_where_packed_sequences_have_gaps(fused: bool) -> None:
    module = make_attention(qkv_format="thd", attn_mask_type="padding_causal", fuse_qkv_params=fused)
    x, turns = rows(LENGTH, 2).detach(), angles(module.kv_channels, {})
    cu, begins = lengths(LENGTH), lengths(LENGTH + 3)
    dense = module(in_format(x, "thd"), rotary_pos_emb=turns, cu_seqlens_q=cu, cu_seqlens_kv=cu)
    gaps = torch.cat([x, torch.ones(BATCH, 3, H, device=DEVICE)], 1)
    out = module(
        in_format(gaps, "thd"), rotary_pos_emb=turns, cu_seqlens_q=cu, cu_seqlens_kv=cu, cu_seqlens_q_padded=begins,
        cu_seqlens_kv_padded=begins,
    )  # fmt: skip
    assert_close(out.unflatten(0, (BATCH, -1))[:, :LENGTH].flatten(0, 1), dense, "fp32_layer")


# -- names ----------------------------------------------------------------------------------------------------------


def keys(*groups: str) -> set[str]:
    """ "a:b c" -> a.b, a.c"""
    return {f"{group.split(':')[0]}.{name}" for group in groups for name in group.split(":")[1].split()}


MLP_KEYS = (
    "layernorm_mlp:layer_norm_weight layer_norm_bias fc1_weight fc1_bias fc2_weight fc2_bias _extra_state"
)
PROJ_KEYS = "proj:weight bias _extra_state"
NORM_KEYS = "layer_norm_weight layer_norm_bias _extra_state"
SPLIT_KEYS = "query_weight key_weight value_weight query_bias key_bias value_bias"
TE_KEYS = {
    "encoder": (
        {},
        keys(
            f"self_attention.layernorm_qkv:{NORM_KEYS} {SPLIT_KEYS}",
            f"self_attention.{PROJ_KEYS}", "self_attention.core_attention:_extra_state", MLP_KEYS,
        ),
    ),
    "encoder_fused": (
        {"fuse_qkv_params": True},
        keys(
            f"self_attention.layernorm_qkv:{NORM_KEYS} weight bias", f"self_attention.{PROJ_KEYS}",
            "self_attention.core_attention:_extra_state", MLP_KEYS,
        ),
    ),
    "decoder": (
        {"layer_type": "decoder"},
        keys(
            f"self_attention.layernorm_qkv:{NORM_KEYS} {SPLIT_KEYS}",
            f"self_attention.{PROJ_KEYS}", "self_attention.core_attention:_extra_state",
            f"inter_attention.layernorm_query:{NORM_KEYS} query_weight query_bias",
            "inter_attention.key_value:key_weight value_weight key_bias value_bias _extra_state",
            f"inter_attention.{PROJ_KEYS}", "inter_attention.core_attention:_extra_state", MLP_KEYS,
        ),
    ),
    "decoder_fused": (
        {"layer_type": "decoder", "fuse_qkv_params": True},
        keys(
            f"self_attention.layernorm_qkv:{NORM_KEYS} weight bias", f"self_attention.{PROJ_KEYS}",
            "self_attention.core_attention:_extra_state",
            f"inter_attention.layernorm_query:{NORM_KEYS} weight bias",
            "inter_attention.key_value:weight bias _extra_state",
            f"inter_attention.{PROJ_KEYS}", "inter_attention.core_attention:_extra_state", MLP_KEYS,
        ),
    ),
    "output_norm": (
        {"output_layernorm": True, "fuse_qkv_params": True, "normalization": "RMSNorm", "bias": False,
         "qk_norm_type": "RMSNorm", "softmax_type": "learnable"},
        keys(
            "self_attention.qkv:weight _extra_state", "self_attention.proj:weight _extra_state",
            "self_attention.core_attention:_extra_state softmax_offset",
            "self_attention.q_norm:weight _extra_state", "self_attention.k_norm:weight _extra_state",
            "layernorm_mlp:layer_norm_weight fc1_weight fc2_weight _extra_state", "layernorm:weight _extra_state",
        ),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", TE_KEYS)
def test_a_checkpoint_of_transformer_engine_loads_by_name(name: str) -> None:
    """The keys and shapes are those of Transformer Engine 2; it keeps an empty ``_extra_state`` of every module."""
    options, expected = TE_KEYS[name]
    layer = make_layer(**options)
    own = layer.state_dict()
    assert {key for key in expected if not key.endswith("_extra_state")} == set(own)
    assert set(nc.compat.transformer_engine_state_dict(layer)) == set(expected)  # and ours loads there
    checkpoint = {
        key: torch.randn_like(own[key]) if key in own else torch.empty(0, dtype=torch.uint8)
        for key in expected
    }
    layer.load_state_dict(checkpoint)
    for key, value in layer.state_dict().items():
        assert torch.equal(value, checkpoint[key]), key


def test_shapes_of_parameters() -> None:
    layer = make_layer(fuse_qkv_params=True, num_gqa_groups=2, kv_channels=6, layer_type="decoder")
    shapes = {name: tuple(p.shape) for name, p in layer.named_parameters()}
    assert shapes["self_attention.layernorm_qkv.weight"] == ((4 + 2 + 2) * 6, H)
    assert shapes["inter_attention.layernorm_query.weight"] == (4 * 6, H)
    assert shapes["inter_attention.key_value.weight"] == (2 * 2 * 6, H)
    assert shapes["self_attention.proj.weight"] == (H, 4 * 6)


# -- dropout --------------------------------------------------------------------------------------------------------


def test_drop_path_drops_whole_samples() -> None:
    for fmt, batch_dim in (("sbhd", 1), ("bshd", 0)):
        layer = make_layer(drop_path_rate=0.5, attn_input_format=fmt)
        x = torch.randn(64, 64, H, device=DEVICE)
        layer.eval()
        evaluated = layer(x)
        layer.train()
        layer.self_attention.requires_grad_(False)
        kept = (layer(x) - x).abs().amax([i for i in range(3) if i != batch_dim]) > 0
        assert 0.5 < kept.float().mean() < 1  # dropped where both parts are: a quarter
        assert torch.equal(evaluated, make_layer(attn_input_format=fmt).eval()(x))


def test_hidden_dropout() -> None:
    layer = make_layer(hidden_dropout=0.75)
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            parameter.fill_(1.0 if name == "self_attention.proj.bias" else 0.0)
    x = torch.zeros(64, 16, H, device=DEVICE)
    out = layer(x)
    assert set(out.unique().tolist()) == {0.0, 4.0} and 0.2 < (out != 0).float().mean() < 0.3
    assert torch.equal(layer.eval()(x), torch.ones_like(x))


# -- compiled -------------------------------------------------------------------------------------------------------

COMPILED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "decoder": ({"layer_type": "decoder", "apply_residual_connection_post_layernorm": True, "num_gqa_groups": 2}, {}),
    "packed": ({"attn_input_format": "thd", "self_attn_mask_type": "padding_causal", "qk_norm_type": "LayerNorm"}, {}),
    "dropout": (
        # a dropout whose scale is a power of two: PyTorch rounds others differently in eager and compiled backwards
        {"hidden_dropout": 0.5, "attention_dropout": 0.2, "drop_path_rate": 0.2, "parallel_attention_mlp": True}, {},
    ),
    "core_again": ({"output_layernorm": True}, {"checkpoint_core_attention": True}),
}  # fmt: skip


@pytest.mark.parametrize("name", COMPILED)
def test_compiled_equals_eager(name: str) -> None:
    """One graph, forward and backward; the matrix of all recipes is in test_compile_matrix.py."""
    options, inputs = COMPILED[name]
    fmt, x = options.get("attn_input_format", "sbhd"), rows(16, 2).detach().bfloat16()
    inputs = dict(inputs)
    if fmt == "thd":
        inputs |= {
            "cu_seqlens_q": lengths(16),
            "cu_seqlens_kv": lengths(16),
            "max_seqlen_q": 16,
            "max_seqlen_kv": 16,
        }
        inputs["rotary_pos_emb"] = angles(H // HEADS, {})
    if options.get("layer_type") == "decoder":
        inputs["encoder_output"] = rows(8, 3).detach().bfloat16().transpose(0, 1)
    layer = make_layer(params_dtype=torch.bfloat16, **options)
    x = in_format(x, fmt).contiguous().requires_grad_(True)
    forward = torch.compile(copy.deepcopy(layer), fullgraph=True, backend="aot_eager")
    recipe = nc.recipe.MXFP8BlockScaling(emulate=EMULATE)
    compiled = step(forward._orig_mod, x, recipe, forward, **inputs)
    assert_same(compiled, step(layer, x, recipe, **inputs))


def test_torch_autocast() -> None:
    layer = make_layer(qk_norm_type="RMSNorm", init_method=None, output_layer_init_method=None)
    x = in_format(rows(LENGTH, 2), "sbhd")
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        out = layer(x)
    assert out.dtype == torch.float32  # the residual's
    assert_close(out, layer(x), "bf16_output")
    out.sum().backward()


# -- residuals ------------------------------------------------------------------------------------------------------


class Alone(nn.Module):
    """A part that does not know of residuals."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, inp: Tensor, *others: Any, **named: Any) -> Any:
        assert "residual" not in named and "return_input" not in named
        return self.inner(inp, *others, **named)


RESIDUALS: dict[str, dict[str, Any]] = {
    "plain": {"bias": False},
    "dropout": {"hidden_dropout": 0.5, "drop_path_rate": 0.5, "bias": False},
    "decoder": {"layer_type": "decoder", "apply_residual_connection_post_layernorm": True},
    "output_layernorm": {"output_layernorm": True, "normalization": "RMSNorm"},
    "parallel": {"parallel_attention_mlp": True},
}


@pytest.mark.parametrize("name", RESIDUALS)
def test_the_norms_sum_the_residual_and_its_gradients(name: str) -> None:
    """The bits of sums between the parts, in fp32 those of the gradients, too; and nothing more is saved."""
    results: list[dict[str, Tensor]] = []
    saved: list[list[int]] = []
    for dtype in (torch.float32, torch.bfloat16):
        for alone in (False, True):
            layer = make_layer(params_dtype=dtype, **RESIDUALS[name])
            if alone:
                own = layer.self_attention if name == "plain" else layer
                for part in {"layernorm_qkv", "self_attention", "inter_attention"} & set(own._modules):
                    setattr(own, part, Alone(getattr(own, part)))
                layer.layernorm_mlp = Alone(layer.layernorm_mlp)  # type: ignore[assignment]
            x, inputs, tensors = rows(16, 2).detach().to(dtype).requires_grad_(), {}, {}
            if name == "decoder":
                inputs["encoder_output"] = rows(16, 3).detach().to(dtype)

            def keep(tensor: Tensor, tensors: dict[int, int] = tensors) -> Tensor:
                tensors[tensor.data_ptr()] = tensor.nbytes
                return tensor

            with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
                results.append(step(layer, x, nc.recipe.Float8CurrentScaling(), **inputs))
            saved.append(sorted(tensors.values()))
    assert saved[0] == saved[1] and saved[2] == saved[3]
    ours, theirs = ({key.replace("inner.", ""): value for key, value in one.items()} for one in results[:2])
    assert_same(ours, theirs)
    assert torch.equal(results[2]["out0"], results[3]["out0"])
    assert_close(results[2]["d input"], results[3]["d input"], "fp8_layer")


def test_one_sum_is_left_to_the_compiler() -> None:
    """That of the output: the norms' kernels sum the other residual, and both gradients of residuals."""
    sums: dict[str, int] = {}

    def count(graph: torch.fx.GraphModule, name: str) -> Any:
        added = [node for node in graph.graph.nodes if node.target is torch.ops.aten.add.Tensor]
        sums[name] = sum(node.meta["val"].numel() == x.numel() for node in added)
        return make_boxed_func(graph.forward)

    backend = aot_autograd(
        fw_compiler=lambda graph, inputs: count(graph, "forward"),
        bw_compiler=lambda graph, inputs: count(graph, "backward"),
        partition_fn=min_cut_rematerialization_partition,
    )
    layer = make_layer(params_dtype=torch.bfloat16, bias=False, fuse_qkv_params=True)
    x = rows(16, 2).detach().bfloat16().requires_grad_()
    step(layer, x, nc.recipe.Float8CurrentScaling(), torch.compile(layer, fullgraph=True, backend=backend))
    assert sums == {"forward": 1, "backward": 0}


# -- recipes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", QUANTIZED)
def test_recipes_of_the_layer(recipe: str) -> None:
    """``recipe=``, ``set_recipe`` and ``autocast`` are one thing."""
    chosen = QUANTIZED[recipe]
    options = {"params_dtype": torch.bfloat16, "init_method": None, "output_layer_init_method": None}
    layer, other = make_layer(recipe=chosen, **options), make_layer(**options)
    assert set(nc.get_recipes(layer)) == {
        "self_attention.layernorm_qkv",
        "self_attention.proj",
        "layernorm_mlp",
    }
    x = rows(16, 2).detach().bfloat16().requires_grad_(True)
    own = owned_step(layer, x)
    assert_same(own, step(other, x, chosen))
    assert_same(own, owned_step(nc.set_recipe(make_layer(**options), chosen), x))
    plain_step = step(make_layer(**options), x, None)
    assert not torch.equal(own["out0"], plain_step["out0"])
    assert_close(own["out0"], plain_step["out0"], "fp4_layer" if recipe == "nvfp4" else "fp8_layer")


def owned_step(layer: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """A step without any autocast."""
    torch.manual_seed(7)
    out = layer(x)
    wanted = dict(layer.named_parameters())
    grads = torch.autograd.grad(out.float().square().sum(), [*wanted.values(), x])
    return {"out0": out.detach(), **{f"d {name}": grad for name, grad in zip([*wanted, "input"], grads)}}


def test_convert_tells_of_the_layer() -> None:
    model = nn.Sequential(nn.Linear(H, H, device=DEVICE), make_layer())
    receipt = nc.receipt(nc.convert(model, nc.recipe.Float8CurrentScaling()))
    decisions = {gemm.name: gemm.decision for gemm in receipt.gemms}
    assert decisions["0"] == "converted" and decisions["1.self_attention.proj"] == "narrowcast"
    nc.set_recipe(model, nc.recipe.Float8CurrentScaling())
    assert all(recipe is not None for recipe in nc.get_recipes(model).values())


def test_quantized_parameters_and_meta() -> None:
    with nc.quantized_model_init(recipe=nc.recipe.Float8CurrentScaling()):
        layer = make_layer(fuse_qkv_params=True, recipe=nc.recipe.Float8CurrentScaling())
    quantized = {name for name, p in layer.named_parameters() if isinstance(p, nc.QuantizedTensor)}
    assert {name.split(".")[-1] for name in quantized} == {"weight", "fc1_weight", "fc2_weight"}
    layer(in_format(rows(16, 2), "sbhd")).sum().backward()
    layer = nc.TransformerLayer(
        H, FFN, HEADS, device="meta", fuse_qkv_params=True, qk_norm_type="RMSNorm", output_layernorm=True,
        softmax_type="learnable",
    )  # fmt: skip
    assert all(p.is_meta for p in layer.parameters())
    torch.manual_seed(1)
    layer.to_empty(device=DEVICE)
    layer.reset_parameters()
    torch.manual_seed(1)
    same = nc.TransformerLayer(
        H, FFN, HEADS, device=DEVICE, fuse_qkv_params=True, qk_norm_type="RMSNorm", output_layernorm=True,
        softmax_type="learnable",
    )  # fmt: skip
    assert {k: tuple(v.shape) for k, v in layer.state_dict().items()} == {
        k: tuple(v.shape) for k, v in same.state_dict().items()
    }
    for name, parameter in layer.named_parameters():
        if parameter.dim() == 1:
            assert torch.equal(parameter, same.get_parameter(name)), name
        assert bool(parameter.isfinite().all()), name


# -- errors ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"layer_type": "middle"}, "layer_type is 'middle'; use 'encoder' or 'decoder'"),
        ({"parallel_attention_mlp": True, "layer_type": "decoder"}, "does not go with layer_type='decoder'"),
        ({"parallel_attention_mlp": True, "output_layernorm": True}, "does not go with output_layernorm"),
        (
            {"parallel_attention_mlp": True, "apply_residual_connection_post_layernorm": True},
            "does not go with apply_residual_connection_post_layernorm",
        ),
        ({"fuse_wgrad_accumulation": True}, "fuse_wgrad_accumulation=True needs fuse_qkv_params=True"),
        ({"hidden_dropout": 1.5}, "hidden_dropout is 1.5"),
        ({"num_gqa_groups": 3}, "num_attention_heads=4 is not a multiple of num_gqa_groups=3"),
        ({"attn_input_format": "bhsd"}, "bhsd"),
        ({"qk_norm_type": "Batch"}, "qk_norm_type is 'Batch'"),
        ({"layer_number": 0}, "layer_number is 0"),
        ({"tp_size": 3, "set_parallel_mode": True}, "multiples of tp_size=3"),
    ],
)
def test_wrong_options_are_told(options: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        make_layer(**options)


def test_what_is_not_there_is_told() -> None:
    with pytest.raises(NotImplementedError, match="ub_tp_comm_overlap"):
        make_layer(ub_tp_comm_overlap=True)
    make_layer(
        ub_tp_comm_overlap=False, ub_overlap_ag=True, ub_bulk_dgrad=True, micro_batch_size=2, seq_length=128
    )
    with pytest.raises(ValueError, match=r"num_attention_heads=5; change one of them, or give kv_channels"):
        nc.MultiheadAttention(H, 5, device=DEVICE)


@pytest.mark.parametrize("options", [{}, {"name": "block"}, {"output_layernorm": True}], ids=str)
def test_messages_name_the_modules_of_the_layer(options: dict[str, Any]) -> None:
    layer = make_layer(layer_type="decoder", **options)
    prefix = f"{options['name']}." if "name" in options else ""
    inner = {name: module for name, module in layer.named_modules() if isinstance(module, LinearLayer)}
    assert [named_layer(module) for module in inner.values()] == [repr(prefix + name) for name in inner]
    first = next(iter(inner))
    x = torch.randn(LENGTH, BATCH, H, device=DEVICE, dtype=torch.float64)
    with pytest.raises(TypeError, match=f"in '{prefix}{first}' of "):
        layer(x, encoder_output=x)


def test_messages_name_the_options_of_the_layer() -> None:
    x, mask = torch.randn(LENGTH, BATCH, H, device=DEVICE), torch.zeros(BATCH, 1, 1, 1, device=DEVICE)
    decoder = make_layer(layer_type="decoder", enc_dec_attn_mask_type="padding")
    with pytest.raises(ValueError, match="^attn_input_format is 'bhsd'; the nearest: 'sbhd'"):
        make_layer(attn_input_format="bhsd")
    with pytest.raises(ValueError, match="with attn_input_format='sbhd' each must"):
        decoder(x[0], encoder_output=x[0])
    with pytest.raises(ValueError, match="^attn_input_format='thd' needs cu_seqlens_q"):
        make_layer(attn_input_format="thd", self_attn_mask_type="padding")(x[0])
    with pytest.raises(ValueError, match="^encoder_output is missing with layer_type='decoder'; pass it"):
        decoder(x)
    for layer in (make_layer(self_attn_mask_type="padding"), make_layer()):
        with pytest.raises(ValueError, match="^self_attn_mask_type is 'padding' and attention_mask is None"):
            layer(x, self_attn_mask_type="padding")
    with pytest.raises(
        ValueError, match="^enc_dec_attn_mask_type is 'padding' and enc_dec_attn_mask is None"
    ):
        decoder(x, encoder_output=x)
    with pytest.raises(TypeError, match="^enc_dec_attn_mask is torch.float32; it must be torch.bool"):
        decoder(x, encoder_output=x, enc_dec_attn_mask=mask)
    angles = torch.zeros(LENGTH - 1, 1, 1, H // HEADS, device=DEVICE)
    with pytest.raises(
        ValueError, match=f"^hidden_states has {LENGTH} positions and rotary_pos_emb angles for "
    ):
        make_layer()(x, rotary_pos_emb=angles)
    with pytest.raises(
        ValueError, match=rf"^rotary_pos_emb has shape \(1, 1, {H // HEADS}\); it must be \(positions, 1, 1"
    ):
        make_layer()(x, rotary_pos_emb=angles[0])


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: make_layer(num_gqa_groups=3), f"num_gqa_groups=3; num_gqa_groups may be 1, 2, {HEADS}$"),
        (
            lambda: nc.MultiheadAttention(60, 6, tp_size=2, set_parallel_mode=True, num_gqa_groups=3),
            "num_gqa_groups may be 2, 6$",
        ),
        (
            lambda: nc.MultiheadAttention(60, 5, tp_size=2, set_parallel_mode=True),
            "change num_attention_heads or tp_size$",
        ),
        (lambda: nc.DotProductAttention(4, 16, num_gqa_groups=3), "num_gqa_groups may be 1, 2, 4$"),
    ],
)
def test_what_num_gqa_groups_may_be_is_told(make: Any, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        make()


def test_wrong_inputs_are_told() -> None:
    layer, x = make_layer(), torch.randn(LENGTH, BATCH, H, device=DEVICE)
    with pytest.raises(ValueError, match="each must have 3 dims: sequence, batch, width "):
        layer(x[0])
    with pytest.raises(ValueError, match="encoder_output is missing with attention_type='cross'"):
        make_attention(attention_type="cross")(x)
    with pytest.raises(ValueError, match="encoder_output is given with attention_type='self'"):
        make_attention()(x, encoder_output=x)
    with pytest.raises(
        ValueError, match=f"^hidden_states has shape .*; its last dim must be hidden_size={H}$"
    ):
        layer(x[..., :5])
    with pytest.raises(
        ValueError, match=f"^encoder_output has shape .*; its last dim must be hidden_size={H}$"
    ):
        make_layer(layer_type="decoder")(x, encoder_output=x[..., :5])


@pytest.mark.parametrize("name", ["self_attn_mask_type", "enc_dec_attn_mask_type"])
def test_a_wrong_mask_is_named_as_the_layer_names_it(name: str) -> None:
    told = f"^{name} is 'casual'; the nearest: 'causal'"
    with pytest.raises(ValueError, match=told):
        nc.TransformerLayer(32, 64, 4, **{name: "casual"})
    layer = nc.TransformerLayer(32, 64, 4, layer_type="decoder")
    x = torch.zeros(2, 1, 32)
    with pytest.raises(ValueError, match=told):
        layer(x, encoder_output=x, **{name: "casual"})
    with pytest.raises(ValueError, match="^enc_dec_window_size is 3; give"):
        layer(x, encoder_output=x, enc_dec_window_size=3)


@pytest.mark.parametrize("layer", [nc.Linear(32, 32), nc.RMSNorm(32), nc.LayerNormMLP(32, 64)], ids=type)
def test_a_wrong_shape_in_a_graph_is_told_in_numbers(layer: torch.nn.Module) -> None:
    """The compiler's symbols, as in (s54, s5), said nothing of the input."""
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="eager")
    with pytest.raises(Exception, match=r"input has shape \(8, 48\)"):
        compiled(torch.zeros(8, 48))
