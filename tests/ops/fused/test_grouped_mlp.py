"""The grouped MLP in one operation: values of the three operations it stands for, and less that is saved."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import gc
import importlib
from typing import Any

import ops_checks
import pytest
import torch
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from modules import assert_same, step
from ops_checks import make_inputs, unfused
from recipes import DEVICE, RECIPES
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd

import narrowcast as nc
from narrowcast import ops
from narrowcast.layers import grouped_layer
from narrowcast.ops import GroupedLinear
from narrowcast.ops.fused.grouped_mlp import GROUPED_MLP, GroupedMLP
from narrowcast.ops.fused.pattern import NearMiss

K, F, ROWS = 64, 128, 40
MXFP8, NVFP4 = RECIPES["mxfp8"], RECIPES["nvfp4"]
ACTIVATIONS: dict[str, Any] = {
    "swiglu": lambda **options: ops.ScaledSwiGLU(glu_interleave_size=32, **options),
    "clamped": lambda **options: ops.ScaledClampedQGeGLU(glu_interleave_size=32, limit=1.5, **options),
    "situ": lambda **options: ops.ScaledSiTUGLU(glu_interleave_size=32, **options),
    "srelu": ops.ScaledSReLU,
}


class Experts(nn.Module):
    """Three groups: half of the rows, none, a quarter; the last quarter belongs to nobody."""

    def __init__(
        self, activation: str = "swiglu", scale_bias: bool = False, single: bool = True, **options: Any
    ) -> None:
        super().__init__()
        torch.manual_seed(1)
        wide = F if activation == "srelu" else 2 * F
        common = {"device": DEVICE, "dtype": torch.bfloat16}
        common |= {"single_grouped_weight": single, "single_grouped_bias": single}
        self.mlp = ops.Sequential(
            GroupedLinear(3, K, wide, **common),
            ACTIVATIONS[activation](**options),
            GroupedLinear(3, F, K, scale_bias=scale_bias, **common),
        )
        with torch.no_grad():
            for name, parameter in self.mlp.named_parameters():
                if "bias" in name:
                    parameter.normal_()
        self.register_buffer("quarters", torch.tensor([2, 0, 1], device=DEVICE))
        self.scale_bias = scale_bias

    def forward(self, x: Tensor, scales: Tensor) -> Tensor:
        splits = self.quarters * (x.shape[0] // 4)
        return self.mlp(x, splits, scales, splits, *((scales,) if self.scale_bias else ()))


def inputs_of(rows: int = ROWS, seed: int = 0) -> list[Tensor]:
    return make_inputs([(rows, K), (rows,)], seed=seed)


def without_empty(results: dict[str, Tensor]) -> dict[str, Tensor]:
    """What is not the gradient of the empty group, which must be zero."""
    empty = [name for name in results if name.endswith(("weight1", "bias1"))]
    assert len(empty) == 4 and not any(results.pop(name).any() for name in empty)
    return results


def chosen(experts: Experts, recipe: Any) -> list[str]:
    explanation = experts.mlp.explain(recipe)
    return [one.name for one in (*explanation.forward, *explanation.backward)]


KINDS = [*((name, "mxfp8") for name in ACTIVATIONS), ("swiglu", "nvfp4"), ("srelu", "nvfp4")]


@pytest.mark.parametrize(
    ("activation", "recipe", "recompute"),
    # the clamped one refuses to be recomputed
    [(*kind, again) for again in (False, True) for kind in KINDS if not again or kind[0] != "clamped"],
)
def test_equals_the_three_operations(activation: str, recipe: str, recompute: bool) -> None:
    experts = Experts(activation, activation_recompute_in_mlp=recompute)
    assert chosen(experts, RECIPES[recipe]) == ["GroupedMLP", "GroupedMLP"]
    with unfused():
        expected = step(experts, inputs_of(), RECIPES[recipe])
    assert_same(step(experts, inputs_of(), RECIPES[recipe]), expected)


@pytest.mark.parametrize(("recipe", "recompute"), [("mxfp8", True), ("nvfp4", False)])
def test_compiled(recipe: str, recompute: bool) -> None:
    """For two numbers of rows in one graph."""
    eager = Experts(activation_recompute_in_mlp=recompute)
    compiled = copy.deepcopy(eager)
    forward = torch.compile(compiled, fullgraph=True, dynamic=True, backend="aot_eager")
    for rows in (ROWS, ROWS + 8):
        ours = step(compiled, inputs_of(rows), RECIPES[recipe], forward)
        assert_same(ours, step(eager, inputs_of(rows), RECIPES[recipe]))


def test_no_grad_two_backwards_and_checkpoints() -> None:
    experts = Experts(activation_recompute_in_mlp=True)
    shapes = [(ROWS, K), (ROWS,)]
    for check in (
        ops_checks.check_without_gradients,
        ops_checks.check_backwards,
        ops_checks.check_recomputed,
    ):
        check(experts, shapes, MXFP8)


@pytest.mark.parametrize("recipe", ["none", "delayed", "current", "block", "custom"])
def test_other_recipes_run_the_three_operations(recipe: str) -> None:
    """The option to recompute then has no effect."""
    experts = Experts(activation_recompute_in_mlp=True)
    assert "GroupedMLP" not in chosen(experts, RECIPES[recipe])
    ours = step(experts, inputs_of(), RECIPES[recipe])
    with unfused():
        assert_same(ours, step(Experts(), inputs_of(), RECIPES[recipe]))


# -- what is saved ------------------------------------------------------------------------------------------------


def saved_bytes(experts: Experts, recipe: Any) -> int:
    saved: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        step(experts, inputs_of(), recipe)
    return sum(saved.values())


@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4"])
def test_recomputation_saves_less(recipe: str) -> None:
    kept = saved_bytes(Experts(), RECIPES[recipe])
    less = saved_bytes(Experts(activation_recompute_in_mlp=True), RECIPES[recipe])
    codes = ROWS * F * (1 if recipe == "mxfp8" else 0.5)
    assert less <= kept - codes
    with unfused():
        assert saved_bytes(Experts(), RECIPES[recipe]) == kept


def test_the_compiler_leaves_the_recomputation_in_the_backward() -> None:
    counts: dict[str, int] = {}

    def counting(direction: str) -> Any:
        def compile(graph: Any, _: Any) -> Any:
            target = torch.ops.narrowcast.scaled_act.default
            counts[direction] = sum(node.target is target for node in graph.graph.nodes)
            return make_boxed_func(graph.forward)

        return compile

    backend = aot_autograd(
        fw_compiler=counting("forward"),
        bw_compiler=counting("backward"),
        partition_fn=min_cut_rematerialization_partition,  # which merges equal operators first
    )
    for recompute in (False, True):
        experts = Experts(activation_recompute_in_mlp=recompute)
        forward = torch.compile(experts, fullgraph=True, backend=backend)
        step(experts, inputs_of(), MXFP8, forward)
        assert counts == {"forward": 1, "backward": int(recompute)}


# -- not all wants a gradient -------------------------------------------------------------------------------------

FROZEN = {
    "input": lambda experts, inputs: inputs[0].requires_grad_(False),
    "scales": lambda experts, inputs: inputs[1].requires_grad_(False),
    "first layer": lambda experts, inputs: experts.mlp[0].requires_grad_(False),
    "second layer": lambda experts, inputs: experts.mlp[2].requires_grad_(False),
}


@pytest.mark.parametrize(
    ("frozen", "compiled"),
    [
        (["input"], False),
        (["second layer"], True),
        (["input", "first layer"], False),
        (["input", "first layer", "scales"], True),
    ],
)
def test_frozen(frozen: list[str], compiled: bool) -> None:
    results = []
    for fuse in (True, False):
        experts, inputs = Experts(activation_recompute_in_mlp=fuse), inputs_of()
        for name in frozen:
            FROZEN[name](experts, inputs)
        if fuse:
            function = torch.compile(experts, fullgraph=True, backend="aot_eager") if compiled else experts
            results.append(step(experts, inputs, MXFP8, function))
        else:
            with unfused():
                results.append(step(experts, inputs, MXFP8))
    assert_same(*results)


# -- options of the layers ----------------------------------------------------------------------------------------


def test_scaled_bias_and_parameters_per_group() -> None:
    experts = Experts(scale_bias=True, single=False, activation_recompute_in_mlp=True)
    assert chosen(experts, MXFP8) == ["GroupedMLP", "GroupedMLP"]
    with unfused():
        expected = without_empty(step(experts, inputs_of(), MXFP8))
    assert_same(without_empty(step(experts, inputs_of(), MXFP8)), expected)


def test_a_channel_inside_is_left_alone() -> None:
    """What begins in one of the operations and ends in another is not known in time."""
    first, activation, last = layers()
    activation.num_extra_outputs = 1
    activation.set_extra_output_channel(0, "splits")
    last.set_extra_input_channel(0, "splits")
    found = GROUPED_MLP.look([first, activation, last], 0, MXFP8)
    assert isinstance(found, NearMiss) and "splits" in found.reason


def test_buffers_and_waiting_weight_gradients() -> None:
    results = []
    for fused in (True, False):
        torch.manual_seed(1)
        common = {"device": DEVICE, "dtype": torch.bfloat16, "bias": False, "delay_wgrad_compute": True}
        first, last = GroupedLinear(1, K, F, **common), GroupedLinear(1, F, K, **common)
        mlp = ops.Sequential(first, ops.ScaledSReLU(activation_recompute_in_mlp=True), last)
        (x, scales), splits = inputs_of(), torch.tensor([ROWS], device=DEVICE)
        output, grad_input = torch.empty_like(x).detach(), torch.empty_like(x).detach()
        kwargs = {first: {"grad_input": grad_input}, last: {"output": output}}
        with nc.autocast(recipe=MXFP8), contextlib.nullcontext() if fused else unfused():
            y = mlp(x, splits, scales, splits, op_kwargs=kwargs)
        y.float().square().sum().backward()
        assert torch.equal(output, y) and torch.equal(grad_input, x.grad)
        assert first.weight0.grad is None and last.weight0.grad is None
        first.backward_dw()
        last.backward_dw()
        wgrads = [layer.weight0.grad for layer in (first, last)]
        found = [y.detach(), x.grad, scales.grad, *wgrads]
        results.append({str(index): tensor for index, tensor in enumerate(found)})
    assert_same(*results)


# -- when it is not chosen ----------------------------------------------------------------------------------------


def layers(
    groups: tuple[int, int] = (2, 2),
    sizes: tuple[int, int, int, int] = (K, 2 * F, F, K),
    activation: Any = None,
) -> list[Any]:
    common = {"device": DEVICE, "bias": False}
    middle = ops.ScaledSwiGLU(glu_interleave_size=32) if activation is None else activation
    first, last = (
        GroupedLinear(groups[0], *sizes[:2], **common),
        GroupedLinear(groups[1], *sizes[2:], **common),
    )
    return [first, middle, last]


class OwnActivation(ops.ScaledSReLU):
    """A subclass may compute anything."""


@pytest.mark.parametrize(
    ("options", "recipe", "reason"),
    [
        ({}, None, "the recipe is none; MXFP8BlockScaling and NVFP4BlockScaling get it"),
        ({}, RECIPES["block"], "the recipe is Float8BlockScaling; MXFP8"),
        ({}, RECIPES["custom"], "the recipe is CustomRecipe; MXFP8"),
        ({}, dataclasses.replace(NVFP4, disable_rht=True), "disable_rht=True"),
        ({}, dataclasses.replace(MXFP8, backward_override="dequantized"), "backward_override='dequantized'"),
        ({"groups": (2, 3)}, MXFP8, "2 and 3 groups"),
        ({"sizes": (K + 32, 2 * F, F, K)}, MXFP8, "a layer has 96 features, not a multiple of 64"),
        (
            {"sizes": (K, F, F, K)},
            MXFP8,
            "128 output features, the second takes 128: the activation makes half",
        ),
        ({"sizes": (K, 2 * F, F, K), "activation": ops.ScaledSReLU()}, MXFP8, "the activation makes as many"),
        ({"activation": ops.ScaledSwiGLU()}, MXFP8, "glu_interleave_size is None, not 32"),
        ({"activation": OwnActivation(), "sizes": (K, F, F, K)}, MXFP8, None),
    ],
)
def test_conditions(options: dict[str, Any], recipe: Any, reason: str | None) -> None:
    found = GROUPED_MLP.look(layers(**options), 0, recipe)
    if reason is None:
        assert found is None
        return
    assert isinstance(found, NearMiss) and reason in found.reason
    explanation = ops.Sequential(*layers(**options)).explain(recipe)
    assert [(miss.name, miss.number) for miss in explanation.near_misses] == [("GroupedMLP", 0)]
    assert reason in explanation.near_misses[0].reason


def test_only_where_the_pattern_is() -> None:
    first, activation, last = layers()
    for run in ([first, activation], [first, last, activation], [activation, last, first]):
        assert all(GROUPED_MLP.look(run, start, MXFP8) is None for start in range(len(run)))
    between = ops.Sequential(first, activation, last, ops.Identity(), *layers())
    names = [one.name for one in between.explain(MXFP8).forward]
    assert names == ["GroupedMLP", "Identity", "GroupedMLP"]
    assert isinstance(GROUPED_MLP([first, activation, last], recipe=MXFP8)[0], GroupedMLP)


# -- what is alive when ------------------------------------------------------------------------------------------------


def live_bytes() -> int:
    storages = {}
    for one in gc.get_objects():
        if type(one) is Tensor or type(one) is nn.Parameter:
            with contextlib.suppress(RuntimeError):  # what other tests traced has no memory
                storages[one.untyped_storage().data_ptr()] = one.untyped_storage().nbytes()
    return sum(storages.values())


@pytest.mark.covering(1)
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4"])
def test_the_last_gemm_runs_without_the_operands_of_the_others(
    recipe: str, recompute: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At fc1's weight gradient, what fc2 and the activation read is gone: fused as by themselves."""
    rows, found = 256, {}
    for fused in (False, True, False):  # the first makes what is kept for good
        experts = Experts(activation_recompute_in_mlp=recompute)
        x, scales = (one.detach().clone().requires_grad_() for one in inputs_of(rows))
        gc.collect()
        before = live_bytes()
        with nc.autocast(recipe=RECIPES[recipe]), contextlib.nullcontext() if fused else unfused():
            y = experts(x, scales)
        alive: list[int] = []
        weight_gradient = importlib.import_module("narrowcast.autograd.weight_gradient")
        run = weight_gradient.compute_wgrad

        def counted(*args: Any, run: Any = run, alive: list[int] = alive) -> Any:
            alive.append(live_bytes())
            return run(*args)

        with monkeypatch.context() as patched:
            patched.setattr(weight_gradient, "compute_wgrad", counted)
            y.sum().backward()
        assert len(alive) == 2
        found[fused] = alive[1] - before
    codes = rows * F * (1 if recipe == "mxfp8" else 0.5)
    assert found[True] <= found[False] + codes / 4


def test_quantized_groups_are_joined_once_per_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    with nc.quantized_model_init(recipe=MXFP8):
        layer = GroupedLinear(3, K, F, device=DEVICE, dtype=torch.bfloat16)
    calls: list[int] = []
    join = grouped_layer.join_weights

    def counted(*args: Any) -> Any:
        calls.append(1)
        return join(*args)

    monkeypatch.setattr(grouped_layer, "join_weights", counted)
    (x, _), splits = inputs_of(), torch.tensor([20, 0, 20], device=DEVICE)
    with nc.autocast(recipe=MXFP8):
        y = layer(x, splits)
    assert len(calls) == 1
    y.sum().backward()
    assert len(calls) == 1 and x.grad is not None
