"""Linear in eager: numerics, odd shapes, dtypes, errors, state dicts, caches."""

from __future__ import annotations

import copy
import gc
import re
import weakref
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from recipes import DEVICE, QUANTIZED, RECIPES
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import narrowcast as nc
from narrowcast.testing import assert_close


def layer(k: int = 48, n: int = 80, seed: int = 1, **kwargs: Any) -> nc.Linear:
    torch.manual_seed(seed)
    kwargs.setdefault("device", "cpu")
    return nc.Linear(k, n, **kwargs)


def run(module: nc.Linear, x: Tensor, recipe: nc.recipe.Recipe | None, **kwargs: Any) -> list[Tensor]:
    """Output, input gradient and parameter gradients of one step."""
    torch.manual_seed(7)
    x = x.detach().requires_grad_(True)
    with nc.autocast(enabled=recipe is not None, recipe=recipe):
        y = module(x, **kwargs)
    grads = torch.autograd.grad(y.square().sum(), (x, *module.parameters()))
    return [y.detach(), *grads]


def high_precision(module: nc.Linear, x: Tensor) -> list[Tensor]:
    x = x.detach().requires_grad_(True)
    y = F.linear(x, module.weight, module.bias)
    return [y.detach(), *torch.autograd.grad(y.square().sum(), (x, *module.parameters()))]


@pytest.mark.parametrize("name", RECIPES)
def test_approximates_the_layer_in_high_precision(name: str) -> None:
    module, x = layer(128, 96), torch.randn(64, 128)
    if name == "delayed":  # the first step runs on scale 1; the second on real scales
        run(module, x, RECIPES[name])
    entry = {"none": "fp32_sum_order", "nvfp4": "fp4_layer"}.get(name, "fp8_layer")
    for ours, exact in zip(run(module, x, RECIPES[name]), high_precision(module, x), strict=True):
        assert_close(ours, exact, entry)


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("tokens", [(1,), (7,), (0,), (1000,), (3, 5), (2, 0, 4)], ids=str)
@pytest.mark.parametrize(("k", "n"), [(48, 80), (5, 3), (130, 1), (1, 17)])
def test_any_shape_equals_the_zero_padded_layer(name: str, tokens: tuple[int, ...], k: int, n: int) -> None:
    """Nothing raises, and padding by hand to multiples of 128 changes nothing."""
    recipe = RECIPES[name]
    if isinstance(recipe, nc.recipe.NVFP4BlockScaling):  # random bits depend on the padded size
        recipe = nc.recipe.NVFP4BlockScaling(disable_stochastic_rounding=True)
    module, x = layer(k, n), torch.randn(*tokens, k)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        ours = run(module, x, recipe)

    rows, columns, outputs = x.numel() // k, k + -k % 128, n + -n % 128
    padded = nc.Linear(columns, outputs, device="cpu")
    with torch.no_grad():
        padded.weight.copy_(F.pad(module.weight, (0, columns - k, 0, outputs - n)))
        padded.bias.copy_(F.pad(module.bias, (0, outputs - n)))
    wide = F.pad(x.reshape(rows, k), (0, columns - k, 0, -rows % 128))
    wide = wide.detach().requires_grad_(True)
    with torch.autocast("cpu", dtype=torch.bfloat16), nc.autocast(enabled=recipe is not None, recipe=recipe):
        y = padded(wide)
    cut = y[:rows, :n]
    dx, dw, db = torch.autograd.grad(cut.square().sum(), (wide, padded.weight, padded.bias))
    expected = [cut.reshape(*tokens, n), dx[:rows, :k].reshape(*tokens, k), dw[:n, :k], db[:n]]
    for actual, reference in zip(ours, expected, strict=True):
        assert actual.shape == reference.shape
        assert torch.isfinite(actual).all()
        assert_close(actual, reference.detach(), "bf16_output")


