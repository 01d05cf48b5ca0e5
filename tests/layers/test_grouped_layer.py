"""The parts that grouped layers are made of: plans by rows, operands, buffers for results, parameters."""

from __future__ import annotations

import pytest
import torch
from quantizers.catalog import assert_same_buffers
from recipes import QUANTIZED
from reference.checks import assert_bitwise, normal
from torch import Tensor

import narrowcast as nc
from narrowcast.autograd.groups import quantize_weights
from narrowcast.layers.grouped_layer import FEW_ROWS, joined_buffers_of, plan_for_rows, rows_of_buffer
from narrowcast.recipe import linear_plan

BF16 = torch.bfloat16
CPU = torch.device("cpu")
CURRENT = nc.recipe.Float8CurrentScaling()


def test_the_weights_of_few_rows_are_quantized_once():
    plan = linear_plan(nc.recipe.MXFP8BlockScaling(), "", True, True, module_type="grouped_linear")
    once = plan.weight_once
    assert once is not None and once is not plan
    for groups in (1, 3):
        assert plan_for_rows(plan, FEW_ROWS * groups, groups) is once
        assert plan_for_rows(plan, FEW_ROWS * groups + 1, groups) is plan
    assert plan_for_rows(once, 1, 1) is once
    plain = linear_plan(None, "", True, True, module_type="grouped_linear")
    assert plan_for_rows(plain, 1, 1) is plain


