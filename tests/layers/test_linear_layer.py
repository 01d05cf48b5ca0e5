"""What all layers with linear layers inside share: delayed weight gradients, and what a node of the graph shows."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from modules import LAYERS, run_layer
from torch import Tensor, nn

import narrowcast as nc
from narrowcast.layers import tensor_parallel
from narrowcast.recipe import DelayedScaling, Float8CurrentScaling

RECIPES: dict[str, Any] = {"none": None, "current": Float8CurrentScaling(), "delayed": DelayedScaling()}


def weights_of(layer: nn.Module) -> list[nn.Parameter]:
    return [p for name, p in layer.named_parameters() if "weight" in name and "norm" not in name]


# -- backward_dw -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, compiled", [*((name, False) for name in LAYERS), ("linear", True), ("grouped", True)]
)
def test_a_weight_that_is_frozen_before_backward_dw(name: str, compiled: bool) -> None:
    """Its gradient is dropped, as autograd drops it, and is not what the next step gets; biases have theirs."""
    layer = LAYERS[name](recipe=RECIPES["current"], delay_wgrad_compute=True)
    twin = copy.deepcopy(layer)
    first, second = torch.randn(8, 32), torch.randn(8, 32)
    forward = torch.compile(layer, fullgraph=True, backend="aot_eager") if compiled else layer
    for module, call in ((layer, forward), (twin, twin)):
        if module is layer:
            run_layer(layer, first, call).square().sum().backward()
            for weight in weights_of(layer):
                weight.requires_grad_(False)
            layer.backward_dw()
            assert all(weight.grad is None for weight in weights_of(layer))
            assert all(p.grad is not None for n, p in layer.named_parameters() if "bias" in n)
            layer.backward_dw()  # nothing is left
            run_layer(layer, first, call).square().sum().backward()
            layer.backward_dw()  # and a backward of a frozen weight leaves nothing
            for weight in weights_of(layer):
                weight.requires_grad_(True)
            layer.zero_grad()
        run_layer(module, second, call).square().sum().backward()
        module.backward_dw()
        for store in module.wgrad_stores.values():
            store.assert_empty()
    for (label, ours), theirs in zip(layer.named_parameters(), twin.parameters()):
        assert torch.equal(ours.grad, theirs.grad), label


# -- what the node of an output shows ----------------------------------------------------------------------------------


@pytest.mark.parametrize("override", [None, "dequantized", "high_precision"])
@pytest.mark.parametrize("name", LAYERS)
def test_the_node_shows_what_the_backward_reads(name: str, override: Any) -> None:
    recipe = Float8CurrentScaling(backward_override=override)
    out = run_layer(LAYERS[name](recipe=recipe), torch.randn(8, 32, requires_grad=True))
    shown: Any = out.grad_fn.backward_objects  # type: ignore[union-attr]
    assert shown.fp8 and shown.backward_override == override
    assert isinstance(shown.grad_output_quantizer, nc.Float8CurrentScalingQuantizer)
    assert shown.reduce_and_update_bwd_fp8_tensors is False


def test_a_grouped_layer_takes_leading_dims() -> None:
    """Its function has the shape of the input, and so of its gradient, with a recipe and without."""
    for recipe in RECIPES.values():
        layer, x = LAYERS["grouped"](recipe=recipe), torch.randn(2, 4, 32, requires_grad=True)
        out = layer(x, [3, 5])
        out.square().sum().backward()
        flat = x.detach().reshape(8, 32).requires_grad_()
        twin = copy.deepcopy(layer)
        twin.reset_delayed_scaling()
        twin(flat, [3, 5]).square().sum().backward()
        assert out.shape == (2, 4, 48) and torch.equal(x.grad.reshape(8, 32), flat.grad)  # type: ignore[union-attr]


# -- graphs that are walked twice, and several at once -----------------------------------------------------------------

LISTS: dict[str, Any] = {
    "recomputing_mlp": lambda: nc.LayerNormMLP(32, 48, device="cpu", checkpoint=True),
    "list": lambda: nc.ops.Sequential(
        nc.ops.Linear(32, 48, device="cpu"),
        nc.ops.Quantize(forward=True, backward=True),
        nc.ops.LayerNorm(48, device="cpu"),
        nc.ops.Linear(48, 32, device="cpu"),
    ),
}


def walked(layer: nn.Module, forward: Any) -> list[Tensor]:
    """Two steps with two forwards each before their backward, which runs again after another step."""
    results: list[Tensor] = []
    for step in range(2):
        torch.manual_seed(step)
        x = (torch.randn(8, 32) * (1 + 3 * step)).requires_grad_()
        both = run_layer(layer, x, forward).square().sum() + run_layer(layer, x * 20, forward).square().sum()
        wanted = [x, *layer.parameters()]
        first = torch.autograd.grad(both, wanted, retain_graph=True)
        run_layer(layer, x.detach() * 50, forward).square().sum().backward()
        run_layer(layer, x.detach(), forward)
        again = torch.autograd.grad(both, wanted)
        assert all(map(torch.equal, first, again))
        results += [*first, *(buffer.clone() for buffer in layer.buffers())]
    return results


@pytest.mark.parametrize(
    "name", [name for name in (*LAYERS, *LISTS) if name not in ("split", "grouped_single")]
)
def test_delayed_scales_are_those_of_the_forward(name: str) -> None:
    torch.manual_seed(0)
    layer = nc.set_recipe({**LAYERS, **LISTS}[name](), DelayedScaling(amax_history_len=3))
    twin = copy.deepcopy(layer)
    nc.set_recipe(twin, DelayedScaling(amax_history_len=3))
    eager = walked(layer, None)
    compiled = walked(twin, torch.compile(twin, fullgraph=True, backend="aot_eager"))
    assert all(map(torch.equal, eager, compiled)) and len(eager) == len(compiled)


def test_what_is_no_function_of_a_tracker_is_refused() -> None:
    with pytest.raises(TypeError, match="get_rng_state_tracker"):
        nc.Linear(16, 16, device="cpu", get_rng_state_tracker="mine")
    with pytest.raises(TypeError, match=r"^get_rng_state_tracker returned 3, of type int, without fork\(\)"):
        nc.Linear(16, 16, device="cpu", get_rng_state_tracker=lambda: 3)


@pytest.mark.parametrize("given", [None, False, True])
def test_a_norm_s_parameters_are_marked_where_sequences_are_parallel_or_not(given: bool | None) -> None:
    norm = nc.nn.LayerNorm(16, device="cpu", sequence_parallel=given)
    for parameter in norm.parameters():
        assert getattr(parameter, "sequence_parallel", None) is given


def test_a_group_of_another_size_is_refused() -> None:
    layer = nc.Linear(16, 16, device="cpu", parallel_mode="column", tp_size=2)
    for group in (None, "nobody's"):
        with pytest.raises((ValueError, RuntimeError, TypeError)):
            layer.set_tensor_parallel_group(group)
    with pytest.raises(ValueError, match="tp_group is None, and .* tp_size=2; give that many"):
        layer.set_tensor_parallel_group(None)
    nc.Linear(16, 16, device="cpu").set_tensor_parallel_group(None)  # which is not split


def test_a_parameter_that_is_replaced_has_no_kept_weight() -> None:
    layer, x = nc.Linear(32, 32, bias=False, device="cpu", recipe=Float8CurrentScaling()), torch.randn(4, 32)
    layer(x, is_first_microbatch=True).sum().backward()
    layer.weight = nn.Parameter(torch.randn(32, 32))
    other = nc.Linear(32, 32, bias=False, device="cpu", recipe=Float8CurrentScaling())
    other.weight = nn.Parameter(layer.weight.detach().clone())
    assert layer._fp8_workspaces["weight"] is None
    assert torch.equal(layer(x, is_first_microbatch=False), other(x))


@pytest.mark.parametrize("training", [True, False])
def test_kept_weights_are_refreshed_in_their_buffers(training: bool) -> None:
    layer, x = nc.Linear(32, 32, bias=False, device="cpu", recipe=DelayedScaling()), torch.randn(4, 32)
    layer(x, is_first_microbatch=True).sum().backward()
    layer.train(training)
    kept = layer._fp8_workspaces["weight"][1]
    before = [buffer.data_ptr() for buffer in kept.rowwise]
    with torch.no_grad():
        layer.weight.mul_(0.5)
    (refreshed,) = layer.refresh_kept_weights()
    codes, scale_inv = refreshed.rowwise
    assert [buffer.data_ptr() for buffer in refreshed.rowwise] == before
    values = codes.view(torch.float8_e4m3fn).float() * scale_inv
    torch.testing.assert_close(values, layer.weight.detach(), rtol=0.0625, atol=1e-4)


@pytest.mark.parametrize("single", [True, False])
def test_the_split_dim_of_a_group_s_weight_is_not_the_groups(single: bool) -> None:
    for mode, dim in (("column", 0), ("row", 1)):
        layer = nc.GroupedLinear(
            2, 16, 16, bias=False, device="cpu", parallel_mode=mode, tp_size=2, single_grouped_weight=single
        )
        assert {weight.partition_dim for weight in layer._parts_of("weight")} == {dim + single}
    for mode, dims in (("column", (0, 0)), ("row", (1, None))):
        split = nc.Linear(16, 16, device="cpu", parallel_mode=mode, tp_size=2)
        assert tuple(getattr(p, "partition_dim", None) for p in (split.weight, split.bias)) == dims
        assert not hasattr(split.weight, "sequence_parallel")
    assert not hasattr(nc.GroupedLinear(2, 16, 16, device="cpu").weight0, "partition_dim")
    assert not hasattr(nc.Linear(16, 16, device="cpu").weight, "partition_dim")


def test_a_reset_drops_kept_weights() -> None:
    layer = nc.Linear(32, 32, device="cpu", recipe=Float8CurrentScaling())
    layer(torch.randn(4, 32), is_first_microbatch=True)
    assert layer._fp8_workspaces["weight"] is not None
    layer.reset_parameters()
    assert layer._fp8_workspaces["weight"] is None


def test_a_layer_that_hands_nothing_over_has_no_quantizer_of_its_output() -> None:
    recipe = nc.recipe.CustomRecipe(qfactory=lambda role: nc.MXFP8Quantizer(nc.DType.kFloat8E4M3))
    layer = nc.Linear(32, 32, device="cpu", recipe=recipe)
    given = recipe, layer._stages[0], True, layer.weight
    plain, handing = layer._plan(*given), layer._plan(*given, hands_over=True)
    assert isinstance(handing.output.quantizer, nc.MXFP8Quantizer)
    assert not isinstance(plain.output.quantizer, nc.MXFP8Quantizer)


def test_delayed_gradients_mark_main_grads_and_their_ticket_moves_with_the_layer() -> None:
    layer = nc.Linear(
        16, 16, bias=False, device="cpu", fuse_wgrad_accumulation=True, delay_wgrad_compute=True
    )
    layer.weight.main_grad, layer.weight.grad_added_to_main_grad = torch.zeros(16, 16), False
    layer(torch.ones(4, 16)).sum().backward()
    assert not layer.weight.main_grad.any()
    layer.weight.grad_added_to_main_grad = False
    layer.backward_dw()
    assert layer.weight.grad_added_to_main_grad and (layer.weight.main_grad == 4).all()
    (store,) = layer.to("meta").wgrad_stores.values()
    assert store.ticket.is_meta


def test_later_microbatches_read_the_kept_weight() -> None:
    layer, x = nc.Linear(32, 32, bias=False, device="cpu", recipe=Float8CurrentScaling()), torch.randn(4, 32)
    assert layer(x, is_first_microbatch=True).any()
    layer._fp8_workspaces["weight"][1].rowwise[0].zero_()
    assert not layer(x, is_first_microbatch=False).any()
    assert layer(x, is_first_microbatch=True).any()


def test_a_layer_that_is_split_needs_its_group_and_another_none() -> None:
    x = torch.randn(4, 16)
    assert nc.Linear(16, 16, device="cpu")(x).shape == (4, 16)
    split = nc.Linear(16, 16, device="cpu", parallel_mode="column", tp_size=2)
    with pytest.raises(RuntimeError, match="tp_size=2 and no tp_group; call set_tensor_parallel_group"):
        split(x)


@pytest.mark.parametrize("given, size", [(1, 4), (4, 4), (2, None), (3, None)])
def test_the_size_is_the_group_s(given: int, size: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_parallel, "group_size", lambda group: 4)
    monkeypatch.setattr(tensor_parallel, "group_name", lambda group, label: group)
    if size is None:
        with pytest.raises(ValueError, match=f"tp_size={given}|tp_size is {given}"):
            tensor_parallel.checked_size("a group", given)
    else:
        assert tensor_parallel.checked_size("a group", given) == size
    assert tensor_parallel.checked_size(None, given) == given


def test_a_reset_drops_the_state_of_a_recipe_that_is_not_known() -> None:
    trained = nc.Linear(16, 16, device="cpu", recipe=DelayedScaling())
    trained(torch.randn(4, 16)).sum().backward()
    layer = nc.Linear(16, 16, device="cpu")
    layer.load_state_dict(trained.state_dict())
    assert layer.scale is not None and layer.amax_history is not None
    layer.reset_delayed_scaling()
    assert layer.scale is layer.amax_history is layer.amax is None
    assert sorted(layer.state_dict()) == ["bias", "weight"]


@pytest.mark.parametrize("name", ["experts", None])
def test_a_factory_sees_the_name_of_the_layer(name: str | None) -> None:
    seen = set()

    def factory(role: nc.QuantizerRole) -> nc.Quantizer:
        seen.add(role.name)
        return nc.MXFP8Quantizer(nc.DType.kFloat8E4M3)

    recipe = nc.recipe.CustomRecipe(qfactory=factory)
    nc.GroupedLinear(2, 32, 32, name=name, device="cpu", recipe=recipe)(torch.randn(4, 32), [2, 2])
    assert seen == {name or ""}


@pytest.mark.parametrize("recipe", ["none", "current"])
@pytest.mark.parametrize("kind", ["linear", "grouped"])
def test_under_autocast_inputs_are_cast(kind: str, recipe: str) -> None:
    x = torch.randn(4, 32)
    layer: Any = (
        nc.Linear(32, 32, device="cpu") if kind == "linear" else nc.GroupedLinear(2, 32, 32, device="cpu")
    )
    more, layer.recipe = () if kind == "linear" else ([2, 2],), RECIPES[recipe]
    with torch.autocast("cpu", torch.bfloat16):
        out = layer(x, *more)
        assert out.dtype == torch.bfloat16 and torch.equal(out, layer(x.bfloat16(), *more))


def test_a_layer_keeps_its_tracker() -> None:
    tracker = nc.CudaRNGStatesTracker("cpu")
    tracker.add("mine", 3)

    def own() -> nc.CudaRNGStatesTracker:
        return tracker

    layer = nc.Linear(16, 16, device="cpu", get_rng_state_tracker=own, rng_tracker_name="mine")
    assert layer.get_rng_state_tracker is own and layer.rng_tracker_name == "mine"
    first = layer.weight.detach().clone()
    layer.reset_parameters()
    assert not torch.equal(layer.weight, first)  # the state goes on
    tracker.reset()
    tracker.add("mine", 3)
    layer.reset_parameters()
    assert torch.equal(layer.weight, first)


@pytest.mark.parametrize("zeros", [None, False, True])
def test_what_stands_for_a_gradient_that_was_accumulated(zeros: bool | None) -> None:
    layer = nc.Linear(16, 16, bias=False, device="cpu", fuse_wgrad_accumulation=True)
    layer.weight.main_grad, layer.weight.grad_added_to_main_grad = torch.zeros(16, 16), False
    if zeros is not None:
        layer.weight.zero_out_wgrad = zeros
    out = layer(torch.ones(4, 16))
    assert out.grad_fn.backward_objects.wgrad.dummy == ("zeros" if zeros else "empty")
    out.sum().backward()
    assert torch.equal(layer.weight.main_grad, torch.full((16, 16), 4.0))
    assert not zeros or not layer.weight.grad.any()


@pytest.mark.parametrize("recipe", [None, nc.recipe.DelayedScaling()], ids=["plain", "delayed"])
@pytest.mark.parametrize("value", ["no", torch.tensor(True), 1.5], ids=str)
def test_first_microbatch_is_a_bool(value: Any, recipe: Any) -> None:
    """A text such as "no" would count as the first."""
    x = torch.randn(32, 32)
    layers = [
        nc.Linear(32, 32),
        nc.LayerNormLinear(32, 32),
        nc.LayerNormMLP(32, 64),
        nc.GroupedLinear(2, 32, 32),
    ]
    for layer in layers:
        if recipe is not None:
            nc.set_recipe(layer, recipe)
        splits = ([16, 16],) if isinstance(layer, nc.GroupedLinear) else ()
        with pytest.raises(TypeError, match="^is_first_microbatch is .*; use True or False"):
            layer(x, *splits, is_first_microbatch=value)
        for flag in ("fp8_output", "fp8_grad") if isinstance(layer, (nc.Linear, nc.LayerNormLinear)) else ():
            with pytest.raises(TypeError, match=f"^{flag} is .*; use True or False"):
                layer(x, **{flag: x})


def test_a_size_that_is_true_and_a_dtype_of_eight_bits() -> None:
    with pytest.raises(ValueError, match="^in_features is True; use a positive whole number"):
        nc.Linear(True, 32)
    with pytest.raises(
        TypeError, match="^params_dtype is torch.float8_e4m3fn; use torch.bfloat16.* or torch.float64, "
    ):
        nc.Linear(32, 32, params_dtype=torch.float8_e4m3fn)


@pytest.mark.parametrize(
    "make",
    [
        lambda: nc.Linear(32, 32, device="cpu", recipe="current"),
        lambda: nc.LayerNormMLP(32, 32, device="cpu"),
        lambda: nc.RMSNorm(32, device="cpu"),
        lambda: nc.ops.Linear(32, 32, device="cpu"),
    ],
)
def test_parameters_of_eight_bits_are_refused_with_a_remedy_that_helps(make: Any) -> None:
    layer, x = make(), torch.randn(16, 32, dtype=torch.bfloat16)
    saved = {name: value.clone() for name, value in layer.state_dict().items() if value is not None}
    layer.to(torch.float8_e4m3fn)
    told = r"are torch.float8_e4m3fn in .*: call .to\(torch.bfloat16\), load their values again, and choose FP8 with"
    with pytest.raises(TypeError, match=told):
        layer(x)
    layer.to(torch.bfloat16).load_state_dict(saved)
    assert layer(x).isfinite().all()


def test_a_mask_is_cast_to_the_dtype_of_the_parameters() -> None:
    layer, x = nc.Linear(32, 32, device="cpu", dtype=torch.bfloat16), torch.ones(16, 32, dtype=torch.bool)
    with pytest.raises(
        TypeError, match=r"^input is torch.bool, .*: cast it with x.to\(torch.bfloat16\), which makes True"
    ):
        layer(x)
    assert layer(x.to(torch.bfloat16)).shape == (16, 32)


# -- parameters that do not fit ----------------------------------------------------------------------------------------


def _narrower(name: str, columns: int) -> Any:
    """Replace a weight by one of fewer columns, which zero-padding would hide."""

    def change(layer: nn.Module) -> None:
        old = getattr(layer, name)
        setattr(layer, name, nn.Parameter(torch.ones(*old.shape[:-1], columns)))

    return change


@pytest.mark.parametrize("recipe", ["current", "delayed", "mxfp8", "block", "nvfp4", "rowwise"])
@pytest.mark.parametrize(
    "make, change, message",
    [
        (lambda r: nc.Linear(64, 48, recipe=r), _narrower("weight", 63), r"\(4, 64\).*in_features=63"),
        (lambda r: nc.LayerNormLinear(64, 48, recipe=r), _narrower("weight", 48), "in_features=48"),
        (lambda r: nc.LayerNormMLP(64, 80, recipe=r), _narrower("fc1_weight", 48), "hidden_size=48"),
        (
            lambda r: nc.LayerNormMLP(64, 80, recipe=r),
            _narrower("fc2_weight", 64),
            r"fc2 is \(64, 64\).* be 80",
        ),
        (
            lambda r: nc.LayerNormMLP(64, 80, activation="swiglu", recipe=r),
            _narrower("fc2_weight", 160),
            r"be 80, the width of swiglu",
        ),
        (
            lambda r: nc.GroupedLinear(2, 64, 48, recipe=r),
            _narrower("weight1", 48),
            r"weight1 has shape \(48, 48\)",
        ),
        (
            lambda r: nc.Linear(64, 48, recipe=r),
            lambda layer: setattr(layer, "bias", nn.Parameter(torch.ones(32))),
            r"bias has shape \(32,\); it needs 48",
        ),
    ],
    ids=["linear", "norm_linear", "fc1", "fc2", "gated_fc2", "grouped", "bias"],
)
def test_parameters_of_another_size_are_refused(make: Any, change: Any, message: str, recipe: str) -> None:
    layer = make(recipe)
    change(layer)
    more = ([2, 2],) if isinstance(layer, nc.GroupedLinear) else ()
    with pytest.raises(ValueError, match=message):
        layer(torch.ones(4, 64), *more)


def test_a_fused_call_refuses_layers_that_do_not_fit() -> None:
    recipe = RECIPES["current"]
    norm, fc1, fc2 = nc.RMSNorm(64), nc.Linear(64, 160, recipe=recipe), nc.Linear(64, 64, recipe=recipe)
    x = torch.ones(4, 64)
    with pytest.raises(ValueError, match=r"fc2 is \(64, 64\); its last dim must be 80"):
        nc.nn.norm_mlp(norm, fc1, fc2, x, residual=x)


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: nc.convert(nn.ModuleDict({"up": nn.Linear(32, 32)}), "current")["up"], "weight of 'up'"),
        (lambda: nc.Linear(32, 32, device="cpu", recipe="delayed"), "weight of Linear"),
        (lambda: nc.LayerNormMLP(32, 32, device="cpu", recipe="mxfp8"), "fc1_weight of LayerNormMLP"),
        (lambda: nc.ops.Linear(32, 32, device="cpu"), "weight of BasicLinear"),
    ],
)
def test_a_layer_of_float64_is_named_when_it_would_quantize(make: Any, name: str) -> None:
    layer, x = make().double(), torch.randn(4, 32, dtype=torch.float64)
    told = f"^{name} is torch.float64, which no recipe quantizes; call .float\\(\\) or .bfloat16\\(\\) on the model"
    with nc.autocast(recipe="current"), pytest.raises(TypeError, match=told):
        layer(x)
    with nc.autocast(enabled=False), torch.no_grad():
        if not isinstance(layer, nc.LayerNormMLP):  # norms have no float64
            assert layer(x).dtype == torch.float64


@pytest.mark.parametrize(
    "dtype", [torch.int64, torch.bool, torch.float64, torch.complex64, torch.float8_e4m3fn]
)
@pytest.mark.parametrize(
    "make",
    [lambda r: nc.Linear(64, 48, recipe=r), lambda r: nc.LayerNormMLP(64, 80, recipe=r)],
    ids=["linear", "mlp"],
)
def test_torch_autocast_casts_what_pytorch_casts(make: Any, dtype: torch.dtype) -> None:
    """Token ids in place of their embeddings trained in silence."""
    layer, x = make("current"), torch.ones(4, 64).to(dtype)
    remedy = "a layer multiplies real numbers: pass x.real" if dtype.is_complex else "cast"
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(TypeError, match=f"input is {dtype}.*{remedy}"):
        layer(x)
    with torch.autocast("cpu", torch.bfloat16):
        out = layer(torch.ones(4, 64))
    assert (out[0] if isinstance(out, tuple) else out).dtype == torch.bfloat16