def test_without_a_recipe_it_is_differentiated_twice() -> None:
    """As torch's; under one it says why not."""
    module, x = layer(), torch.randn(16, 48, requires_grad=True)
    (dx,) = torch.autograd.grad(module(x).square().sum(), x, create_graph=True)
    (ddx,) = torch.autograd.grad(dx.square().sum(), x)
    twin = torch.nn.Linear(48, module.out_features)
    twin.load_state_dict(module.state_dict())
    (dx,) = torch.autograd.grad(twin(x).square().sum(), x, create_graph=True)
    torch.testing.assert_close(ddx, torch.autograd.grad(dx.square().sum(), x)[0])
    with nc.autocast(recipe=QUANTIZED["current"]):
        y = module(x)
    (dx,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="a second derivative"):
        dx.square().sum().backward()


def test_a_selective_checkpoint_refuses_an_operation_in_place_behind_the_layer() -> None:
    """As behind ``nn.Linear``: a second attempt inside of the forward would hide the refusal."""

    def keep_products(_: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if "mm" in str(op) else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = partial(create_selective_checkpoint_contexts, keep_products)
    x = torch.randn(16, 48, requires_grad=True)
    for module in (torch.nn.Linear(48, 80), layer()):
        y = checkpoint(lambda x, m=module: m(x).relu_() * 2, x, use_reentrant=False, context_fn=contexts)
        with pytest.raises(RuntimeError, match="has been mutated"):
            y.sum().backward()


def test_backward_twice_without_retain_graph_is_pytorchs_error() -> None:
    module, x = layer(), torch.randn(16, 48)
    with nc.autocast(recipe=QUANTIZED["current"]):
        y = module(x)
    y.sum().backward()
    with pytest.raises(RuntimeError, match="second time"):
        y.sum().backward()


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("name", QUANTIZED)
def test_saves_half_of_what_bf16_saves(name: str, compiled: bool) -> None:
    """Besides parameters, which both save: of the weight nothing else is kept."""
    module, x = (
        layer(256, 1024, params_dtype=torch.bfloat16),
        torch.randn(128, 256).bfloat16().requires_grad_(True),
    )

    def saved_bytes(**kwargs: Any) -> int:
        saved: list[Tensor] = []

        def pack(tensor: Tensor) -> Tensor:
            saved.append(tensor)
            return tensor

        run = torch.compile(module, fullgraph=True, backend="aot_eager") if compiled else module
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t), nc.autocast(**kwargs):
            run(x)
        parameters = {parameter.data_ptr() for parameter in module.parameters()}
        return sum(t.numel() * t.element_size() for t in saved if t.data_ptr() not in parameters)

    assert saved_bytes(recipe=QUANTIZED[name]) <= 0.55 * saved_bytes(enabled=False)


@pytest.mark.parametrize("name", QUANTIZED)
def test_a_weight_quantized_again_has_the_same_codes(name: str) -> None:
    """Gradients are those of a weight that is kept in both directions, as for several microbatches."""
    gradients = []
    for first in (None, True):
        module, x = layer(256, 128, params_dtype=torch.bfloat16), torch.randn(128, 256).bfloat16()
        with torch.no_grad():
            module.weight.copy_(torch.randn(128, 256, generator=torch.Generator().manual_seed(1)))
        x = torch.randn(128, 256, generator=torch.Generator().manual_seed(2)).bfloat16().requires_grad_()
        with nc.autocast(recipe=QUANTIZED[name]):
            y = module(x, is_first_microbatch=first)
        torch.manual_seed(3)  # rounding of the gradient
        y.backward(torch.randn(128, 128, generator=torch.Generator().manual_seed(4)).bfloat16())
        gradients.append((x.grad, module.weight.grad))
    assert all(torch.equal(a, b) for a, b in zip(*gradients))  # type: ignore[arg-type]


