"""What programs written for Transformer Engine do, in one line each, where it differs from what PyTorch's users do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from quantizers.catalog import E4M3, E5M2, ONE_OF_EACH, assert_same_buffers, delayed

import narrowcast as nc
from narrowcast.compat.names import MODULES
from narrowcast.recipe import DelayedScaling, Float8CurrentScaling, Format, MXFP8BlockScaling

BF16 = torch.bfloat16


def test_largest_values_of_a_format() -> None:
    for name, forward, backward in (("E4M3", 448, 448), ("E5M2", 57344, 57344), ("HYBRID", 448, 57344)):
        value: Any = Format[name].value
        assert (value.max_fwd, value.max_bwd) == (forward, backward) and Format(name).value == name
        assert Format[name] is Format(value)


def test_the_sizes_of_an_implementation_are_taken() -> None:
    nc.LayerNorm(64, sm_margin=0, device="cpu")
    nc.GroupedLinear(2, 64, 32, use_grouped_tensor=True, device="cpu")
    with pytest.raises(NotImplementedError, match=r"RMSNorm\(sm_margin=4\)"):
        nc.RMSNorm(64, sm_margin=4, device="cpu")  # type: ignore[arg-type]


@pytest.mark.parametrize("own", [torch.float32, BF16])
@pytest.mark.parametrize("given", [torch.float32, BF16])
def test_dtypes(own: torch.dtype, given: torch.dtype) -> None:
    """Norms and linear layers under torch.autocast give its dtype; an operation casts to that of its weight."""
    x = torch.randn(4, 64, dtype=given, requires_grad=True)
    modules = [kind(64, device="cpu", dtype=own) for kind in (nc.LayerNorm, nc.RMSNorm, nc.ops.LayerNorm)]
    linear = nc.ops.Linear(64, 32, device="cpu", dtype=own)
    for module in (*modules, linear, nc.Linear(64, 32, device="cpu", dtype=own)):
        with torch.autocast("cpu", dtype=BF16):
            assert module(x).dtype == BF16
    y = linear(x)
    y.sum().backward()
    assert y.dtype == own and x.grad is not None and x.grad.dtype == given


@pytest.mark.parametrize("recipe", [Float8CurrentScaling(), DelayedScaling()], ids=["current", "delayed"])
def test_quantized_edges_of_layernorm_linear(recipe: Any) -> None:
    layer = nc.LayerNormLinear(64, 32, device="cpu", dtype=BF16, recipe=recipe)
    following = nc.Linear(32, 32, device="cpu", dtype=BF16, recipe=recipe)
    x = torch.randn(16, 64, dtype=BF16, requires_grad=True)
    out = layer(x, fp8_output=True, fp8_grad=True)
    assert isinstance(out, nc.Float8Tensor)
    out.sum().backward()
    assert isinstance(x.grad, nc.Float8Tensor) and x.grad._fp8_dtype == E5M2
    compiled: Any = torch.compile(
        lambda x: following(layer(x, fp8_output=True, fp8_grad=True)), fullgraph=True, backend="aot_eager"
    )
    compiled(x.detach().requires_grad_()).sum().backward()
    layer.recipe = None
    with pytest.raises(RuntimeError, match="fp8_grad=True needs a recipe"):
        layer(x, fp8_grad=True)


def test_quantize_gives_a_quantized_tensor() -> None:
    x = torch.randn(2, 16, 64, dtype=BF16, requires_grad=True)
    model = nc.ops.Sequential(nc.ops.GELU(), nc.ops.Quantize(forward=True, backward=True))
    with nc.autocast(recipe=MXFP8BlockScaling()):
        out = model(x)
        values = torch.compile(model, fullgraph=True, backend="aot_eager")(x)
    assert isinstance(out, nc.MXFP8Tensor) and out.shape == x.shape
    assert torch.equal(out.dequantize(), values)
    out.sum().backward()
    assert type(x.grad) is torch.Tensor


def test_lists_of_operations() -> None:
    model = nc.ops.Sequential(nc.ops.GELU(), nc.ops.ReLU())
    assert isinstance(model.insert(idx=0, module=nc.ops.Identity()), nc.ops.Sequential)
    assert isinstance(model.pop(idx=1), nc.ops.GELU) and len(model) == 2
    nc.ops.AllReduce(reduce_in_backward=True)


def test_roles_of_grouped_layers() -> None:
    seen: set[str] = set()

    def factory(role: nc.QuantizerRole) -> nc.Quantizer:
        seen.add(role.module_type)
        return nc.MXFP8Quantizer(E4M3) if role.module_type == "grouped_linear" else nc.IdentityQuantizer()

    x = torch.randn(64, 64, requires_grad=True)
    with nc.autocast(recipe=nc.recipe.CustomRecipe(qfactory=factory)):
        nc.GroupedLinear(2, 64, 32, device="cpu")(x, [32, 32]).sum().backward()
        assert seen == {"grouped_linear"}
        nc.ops.GroupedLinear(2, 64, 32, device="cpu")(x, torch.tensor([32, 32])).sum().backward()
        assert seen == {"grouped_linear"}
        nc.Linear(64, 32, device="cpu")(x)
    assert seen == {"grouped_linear", "linear"}


KEYWORDS = {"nvfp4": {"fp4_dtype": nc.DType.kFloat4E2M1}, "block": {"fp8_dtype": E4M3, "is_2D_scaled": True}}


@pytest.mark.parametrize("name", ["current", "mxfp8", "block", "nvfp4"])
def test_tensors_by_keywords(name: str) -> None:
    made: Any = ONE_OF_EACH[name].quantize(torch.randn(128, 128, dtype=BF16))
    buffers = {argument: getattr(made, attribute) for attribute, argument in made._FLATTEN_TENSOR_BUFFERS}
    described = {"shape": made.shape, "dtype": BF16, **KEYWORDS.get(name, {"fp8_dtype": E4M3}), **buffers}
    for kind in (type(made), type(made)._bare_class()):
        for quantizer in (None, made._get_quantizer()):
            same = kind(quantizer=quantizer, **described)
            assert torch.equal(same.dequantize(), made.dequantize()) and same.dtype == BF16
    assert type(made)(requires_grad=True, **described).requires_grad
    with pytest.raises(NotImplementedError, match="with_gemm_swizzled_scales=True"):
        type(made)(with_gemm_swizzled_scales=True, **described)
    with pytest.raises(TypeError, match="got unknown buffers"):
        type(made)(scales=made, **described)
    if name != "nvfp4":
        with pytest.raises(ValueError, match="dtype is .*E5M2.*quantizer given"):
            type(made)(quantizer=made._quantizer, **{**described, "fp8_dtype": E5M2})
        described.pop("fp8_dtype")
        with pytest.raises(TypeError, match="needs quantizer="):
            type(made)(**described)
        assert made._fp8_dtype == E4M3 and (name != "current" or not made._transpose_invalid)
    else:
        assert made._fp4_dtype == nc.DType.kFloat4E2M1
        assert not (made._row_scaled_nvfp4 or made._nvfp4_use_4over6 or made._with_gemm_swizzled_scales)


@pytest.mark.parametrize("name", ["current", "mxfp8", "block", "nvfp4", "mxfp6"])
def test_parts_stay_quantized(name: str) -> None:
    """On the borders of blocks; they hold the same codes, and refuse to be written to."""
    quantizer = ONE_OF_EACH[name]
    weight: Any = torch.nn.Parameter(quantizer.quantize(torch.randn(256, 256, dtype=BF16)))
    values = weight.detach().dequantize()
    parts = {
        "slice": (weight[128:], values[128:]),
        "chunk": (weight.chunk(2)[1], values.chunk(2)[1]),
        "split": (weight.split([128, 128])[0], values[:128]),
        "columns": (weight.split(128, dim=1)[1], values[:, 128:]),
        "strided": (weight.as_strided((128, 256), (256, 1), 128 * 256), values[128:]),
        "view": (weight.view(2, 128, 256), values.view(2, 128, 256)),
        "cpu": (weight.cpu(), values),
    }
    for how, (part, expected) in parts.items():
        assert type(part) is type(weight), how
        assert torch.equal(part.dequantize(), expected), how
        described = quantizer._describe_buffers(tuple(part.shape), BF16)
        for attribute, (shape, _) in described.items():
            assert getattr(part, attribute).shape == shape, (how, attribute)
        if part.dim() == 2 and how != "cpu":
            columnwise = part.detach()._view_of(part._COLUMNWISE_BUFFERS)
            whole = weight.detach()._view_of(weight._COLUMNWISE_BUFFERS).dequantize()
            cut = whole[:, 128:] if how == "columns" else whole[128:] if how != "split" else whole[:128]
            assert torch.equal(columnwise.dequantize(), cut), how
            with torch.no_grad(), pytest.raises(RuntimeError, match="through a view of a quantized tensor"):
                part.zero_()
            own = part.detach().clone()
            own.zero_()
            assert not own.dequantize().any()
    assert torch.equal(weight.detach().dequantize(), values)
    (grad,) = torch.autograd.grad(weight[128:].dequantize().sum(), weight)
    assert grad.sum() == 128 * 256
    if name != "current":
        assert not isinstance(weight.detach()[3:100], nc.QuantizedTensor)
    copied = torch.nn.Parameter(weight.detach().clone())
    assert_same_buffers(copied.detach(), weight.detach())


@pytest.mark.parametrize("name", ["current", "delayed"])
def test_a_number_is_a_tensor_of_one(name: str) -> None:
    quantizers = {"current": ONE_OF_EACH["current"], "delayed": delayed()}
    x = torch.tensor(1.5, requires_grad=True)
    made: Any = quantizers[name](x)
    assert isinstance(made, nc.Float8Tensor) and made.shape == () and made.dequantize() == 1.5
    made.dequantize().backward()
    assert x.grad == 1
    other = quantizers[name].make_empty((), device="cpu").copy_(torch.tensor(3.0))
    assert other.dequantize() == 3 and (other + 1).shape == ()
    with pytest.raises(ValueError, match="needs at least 2 dims"):
        nc.MXFP8Quantizer(E4M3)(x)


def test_members_of_grouped_tensors() -> None:
    grouped: Any = nc.GroupedTensor.make_grouped_tensor_with_shapes(
        num_tensors=2,
        shapes=[(32, 64), (32, 64)],
        quantizer=nc.MXFP8Quantizer(E4M3),
        device="cpu",
        dtype=BF16,
    )
    assert isinstance(grouped, nc.GroupedTensor)
    assert [tuple(member.size()) for member in grouped.quantized_tensors] == [(32, 64)] * 2


ZOO = list(MODULES["pytorch.custom_recipes.quantizer_factory_zoo"])


@pytest.mark.parametrize("name", ZOO)
def test_mixtures_train(name: str) -> None:
    """Each runs in both kinds of layer, as the recipe it says; a role that is not known is no reason to fail."""
    factory = MODULES["pytorch.custom_recipes.quantizer_factory_zoo"][name]
    recipe = nc.recipe.CustomRecipe(qfactory=factory)
    assert isinstance(factory(None), nc.Quantizer)
    x = torch.randn(64, 64, dtype=BF16, requires_grad=True)
    for layer, extra in (
        (nc.Linear(64, 32, device="cpu", dtype=BF16), ()),
        (nc.GroupedLinear(2, 64, 32, device="cpu", dtype=BF16), ([32, 32],)),
    ):
        with nc.autocast(recipe=recipe):
            out = layer(x, *extra)
        (grad,) = torch.autograd.grad(out.float().square().mean(), x)
        weights = torch.stack(layer._parts_of("weight")).float()
        rows = x.detach().float().view(len(weights), -1, 64)
        expected = torch.bmm(rows, weights.transpose(1, 2)).view(64, 32)
        assert (out.float() - expected).norm() < 0.2 * expected.norm() and grad.isfinite().all()


STATES = {
    "DelayedScalingRecipeState": DelayedScaling(),
    "Float8CurrentScalingRecipeState": Float8CurrentScaling(),
    "MXFP8BlockScalingRecipeState": MXFP8BlockScaling(),
    "Float8BlockScalingRecipeState": nc.recipe.Float8BlockScaling(),
    "NVFP4BlockScalingRecipeState": nc.recipe.NVFP4BlockScaling(),
    "CustomRecipeState": nc.recipe.CustomRecipe(qfactory=nc.custom_recipes.mxfp8_factory),
}


def test_states_of_recipes() -> None:
    for name, recipe in STATES.items():
        kind = getattr(nc.state, name)
        made = nc.state.RecipeState.create(recipe, mode="forward", num_quantizers=3, device="cpu")
        assert type(made) is kind and len(made.make_quantizers()) == 3
        again = kind(recipe, mode="forward", num_quantizers=3, device="cpu")
        assert again.inherit_state_from(made)
        assert (again.scale is not None) == (name == "DelayedScalingRecipeState")
    with pytest.raises(ValueError, match="DelayedScalingRecipeState got an MXFP8BlockScaling"):
        nc.state.DelayedScalingRecipeState(MXFP8BlockScaling(), mode="forward")


def test_scales_are_renewed_when_asked() -> None:
    manager = nc.compat.FP8GlobalStateManager
    layer = nc.Linear(64, 32, device="cpu")
    with nc.autocast(recipe=DelayedScaling(amax_history_len=2)):
        layer(torch.ones(32, 64)).sum().backward()
    for forward in (True, False):  # which renews nothing more
        manager.reduce_and_update_fp8_tensors(forward=forward)
        assert layer.scale.tolist() == [448.0, 0.0, 57344.0, 0.0]


def test_fused_operations_are_of_their_classes() -> None:
    x = torch.randn(32, 64, dtype=BF16, requires_grad=True)
    linear = nc.ops.Linear(64, 64, device="cpu", dtype=BF16)
    model = nc.ops.Sequential(linear, nc.ops.AddExtraInput(in_place=True))
    model(x, x).sum().backward()
    ((op, where),) = model._module_groups[0]._forward_ops
    assert isinstance(op, nc.ops.fused.ForwardLinearBiasAdd) and where == (0, 1, 2)
    model = nc.ops.Sequential(
        linear,
        nc.ops.MakeExtraOutput(in_place=True),
        nc.ops.Linear(64, 32, bias=False, device="cpu", dtype=BF16),
    )
    sum(y.sum() for y in model(x)).backward()
    backward = [type(op) for op, _ in model._module_groups[0]._backward_ops]
    assert backward[0] is nc.ops.fused.BackwardLinearAdd


def test_collectives_of_one_process() -> None:
    names = MODULES["pytorch.distributed"]
    x = torch.randn(4, 2)
    assert names["get_distributed_world_size"]() == 1
    for name in ("gather_along_first_dim", "reduce_scatter_along_first_dim", "allreduce"):
        assert names[name](x, None) == (x, None)
    with pytest.raises(RuntimeError, match="not initialised"):
        names["get_distributed_rank"]()
    with pytest.raises(NotImplementedError, match="quantizer"):
        names["gather_along_first_dim"](x, None, quantizer=nc.MXFP8Quantizer(E4M3))
    weight = torch.nn.Parameter(x)
    names["set_tensor_model_parallel_attributes"](weight, True, 0, 1)
    assert (weight.tensor_model_parallel, weight.partition_dim, weight.partition_stride) == (True, 0, 1)  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="attributes of tensor parallelism already"):
        names["set_tensor_model_parallel_attributes"](weight, True, 0, 1)


def test_element_types_of_recipes() -> None:
    quantization = MODULES["pytorch.quantization"]
    hybrid, mxfp8 = DelayedScaling(), MXFP8BlockScaling()
    of = quantization["get_fp8_te_dtype"]
    assert [of(hybrid), of(hybrid, False), of(mxfp8, False)] == [
        nc.DType.kFloat8E4M3, nc.DType.kFloat8E5M2, nc.DType.kFloat8E4M3,
    ]  # fmt: skip
    assert quantization["get_fp8_torch_dtype"](hybrid, fprop_tensor=False) is torch.float8_e5m2
    assert [quantization["get_fp8_max"](hybrid, forward) for forward in (True, False)] == [448, 57344]
    assert quantization["get_fp4_te_dtype"](nc.recipe.NVFP4BlockScaling()) is nc.DType.kFloat4E2M1
    with pytest.raises(TypeError, match="has no fp4_format; pass a recipe"):
        quantization["get_fp4_te_dtype"](hybrid)
    constants = MODULES["pytorch.constants"]
    for dtype, element in constants["TE_DType"].items():
        assert constants["TE_DType_To_Torch"][element] is dtype
    assert MODULES["pytorch.utils"]["canonicalize_dtype"](None) is torch.get_default_dtype()


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"input_layernorm": True}, {"mha.layernorm_linear_qkv", "mha.proj"}),
        ({}, {"mha.linear_qkv", "mha.proj"}),
        ({"attention_type": "cross"}, {"mha.linear_q", "mha.linear_kv", "mha.proj"}),
        (
            {"attention_type": "cross", "input_layernorm": True},
            {"mha.layernorm_linear_q", "mha.linear_kv", "mha.proj"},
        ),
    ],
)
def test_roles_of_attention_have_transformer_engines_names(
    options: dict[str, Any], expected: set[str]
) -> None:
    seen: set[str] = set()

    def factory(role: nc.QuantizerRole) -> nc.Quantizer:
        seen.add(role.name)
        return nc.custom_recipes.current_scaling_factory(role)

    layer = nc.MultiheadAttention(64, 4, device="cpu", name="mha", **options)
    x = torch.randn(8, 2, 64)
    with nc.autocast(recipe=nc.recipe.CustomRecipe(qfactory=factory)):
        layer(x, encoder_output=x if "attention_type" in options else None)
    assert seen == expected


def test_norms_of_queries_and_keys_are_l2_normalizations() -> None:
    kind = MODULES["pytorch.ops.basic.l2normalization"]["L2Normalization"]
    layer = nc.MultiheadAttention(64, 4, device="cpu", qk_norm_type="L2Normalization")
    assert isinstance(layer.q_norm, kind) and layer.q_norm is layer.k_norm
    assert isinstance(kind(), kind) and not isinstance(nc.ops.RMSNorm(8, device="cpu"), kind)


def test_tensors_with_scales_of_rows_are_not_quantizable() -> None:
    """As there: nobody gathers them quantized; ``quantize`` takes them, and so does ``copy_``."""
    quantizer, x = nc.NVFP4Quantizer(row_scaled_nvfp4=True), torch.randn(16, 32)
    assert not quantizer.is_quantizable(x) and nc.NVFP4Quantizer().is_quantizable(x)
    made = quantizer.quantize(torch.zeros(16, 32))
    assert torch.equal(made.copy_(x).dequantize(), quantizer.quantize(x).dequantize())
