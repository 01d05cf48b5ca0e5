"""``BasicLinear``: the module ``Linear`` without bias, bit for bit, with its options and its errors."""

from __future__ import annotations

import copy
import pickle
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from modules import Operators, assert_same, compare_compiled, make_input, step
from ops_checks import check
from recipes import DEVICE, QUANTIZED, RECIPES, kinds
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

import narrowcast as nc
from narrowcast import ops
from narrowcast.recipe import Float8CurrentScaling, MXFP8BlockScaling, QParams, linear_plan
from narrowcast.testing import assert_close

from .contract import check_split_forward

K, N = 48, 80


def make_op(k: int = K, n: int = N, dtype: torch.dtype = torch.bfloat16, **kwargs: Any) -> ops.BasicLinear:
    torch.manual_seed(1)
    return ops.BasicLinear(k, n, **{"device": DEVICE, "dtype": dtype, **kwargs})


def twin(op: ops.BasicLinear) -> nc.Linear:
    """The module with the same weight."""
    module = nc.Linear(
        op.in_features, op.out_features, bias=False, device=DEVICE, params_dtype=op.weight.dtype
    )
    with torch.no_grad():
        module.weight.copy_(op.weight)
    return module


# -- numerics -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", kinds(RECIPES))
def test_whole_set(name: str) -> None:
    """Compiled, dynamic, without gradients, two backwards, second derivative, recomputed."""
    check(make_op, [(40, K)], RECIPES[name])


@pytest.mark.parametrize("name", ["none", "delayed", "nvfp4"])
def test_compiled_with_static_shapes(name: str) -> None:
    compare_compiled(make_op(), K, RECIPES[name], steps=3)


def test_one_graph_per_recipe() -> None:
    """However many steps, and back to a recipe that was in force before."""
    op, counter = make_op(), CompileCounterWithBackend("aot_eager")
    forward = torch.compile(op, fullgraph=True, backend=counter)
    for graphs, name in (
        (1, "current"),
        (1, "current"),
        (2, "mxfp8"),
        (2, "mxfp8"),
        (2, "current"),
        (3, "none"),
    ):
        step(op, make_input(K), RECIPES[name], forward)
        assert counter.frame_count == graphs, name


@pytest.mark.parametrize("override", ["high_precision", "dequantized"])
@pytest.mark.parametrize("kind", [Float8CurrentScaling, MXFP8BlockScaling])
def test_backward_override(kind: Any, override: str) -> None:
    recipe, op = kind(backward_override=override, emulate=DEVICE == "cuda"), make_op()
    x = make_input(K)
    assert_same(step(op, x, recipe), step(twin(op), x, recipe))
    compare_compiled(op, K, recipe, steps=1)


def test_epsilon_of_the_recipe_counts() -> None:
    params = QParams(amax_epsilon=64.0)
    recipe = Float8CurrentScaling(
        fp8_quant_fwd_inp=params, fp8_quant_fwd_weight=params, fp8_quant_bwd_grad=params
    )
    op, x = make_op(), make_input(K)
    ours = step(op, x, recipe)
    assert_same(ours, step(twin(op), x, recipe))
    without = step(op, x, Float8CurrentScaling())
    assert all(not torch.equal(ours[name], without[name]) for name in ours)


def test_another_recipe_of_the_same_class_counts() -> None:
    op, x = make_op(), make_input(K)
    results = [step(op, x, Float8CurrentScaling(use_power_2_scales=flag)) for flag in (False, True)]
    assert not torch.equal(results[0]["out0"], results[1]["out0"])
    assert_same(results[1], step(twin(op), x, Float8CurrentScaling(use_power_2_scales=True)))


@pytest.mark.parametrize(("name", "bits"), [("delayed", 8), ("current", 8), ("mxfp8", 8), ("nvfp4", 4)])
def test_saves_the_payload_and_nothing_in_high_precision(
    name: str, bits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("narrowcast.recipe.plan.SMALL_WEIGHT", 0)
    op, x = make_op(256, 128), make_input(256, 128)
    saved: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t), nc.autocast(recipe=QUANTIZED[name]):
        op(x)
    payload = x.numel() * bits // 8
    held = [t for t in saved if t.data_ptr() != op.weight.data_ptr()]  # the parameter is there anyway
    assert payload <= sum(t.numel() * t.element_size() for t in held) < 1.2 * payload


# -- what is not computed -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["current", "mxfp8", "block", "nvfp4", "custom"])
def test_frozen_weight_costs_neither_wgrad_nor_columnwise_input(name: str) -> None:
    op, x = make_op(), make_input(K)
    op.weight.requires_grad_(False)
    with Operators() as operators:
        results = step(op, x, RECIPES[name])
    assert operators.seen == {"fprop": 1, "dgrad": 1, "rowwise": 2, "rowwise+columnwise": 1}
    module = twin(op)
    module.weight.requires_grad_(False)
    assert_same(results, step(module, x, RECIPES[name]))