def test_a_weight_changed_before_the_backward_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """As by ``torch.nn.Linear``: the backward reads the weight itself, unless it is small."""
    monkeypatch.setattr("narrowcast.recipe.plan.SMALL_WEIGHT", 0)
    module, x = layer(), torch.randn(16, 48, requires_grad=True)
    with nc.autocast(recipe=QUANTIZED["current"]):
        y = module(x)
    with torch.no_grad():
        module.weight.add_(1)
    shapes = f"{tuple(module.weight.shape)} and {tuple(module.bias.shape)}"
    told = re.escape(f"of a layer with parameters of {shapes} was modified by an inplace operation")
    with pytest.raises(RuntimeError, match=told):
        y.sum().backward()
    with nc.autocast(recipe=QUANTIZED["current"]):
        y = module.requires_grad_(False)(x)
    with torch.no_grad():
        module.weight.add_(1)
    with pytest.raises(RuntimeError, match="of a layer was modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize("name", QUANTIZED)
def test_small_weights_are_quantized_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """For both of their GEMMs; gradients are the same bits as where the backward quantizes the weight again."""
    results, saved = [], []
    for limit in (1 << 17, 0):
        monkeypatch.setattr("narrowcast.recipe.plan.SMALL_WEIGHT", limit)
        module, seen = layer(), []
        for _ in range(2):  # delayed scaling learns its scales in the first
            x = torch.randn(16, 48, generator=torch.Generator().manual_seed(1)).requires_grad_()
            torch.manual_seed(3)  # rounding of the gradient
            with (
                torch.autograd.graph.saved_tensors_hooks(
                    lambda t, seen=seen: seen.append(t) or t, lambda t: t
                ),
                nc.autocast(recipe=QUANTIZED[name]),
            ):
                y = module(x)
            results.append(torch.autograd.grad(y.square().sum(), [x, module.weight]))
        saved.append(any(t.data_ptr() == module.weight.data_ptr() for t in seen))
    assert saved == [False, True]
    for first, second in zip(results[:2], results[2:], strict=True):
        assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_saved_buffers_die_with_the_backward() -> None:
    module, x = layer(), torch.randn(16, 48, requires_grad=True)
    with nc.autocast(recipe=QUANTIZED["current"]):
        y = module(x)
    buffer = weakref.ref(next(t for t in y.grad_fn.saved_tensors if t is not None))
    y.sum().backward()
    del y
    gc.collect()
    assert buffer() is None


def test_graph_node_exposes_what_the_backward_reads() -> None:
    module, x = layer(), torch.randn(16, 48)
    with nc.autocast(recipe=nc.recipe.Float8CurrentScaling(backward_override="dequantized")):
        y = module(x)
    assert y.grad_fn.backward_objects.backward_override == "dequantized"
    with pytest.raises(AttributeError):
        y.grad_fn.backward_objects.a_misspelled_name = 1


# -- errors -------------------------------------------------------------------------------------------------------


def test_errors_name_value_and_fix() -> None:
    module = layer()
    with pytest.raises(ValueError, match=r"\(4, 40\).*in_features=48"):
        module(torch.randn(4, 40))
    with pytest.raises(TypeError, match=r"bfloat16.*float32.*autocast"):
        module(torch.randn(4, 48).bfloat16())
    with pytest.raises(RuntimeError, match="meta"):
        module(torch.randn(4, 48, device="meta"))
    with pytest.raises(RuntimeError, match="to_empty and reset_parameters"):
        layer(device="meta")(torch.randn(4, 48))
    with pytest.raises(ValueError, match="in_features is 0"):
        nc.Linear(0, 4)


def test_quantized_parameter_under_another_recipe() -> None:
    with nc.quantized_model_init(recipe=nc.recipe.MXFP8BlockScaling()):
        module = layer(name="proj")
    with (
        nc.autocast(recipe=nc.recipe.Float8CurrentScaling()),
        pytest.raises(RuntimeError, match=r"weight.*proj.*MXFP8Tensor.*Float8TensorStorage"),
    ):
        module(torch.randn(4, 48))


# -- options ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["none", "current"])
def test_return_bias(name: str) -> None:
    module, x = layer(return_bias=True), torch.randn(8, 48)
    with nc.autocast(enabled=name != "none", recipe=RECIPES[name]):
        y, bias = module(x)
    assert bias is module.bias
    module.return_bias = False
    with torch.no_grad():
        module.bias.zero_()
    with nc.autocast(enabled=name != "none", recipe=RECIPES[name]):
        assert torch.equal(y, module(x))


@pytest.mark.parametrize("name", RECIPES)
def test_meta_device(name: str) -> None:
    """As torch.nn.Linear there: a forward gives shapes, and to_empty with reset_parameters makes it real."""
    module, recipe = layer(device="meta"), RECIPES[name]
    with nc.autocast(enabled=recipe is not None, recipe=recipe):
        y = module(torch.randn(4, 48, device="meta", requires_grad=True))
    assert y.is_meta and y.shape == (4, 80)
    module.reset_parameters()
    assert module.weight.is_meta and module.bias.is_meta
    module = module.to_empty(device="cpu")
    module.reset_parameters()
    assert abs(module.weight.std().item() - 0.023) < 0.003 and not module.bias.any()
    if name == "delayed":
        assert not module.scale.any() and not module.amax.any()
    assert torch.isfinite(run(module, torch.randn(4, 48), recipe)[0]).all()


def test_init_method() -> None:
    module = layer(init_method=lambda weight: weight.fill_(0.5))
    assert (module.weight == 0.5).all()


@pytest.mark.parametrize("name", QUANTIZED)
def test_state_dict_is_plain(name: str) -> None:
    with nc.quantized_model_init(recipe=QUANTIZED[name]):
        quantized = layer()
    plain = layer()
    for module in (plain, quantized):
        state = module.state_dict()
        assert set(state) == {"weight", "bias"}
        assert all(type(t) is Tensor for t in state.values())
    quantized.load_state_dict(plain.state_dict())
    assert isinstance(quantized.weight, nc.QuantizedTensor)
    assert_close(quantized.weight.dequantize(), plain.weight, "fp4_layer")


# -- the weight cache ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("change", ["load", "to"])
def test_cache_dies_with_its_weight(change: str) -> None:
    module, x = layer(), torch.randn(8, 48)
    run(module, x, QUANTIZED["mxfp8"], is_first_microbatch=True)
    assert module._fp8_workspaces["weight"]
    if change == "load":
        module.load_state_dict(copy.deepcopy(module.state_dict()))
    else:
        module.to(torch.bfloat16)
    assert not module._fp8_workspaces["weight"]


def test_inference_cache_is_completed_for_training() -> None:
    """A cache made without gradients still serves a later microbatch that trains."""
    module, x = layer(), torch.randn(8, 48)
    with torch.no_grad(), nc.autocast(recipe=QUANTIZED["mxfp8"]):
        module(x, is_first_microbatch=True)
    ours = run(module, x, QUANTIZED["mxfp8"], is_first_microbatch=False)
    for a, b in zip(ours, run(module, x, QUANTIZED["mxfp8"]), strict=True):
        assert torch.equal(a, b)


def test_cache_of_another_recipe_is_not_used() -> None:
    module, x = layer(), torch.randn(8, 48)
    run(module, x, QUANTIZED["mxfp8"], is_first_microbatch=True)
    ours = run(module, x, QUANTIZED["current"], is_first_microbatch=False)[0]
    assert torch.equal(ours, run(module, x, QUANTIZED["current"])[0])


def test_deepcopy_and_pickle_leave_the_cache_behind() -> None:
    module, x = layer(), torch.randn(8, 48)
    run(module, x, QUANTIZED["current"], is_first_microbatch=True)
    twin = copy.deepcopy(module)
    assert not twin._fp8_workspaces["weight"] and module._fp8_workspaces["weight"]
    assert torch.equal(run(twin, x, QUANTIZED["current"])[0], run(module, x, QUANTIZED["current"])[0])


def test_a_functional_call_uses_the_state_it_is_given() -> None:
    layer, recipe = nc.Linear(32, 48, device=DEVICE), nc.recipe.DelayedScaling()
    x = torch.randn(16, 32, device=DEVICE)
    with nc.autocast(recipe=recipe):
        layer(x)
        before = layer.amax.clone()
        buffers = {name: buffer.clone() for name, buffer in layer.named_buffers()}
        torch.func.functional_call(layer, {**dict(layer.named_parameters()), **buffers}, (100 * x,))
    assert torch.equal(layer.amax, before)
    assert buffers["amax"][0] > 10 * before[0]