def buffer(rows: int = 6, **options: object) -> Tensor:
    return torch.empty(2, rows // 2, 8, dtype=BF16, **options)  # type: ignore[call-overload]


def given(tensor: Tensor | None, read: Tensor | None = None) -> Tensor | None:
    return rows_of_buffer(tensor, "out", (2, 3, 8), BF16, CPU, read)


def test_a_buffer_for_results_is_a_matrix_of_its_rows():
    assert given(None) is None
    tensor = buffer()
    matrix = given(tensor)
    assert matrix is not None and matrix.shape == (6, 8) and matrix.data_ptr() == tensor.data_ptr()


@pytest.mark.parametrize(
    "tensor, message",
    [
        (
            buffer(4),
            r"out is torch.bfloat16 \(2, 2, 8\) on cpu; the result is torch.bfloat16 \(2, 3, 8\) on cpu",
        ),
        (buffer().float(), r"out is torch.float32 \(2, 3, 8\)"),
        (buffer(device="meta"), r"on meta; the result is .* on cpu"),
        (buffer().transpose(0, 1).contiguous().transpose(0, 1), r"out has strides \(8, 16, 1\)"),
        (buffer().requires_grad_(), r"out requires a gradient; .*out.detach\(\)"),
        (nc.Float8CurrentScalingQuantizer(nc.DType.kFloat8E4M3).quantize(buffer()), "out is a Float8Tensor"),
    ],
)
def test_buffers_that_are_refused(tensor, message):
    with pytest.raises(ValueError, match=message):
        given(tensor)


def test_a_buffer_may_touch_what_is_read_but_not_overlap_it():
    memory = torch.empty(3 * 48, dtype=BF16)
    out = memory[48:96].view(2, 3, 8)
    for start, overlaps in ((0, False), (1, True), (48, True), (95, True), (96, False)):
        read = memory[start : start + 48]
        if overlaps:
            with pytest.raises(ValueError, match="out shares memory with inp"):
                given(out, read)
        else:
            assert given(out, read) is not None
    every_other = memory[:96:2]  # ends within
    with pytest.raises(ValueError, match="shares memory"):
        given(out, every_other)
    assert given(out, memory[:49:2][:24]) is not None
    assert given(out, memory[60:60]) is not None
    assert given(out, out.view(torch.float32)[:0]) is not None


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("name", ["current", "mxfp8", "block"])
def test_weights_quantized_one_by_one_are_the_operand_of_all(name, count):
    operand = linear_plan(QUANTIZED[name], "", True, True, module_type="linear").kept_weight
    quantizer = operand.quantizer.replace(internal=False).with_usage(rowwise=True, columnwise=True)
    values = [normal((64, 32), BF16, seed) for seed in range(count)]
    weights = [quantizer.quantize(x) for x in values]
    joined, expected = joined_buffers_of(weights), quantize_weights(values, operand, None, None)
    assert joined.quantizer is not None and len(joined.rowwise) == len(expected.rowwise)
    for ours, theirs in zip(joined.rowwise, expected.rowwise):
        assert_bitwise(ours, theirs)
    columnwise = [weight.columnwise_operand() for weight in weights]
    if count == 1:
        for ours, theirs in zip(joined.columnwise, expected.columnwise, strict=True):
            assert_bitwise(ours, theirs)
    else:  # those of the weights, first ones first
        own = [part for parts in zip(*columnwise) for part in parts]
        assert [part.data_ptr() for part in joined.columnwise] == [part.data_ptr() for part in own]
    only = [weight.update_usage(columnwise_usage=False) or weight for weight in weights]
    assert joined_buffers_of(only).columnwise == [] and joined_buffers_of(only).rowwise


@pytest.mark.parametrize("single", [True, False])
def test_parameters_of_all_groups_are_one_allocation(single):
    layer = nc.GroupedLinear(3, 16, 32, single_grouped_weight=single, single_grouped_bias=single)
    for kind, size in (("weight", 512), ("bias", 32)):
        parts = layer._parts_of(kind)
        assert len(parts) == (1 if single else 3)
        assert [name for name, _ in layer.named_parameters() if name.startswith(kind)] == (
            [kind] if single else [f"{kind}{group}" for group in range(3)]
        )
        assert (getattr(layer, f"{kind}0") is None) is single
        steps = [part.data_ptr() - parts[0].data_ptr() for part in parts]
        assert steps == [4 * size * group for group in range(len(parts))]
    layer.to_empty(device="cpu")
    layer.reset_parameters()
    weights = layer._parts_of("weight")
    assert len({weight.untyped_storage().data_ptr() for weight in weights}) == 1
    assert all(weight.any() for weight in weights) and not any(bias.any() for bias in layer._parts_of("bias"))


@pytest.mark.parametrize("init_method", [None, torch.nn.init.normal_])
def test_both_forms_draw_the_same_weights(init_method):
    drawn = []
    for single in (True, False):
        torch.manual_seed(
            5
        )  # of an odd number of elements, the values of three matrices are not those of one
        layer = nc.GroupedLinear(3, 5, 7, single_grouped_weight=single, init_method=init_method)
        drawn.append(torch.stack(list(layer._parts_of("weight"))).view(3, 7, 5))
    assert torch.equal(*drawn)


def test_groups_in_separate_buffers_keep_both_directions():
    layer = nc.GroupedLinear(2, 32, 32)
    for name, common in ((nc.MXFP8Tensor._BARE_NAME, True), (nc.HybridQuantizedTensor._BARE_NAME, False)):
        assert layer._takes_rows(name) is common and layer._makes_columns(layer.weight0) is common


@pytest.mark.parametrize("single", [True, False])
def test_a_weight_that_became_plain_is_quantized_again(single):
    with nc.quantized_model_init(recipe=CURRENT):
        layer = nc.GroupedLinear(2, 16, 32, single_grouped_weight=single, params_dtype=BF16)
    before = [copied.detach().clone() for copied in layer._parts_of("weight")]
    layer.make_grouped_weights()  # nothing to do
    for name in layer._names_of("weight"):
        value = getattr(layer, name).detach().dequantize()
        layer.register_parameter(name, torch.nn.Parameter(value))
    layer.make_grouped_weights(defer_init=True)
    assert all(type(weight.detach()) is Tensor for weight in layer._parts_of("weight"))
    layer.make_grouped_weights()
    for weight, old in zip(layer._parts_of("weight"), before):
        assert type(weight.detach()) is type(old)
        assert_bitwise(weight.detach().dequantize(), old.dequantize())
        if not single:
            assert_same_buffers(weight.detach(), old)


def test_overwriting_is_for_all_main_grads_or_none():
    layer = nc.GroupedLinear(3, 16, 32, params_dtype=BF16, fuse_wgrad_accumulation=True)
    weights = layer._parts_of("weight")
    weights[1].requires_grad_(False)
    for weight in weights:
        weight.main_grad = torch.zeros(32, 16)
    wgrad = layer._wgrad("weight", None)
    assert wgrad.main_grad == [weights[0].main_grad, None, weights[2].main_grad] and not wgrad.overwrite
    begins = layer._wgrad("weight", True).begins
    assert [one is weight for one, weight in zip(begins, (weights[0], weights[2]), strict=True)] == [True] * 2
    weights[0].overwrite_main_grad = True
    with pytest.raises(RuntimeError, match="overwrite_main_grad is set on some weights"):
        layer._wgrad("weight", None)
    weights[2].overwrite_main_grad = True
    assert layer._wgrad("weight", None).overwrite is True
    weights[0].main_grad = torch.zeros(32, 16, dtype=torch.float16)
    with pytest.raises(ValueError, match=r"main_grad of parameter 'weight0' is torch.float16 \(32, 16\)"):
        layer._wgrad("weight", None)
    weights[0].main_grad = torch.zeros(16, 32)
    with pytest.raises(ValueError, match=r"is torch.float32 \(16, 32\); assign .* \(32, 16\)"):
        layer._wgrad("weight", None)


@pytest.mark.parametrize("single", [True, False])
def test_either_form_loads_the_other(single):
    layers = [
        nc.GroupedLinear(3, 16, 32, single_grouped_weight=one, single_grouped_bias=one, device="cpu")
        for one in (single, not single)
    ]
    with torch.no_grad():
        for parameter in layers[0].parameters():
            parameter.normal_()
    layers[1].load_state_dict(layers[0].state_dict())
    for kind, shape in (("weight", (3, 32, 16)), ("bias", (3, 32))):
        ours, theirs = (torch.stack(list(layer._parts_of(kind))).view(shape) for layer in layers)
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("recipe", ["current", "block"])
def test_stored_groups_made_without_gradients_get_columns(recipe: str) -> None:
    """Of one parameter as of one per group: from the row-wise codes, in the backward."""
    found = []
    for single in (False, True):
        torch.manual_seed(0)
        with torch.no_grad(), nc.quantized_model_init(recipe=QUANTIZED[recipe]):
            layer = nc.GroupedLinear(
                3, 128, 256, bias=False, single_grouped_weight=single, params_dtype=BF16, device="cpu"
            )
        nc.set_recipe(torch.nn.ModuleList([layer]), {"": QUANTIZED[recipe]})
        x = normal((33, 128), BF16).requires_grad_()
        y = layer(x, [16, 0, 17])
        found.append((y.detach(), *torch.autograd.grad(y.float().square().sum(), x)))
    for separate, joined in zip(*found, strict=True):
        assert_bitwise(separate, joined)