@pytest.mark.parametrize("name", ["current", "mxfp8", "block", "nvfp4", "custom"])
def test_frozen_input_costs_no_dgrad(name: str) -> None:
    op, x = make_op(), make_input(K).detach()
    with Operators() as operators:
        results = step(op, x, RECIPES[name])
    assert operators.seen["dgrad"] == 0 and operators.seen["wgrad"] == operators.seen["fprop"] == 1
    assert_same(results, step(twin(op), x, RECIPES[name]))


# -- options ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "compiled"), [*((name, False) for name in RECIPES), ("none", True), ("nvfp4", True)]
)
def test_main_grad_gets_what_grad_would(name: str, compiled: bool) -> None:
    plain, fused = make_op(), make_op(accumulate_into_main_grad=True)
    fused.weight.main_grad = torch.zeros(N, K, device=DEVICE)
    forward = torch.compile(fused, fullgraph=True, backend="aot_eager") if compiled else fused
    total = torch.zeros(N, K, device=DEVICE)
    for seed in (0, 1):
        expected = step(plain, make_input(K, seed=seed), RECIPES[name])
        total += expected.pop("d weight").float()
        x = make_input(K, seed=seed)
        torch.manual_seed(7)
        with nc.autocast(enabled=name != "none", recipe=RECIPES[name]):
            out = forward(x)
        out.float().square().sum().backward()
        assert_same({"out0": out.detach(), "d input": x.grad}, expected)
    assert fused.weight.grad is None
    assert_close(fused.weight.main_grad, total, "bf16_output")


def test_main_grad_is_overwritten_and_the_placeholder_is_fresh() -> None:
    op = make_op(accumulate_into_main_grad=True)
    op.weight.main_grad = torch.full((N, K), 100.0, device=DEVICE)
    op.weight.overwrite_main_grad, op.weight.grad_added_to_main_grad, op.weight.zero_out_wgrad = (
        True,
        False,
        True,
    )
    step_backward(op, 0)
    once = op.weight.main_grad.clone()
    first = op.weight.grad
    assert once.abs().max() < 100 and op.weight.grad_added_to_main_grad is True
    assert first is not None and not first.any()
    assert first.data_ptr() != op.weight.main_grad.data_ptr()
    op.weight.grad = None
    step_backward(op, 0)
    assert torch.equal(op.weight.main_grad, once) and op.weight.grad is not first


def step_backward(op: ops.BasicLinear, seed: int) -> None:
    with nc.autocast(recipe=RECIPES["current"]):
        out = op(make_input(K, seed=seed))
    out.float().square().sum().backward()


@pytest.mark.parametrize("name", ["none", "current"])
def test_main_grad_must_exist_where_a_gradient_is_wanted(name: str) -> None:
    op = make_op(accumulate_into_main_grad=True, name="proj")
    with pytest.raises(RuntimeError, match=r"'weight' of proj needs a main_grad"):
        step(op, make_input(K), RECIPES[name])
    with torch.no_grad():
        op(make_input(K))


@pytest.mark.parametrize("name", QUANTIZED)
def test_quantized_weight(name: str) -> None:
    recipe = QUANTIZED[name]
    with nc.quantized_model_init(recipe=recipe):
        op = make_op()
        torch.manual_seed(1)
        module = nc.Linear(K, N, bias=False, device=DEVICE, params_dtype=torch.bfloat16)
    assert isinstance(op.weight, nc.QuantizedTensor)
    module.weight = torch.nn.Parameter(op.weight.detach().clone())
    x = make_input(K)
    assert_same(step(op, x, recipe), step(module, x, recipe))
    state = op.state_dict()
    assert torch.equal(state["weight"], op.weight.dequantize()) and type(state["weight"]) is Tensor


def test_quantized_weight_must_fit_the_recipe() -> None:
    with nc.quantized_model_init(recipe=RECIPES["mxfp8"]):
        op = make_op()
    with pytest.raises(RuntimeError, match="MXFP8Tensor, the recipe in force wants Float8TensorStorage"):
        step(op, make_input(K), RECIPES["current"])


@pytest.mark.parametrize("name", ["current", "mxfp8"])
def test_quantized_input(name: str) -> None:
    recipe, op, x = QUANTIZED[name], make_op(), make_input(K)
    quantizer = linear_plan(recipe, "", True, True, module_type="linear").input.quantizer
    results = []
    for layer in (op, twin(op)):
        with nc.autocast(recipe=recipe):
            out = layer(quantizer.quantize(x.detach()))
        (grad,) = torch.autograd.grad(out.float().square().sum(), layer.weight)
        results.append({"out0": out.detach(), "d weight": grad})
    assert_same(results[0], results[1])


@pytest.mark.parametrize("name", ["none", "current", "nvfp4"])
def test_split_forward(name: str) -> None:
    with nc.autocast(enabled=name != "none", recipe=RECIPES[name]):
        check_split_forward(make_op(), make_input(K))


# -- parameters ---------------------------------------------------------------------------------------------


def test_begins_like_torch() -> None:
    ours = make_op(dtype=torch.float32, device="cpu")
    torch.manual_seed(1)
    assert torch.equal(ours.weight, torch.nn.Linear(K, N, bias=False).weight)


def test_rng_state_tracker_is_forked_for_the_weight() -> None:
    class Tracker:
        def fork(self) -> Any:
            return torch.random.fork_rng(devices=[])

    torch.manual_seed(1)
    before = torch.get_rng_state()
    ops.BasicLinear(K, N, device="cpu", rng_state_tracker_function=Tracker)
    assert torch.equal(torch.get_rng_state(), before)


def test_meta_parameters_are_made_at_the_first_forward() -> None:
    op = ops.BasicLinear(K, N, device="meta", dtype=torch.bfloat16)
    assert op.weight.is_meta
    op(make_input(K))
    assert not op.weight.is_meta and op.weight.any()


def test_copies_and_pickles() -> None:
    op, x = make_op(), make_input(K)
    step(op, x, RECIPES["delayed"])
    copies = [copy.deepcopy(op), pickle.loads(pickle.dumps(op))]
    expected = step(op, x, RECIPES["delayed"])
    for other in copies:
        assert_same(step(other, x, RECIPES["delayed"]), expected)


def test_state_of_stateless_recipes_is_the_weight() -> None:
    op = make_op()
    step(op, make_input(K), RECIPES["mxfp8"])
    assert list(op.state_dict()) == ["weight"]


def test_quantizers_and_roles() -> None:
    op = make_op(name="proj")
    assert [op.num_quantizers(mode) for mode in ("forward", "backward")] == [2, 1]
    roles = [*op.get_quantizer_roles("forward"), *op.get_quantizer_roles("backward")]
    assert [(r.module_type, r.tensor_type, r.name) for r in roles] == [
        ("linear", kind, "proj") for kind in ("input", "weight", "grad_output")
    ]
    assert op.get_input_quantizer() is op.get_grad_output_quantizer() is None
    with nc.autocast(recipe=RECIPES["mxfp8"]):
        wanted = op.get_input_quantizer()
        assert wanted is not None and any(wanted.rowwise) and any(wanted.columnwise)
        op.weight.requires_grad_(False)
        wanted = op.get_input_quantizer()
        assert wanted is not None and not any(wanted.columnwise)
        with torch.no_grad():
            assert op.get_grad_output_quantizer() is None


# -- errors -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("x", "error", "message"),
    [
        (torch.zeros(4, K + 1, dtype=torch.bfloat16), ValueError, f"last dim must be in_features={K}"),
        (
            torch.zeros(4, K, dtype=torch.int32),
            TypeError,
            "input is torch.int32, the parameters are torch.bfloat16",
        ),
        (torch.zeros(4, K, device="meta", dtype=torch.bfloat16), RuntimeError, "input is on meta"),
    ],
)
@pytest.mark.parametrize("name", ["none", "current"])
def test_bad_input(x: Tensor, error: type[Exception], message: str, name: str) -> None:
    with pytest.raises(error, match=message), nc.autocast(enabled=name != "none", recipe=RECIPES[name]):
        make_op(device="cpu")(x)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"k": 0}, ValueError, "in_features is 0"),
        ({"tensor_parallel_mode": "diagonal"}, ValueError, "'diagonal'; use None, 'column' or 'row'"),
        ({"sequence_parallel": True}, ValueError, "sequence_parallel=True needs tensor_parallel_mode"),
        (
            {"tensor_parallel_mode": "row", "tensor_parallel_group": 3},
            TypeError,
            "tensor_parallel_group is an int",
        ),
        (
            {"tensor_parallel_mode": "row", "tensor_parallel_group": SimpleNamespace(group_name="")},
            RuntimeError,
            "no registered name",
        ),
        ({"userbuffers_options": {}}, NotImplementedError, "userbuffers_options is not supported"),
    ],
)
def test_bad_options(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make_op(**options)


def test_keyword_arguments_it_does_not_take() -> None:
    with pytest.raises(TypeError, match="is_first_microbatch"):
        make_op()(make_input(K), is_first_microbatch=True)
