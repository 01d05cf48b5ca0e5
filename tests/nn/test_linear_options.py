"""What the options of Linear mean, in eager code; that compiled code does the same is the compile matrix's."""

from __future__ import annotations

import copy
import functools
import pickle
from typing import Any

import pytest
import torch
from modules import Operators
from recipes import QUANTIZED, RECIPES, kinds
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import narrowcast as nc
from narrowcast.recipe import linear_plan
from narrowcast.testing import assert_close

K, N, TOKENS = 48, 80, 24


def layer(**kwargs: Any) -> nc.Linear:
    torch.manual_seed(1)
    return nc.Linear(K, N, device="cpu", **kwargs)


def tokens(seed: int = 2, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(TOKENS, K, generator=generator).to(dtype).requires_grad_(True)


def forward(module: nc.Linear, x: Tensor, recipe: nc.recipe.Recipe | None, **kwargs: Any) -> Any:
    torch.manual_seed(7)
    with nc.autocast(enabled=recipe is not None, recipe=recipe):
        return module(x, **kwargs)


def train(module: nc.Linear, x: Tensor, recipe: nc.recipe.Recipe | None, **kwargs: Any) -> Tensor:
    out = forward(module, x, recipe, **kwargs)
    out.float().square().sum().backward()
    return out.detach()


# -- main_grad ------------------------------------------------------------------------------------------------------


@pytest.mark.covering
@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("accumulator", [torch.float32, torch.bfloat16], ids=str)
def test_main_grad_gets_what_grad_would(name: str, dtype: torch.dtype, accumulator: torch.dtype) -> None:
    plain, fused = layer(params_dtype=dtype), layer(params_dtype=dtype, fuse_wgrad_accumulation=True)
    fused.weight.main_grad = torch.zeros(N, K, dtype=accumulator)
    for seed in (0, 1):
        x, y = tokens(seed, dtype), tokens(seed, dtype)
        assert torch.equal(train(fused, x, RECIPES[name]), train(plain, y, RECIPES[name]))
        assert torch.equal(x.grad, y.grad)
    assert fused.weight.grad is None and torch.equal(fused.bias.grad, plain.bias.grad)
    assert_close(fused.weight.main_grad.to(dtype), plain.weight.grad, "bf16_output")


@pytest.mark.parametrize("why", ["first microbatch", "attribute"])
def test_main_grad_is_overwritten(why: str) -> None:
    module, x = layer(fuse_wgrad_accumulation=True), tokens()
    module.weight.main_grad = torch.full((N, K), 100.0)
    if why == "attribute":
        module.weight.overwrite_main_grad = True
    train(module, x, RECIPES["current"], is_first_microbatch=True if why == "first microbatch" else None)
    once = module.weight.main_grad.clone()
    assert once.abs().max() < 100
    train(module, x, RECIPES["current"], is_first_microbatch=False)
    assert torch.equal(module.weight.main_grad, once if why == "attribute" else once + once)


class Twice(nn.Module):
    """A layer that one forward calls twice, each time recomputed in the backward if the way says so."""

    def __init__(self, layer: nn.Module, way: str) -> None:
        super().__init__()
        self.layer, self.way = layer, way
        backend = {"a layer": "aot_eager", "a layer, reentrant": "aot_eager_decomp_partition"}.get(way)
        self.run: Any = torch.compile(layer, fullgraph=True, backend=backend) if backend else layer

    def forward(self, x: Tensor, first: bool | None) -> Tensor:
        for scale in (1.0, 0.5):
            run = functools.partial(self.run, is_first_microbatch=first)
            if "reentrant" in self.way:
                x = scale * checkpoint(run, x, use_reentrant=self.way != "not reentrant")
            else:
                x = scale * run(x)
        return x


@pytest.mark.covering(1)
@pytest.mark.parametrize("delayed", [False, True], ids=["", "delayed"])
@pytest.mark.parametrize("kind", ["linear", "norm", "high precision", "stored"])
@pytest.mark.parametrize(
    "way", ["eager", "reentrant", "not reentrant", "a layer", "a layer, reentrant", "the model"]
)
def test_the_first_contribution_of_a_first_microbatch_overwrites(way: str, kind: str, delayed: bool) -> None:
    """Not each: the layer is called twice. Another microbatch accumulates, and so does the next backward."""

    def make(**options: Any) -> Any:
        torch.manual_seed(0)
        made = nc.LayerNormLinear if kind == "norm" else nc.Linear
        recipe = None if kind == "high precision" else RECIPES["current"]
        with nc.quantized_model_init(enabled=kind == "stored", recipe=RECIPES["current"]):
            return made(48, 48, device="cpu", recipe=recipe, **options)

    plain, fused = make(), make(fuse_wgrad_accumulation=True, delay_wgrad_compute=delayed)
    fused.weight.main_grad = torch.full((48, 48), 100.0)
    ours, theirs = Twice(fused, way), Twice(plain, "eager")
    run: Any = torch.compile(ours, fullgraph=True, backend="aot_eager") if way == "the model" else ours
    for step in range(3):
        plain.weight.grad = None
        for first in (True, False):
            x = torch.randn(7, 48, generator=torch.Generator().manual_seed(2 * step + first))
            theirs(x.requires_grad_(), None).square().sum().backward()
            run(x, first).square().sum().backward()
            for _ in range(2 * delayed):
                fused.backward_dw()
        assert_close(fused.weight.main_grad, plain.weight.grad, "bf16_output")


@pytest.mark.parametrize("zero", [False, True])
def test_placeholder_gradient_for_those_who_ask(zero: bool) -> None:
    module = copy.deepcopy(layer(fuse_wgrad_accumulation=True))  # a copy's parameters tell as well
    module.weight.main_grad = torch.zeros(N, K)
    module.weight.grad_added_to_main_grad, module.weight.zero_out_wgrad = False, zero
    train(module, tokens(), RECIPES["current"])
    assert module.weight.grad_added_to_main_grad is True
    assert (
        module.weight.grad.shape == module.weight.shape and module.weight.grad is not module.weight.main_grad
    )
    assert not zero or not module.weight.grad.any()


@pytest.mark.parametrize("name", ["none", "current"])
def test_main_grad_must_exist_where_a_gradient_is_wanted(name: str) -> None:
    module = layer(fuse_wgrad_accumulation=True, name="proj")
    with pytest.raises(RuntimeError, match=r"'weight' of proj.*main_grad"):
        forward(module, tokens(), RECIPES[name])
    with torch.no_grad():
        forward(module, tokens(), RECIPES[name])
    module.weight.requires_grad_(False)
    forward(module, tokens(), RECIPES[name])


# -- delayed weight gradients ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("fused", [False, True])
def test_delayed_gradients_are_those_of_the_backward(name: str, fused: bool) -> None:
    """First in, first out, accumulating; the gradient of the input is there at once."""
    options = {"params_dtype": torch.bfloat16, "fuse_wgrad_accumulation": fused}
    at_once, delayed = layer(**options), layer(delay_wgrad_compute=True, **options)
    for module in (at_once, delayed):
        module.weight.main_grad = torch.zeros(N, K)
    after_each: list[list[Tensor]] = []
    for seed in (0, 1):
        x, y = tokens(seed, torch.bfloat16), tokens(seed, torch.bfloat16)
        assert torch.equal(train(delayed, x, RECIPES[name]), train(at_once, y, RECIPES[name]))
        assert torch.equal(x.grad, y.grad)
        weight = at_once.weight.main_grad if fused else at_once.weight.grad
        after_each.append([weight.clone(), at_once.bias.grad.clone()])
    assert delayed.weight.grad is None and delayed.bias.grad is None and not delayed.weight.main_grad.any()
    for weight, bias in after_each:
        delayed.backward_dw()
        assert torch.equal(delayed.weight.main_grad if fused else delayed.weight.grad, weight)
        assert torch.equal(delayed.bias.grad, bias)


def test_backward_dw_says_when_nothing_waits() -> None:
    module = layer(delay_wgrad_compute=True)
    assert module.need_backward_dw() and module.weight.skip_backward_post_hook
    with pytest.raises(RuntimeError, match="no weight gradient is waiting"):
        module.backward_dw()
    train(module, tokens(), RECIPES["mxfp8"])
    store = module.wgrad_stores["weight"]
    with pytest.raises(RuntimeError, match="1 weight gradients still wait"):
        store.assert_empty()
    for twin in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        twin.wgrad_stores["weight"].assert_empty()
        assert twin.wgrad_stores["weight"].key != store.key
    module.backward_dw()
    store.assert_empty()


def test_without_the_option_backward_dw_does_nothing() -> None:
    module = layer()
    assert not module.need_backward_dw() and not hasattr(module.weight, "skip_backward_post_hook")
    module.backward_dw()
    assert module.weight.grad is None


def test_hooks_run_after_the_delayed_gradient() -> None:
    module, seen = layer(delay_wgrad_compute=True), []
    module.register_wgrad_accumulation_and_reduce_hooks(lambda: seen.append(module.weight.grad.clone()))
    train(module, tokens(), RECIPES["current"])
    assert not seen
    module.backward_dw()
    assert torch.equal(seen[0], module.weight.grad)


def test_frozen_parameters_with_delayed_gradients() -> None:
    module = layer(delay_wgrad_compute=True)
    module.weight.requires_grad_(False)
    train(module, tokens(), RECIPES["current"])
    module.backward_dw()
    assert module.weight.grad is None and module.bias.grad is not None


# -- what is not computed -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["current", "mxfp8", "block", "nvfp4", "custom"])
def test_frozen_weight_costs_neither_wgrad_nor_columnwise_input(name: str) -> None:
    module, x = layer(bias=False), tokens()
    module.weight.requires_grad_(False)
    with Operators() as operators:
        train(module, x, RECIPES[name])
    # row-wise input and gradient, a weight as small as this one both ways at once
    assert operators.seen == {"fprop": 1, "dgrad": 1, "rowwise": 2, "rowwise+columnwise": 1}


@pytest.mark.parametrize("name", ["current", "mxfp8", "block", "nvfp4", "custom"])
def test_frozen_input_costs_no_dgrad(name: str) -> None:
    module, x = layer(bias=False), tokens().detach()
    with Operators() as operators:
        train(module, x, RECIPES[name])
    assert operators.seen == {
        "fprop": 1,
        "wgrad": 1,
        "rowwise": 1,
        "columnwise": 1,
        "rowwise+columnwise": 1,
    }


def test_without_gradients_nothing_is_columnwise() -> None:
    module = layer()
    with torch.no_grad(), Operators() as operators:
        forward(module, tokens(), RECIPES["mxfp8"])
    assert operators.seen == {"fprop": 1, "rowwise": 2}


# -- save_original_input --------------------------------------------------------------------------------------------


def test_original_input_is_what_is_saved() -> None:
    module, x = layer(save_original_input=True), tokens()
    saved: list[Tensor] = []
    pack = functools.partial(lambda tensor: saved.append(tensor) or tensor)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        forward(module, x, RECIPES["mxfp8"])
    assert sum(t.dtype == torch.float32 and t.data_ptr() == x.data_ptr() for t in saved) == 1


def test_original_input_under_delayed_scaling() -> None:
    module = layer(save_original_input=True, name="proj")
    with pytest.raises(ValueError, match="save_original_input=True does not work with DelayedScaling"):
        forward(module, tokens(), RECIPES["delayed"])

    custom = nc.recipe.CustomRecipe(qfactory=lambda role: nc.recipe.DelayedScalingRequest())
    with pytest.warns(UserWarning, match=r"save_original_input is ignored.*proj"):
        forward(module, tokens(), custom)


# -- quantized inputs, outputs, gradients ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", QUANTIZED)
def test_quantized_input_is_multiplied_as_it_is(name: str) -> None:
    recipe = RECIPES["current"] if name == "delayed" else RECIPES[name]
    quantizer = linear_plan(recipe, "", True, True, module_type="linear").input.quantizer
    ours, theirs = layer(), layer()
    x, y = tokens(), tokens()
    torch.manual_seed(7)
    assert torch.equal(train(ours, quantizer.quantize(x), recipe), train(theirs, y, recipe))
    assert torch.equal(x.grad, y.grad)
    assert torch.equal(ours.weight.grad, theirs.weight.grad)


@pytest.mark.covering
@pytest.mark.parametrize("compiles", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("of_input", QUANTIZED)
@pytest.mark.parametrize("name", QUANTIZED)
def test_quantized_input_of_another_format(name: str, of_input: str, compiles: bool) -> None:
    """The weight gradient is that of the values, also where one of its operands is rotated and the other is not."""
    recipe = RECIPES["current"] if of_input == "delayed" else RECIPES[of_input]
    quantizer = linear_plan(recipe, "", True, True, module_type="linear").input.quantizer
    module, x = layer(), tokens()
    module.recipe = RECIPES[name]
    run = torch.compile(module, backend="aot_eager", fullgraph=True) if compiles else module
    y = run(quantizer.quantize(x))
    dy = torch.randn_like(y)
    y.backward(dy)
    wanted = dy.flatten(0, -2).t() @ x.detach().flatten(0, -2)
    assert (module.weight.grad - wanted).norm() < 0.35 * wanted.norm()


def test_per_tensor_input_gets_its_columns_by_transposing() -> None:
    quantizer = nc.Float8CurrentScalingQuantizer(nc.DType.kFloat8E4M3, columnwise=False)
    both, rowwise = layer(), layer()
    train(rowwise, quantizer.quantize(tokens()), RECIPES["current"])
    train(both, quantizer.with_usage(columnwise=True).quantize(tokens()), RECIPES["current"])
    assert torch.equal(rowwise.weight.grad, both.weight.grad)


def test_block_scaled_input_without_columns_is_refused_only_for_wgrad() -> None:
    module, x = layer(), nc.MXFP8Quantizer(nc.DType.kFloat8E4M3, columnwise=False).quantize(tokens())
    with pytest.raises(RuntimeError, match=r"an MXFP8Tensor .*columnwise=True"):
        forward(module, x, RECIPES["mxfp8"])
    with torch.no_grad():
        forward(module, x, RECIPES["mxfp8"])


@pytest.mark.parametrize("name", QUANTIZED)
def test_quantized_output_and_gradient(name: str) -> None:
    module, plain = layer(), layer()
    for _ in range(2):  # delayed scaling knows its scales from the second step on
        x, y = tokens(), tokens()
        out, exact = forward(module, x, RECIPES[name], fp8_output=True), forward(plain, y, RECIPES[name])
        assert isinstance(out, nc.QuantizedTensor) and out.shape == exact.shape and out.dtype == exact.dtype
        out.backward(torch.ones_like(exact))
        exact.backward(torch.ones_like(exact))
    assert_close(out.dequantize().detach(), exact.detach(), "fp4_layer" if name == "nvfp4" else "fp8_layer")
    assert torch.equal(x.grad, y.grad), "the gradient passes straight through"

    for _ in range(2):
        x = tokens()
        forward(module, x, RECIPES[name], fp8_grad=True).backward(torch.ones_like(exact))
    assert isinstance(x.grad, nc.QuantizedTensor)
    assert_close(x.grad.dequantize(), y.grad, "fp4_layer" if name == "nvfp4" else "fp8_layer")


@pytest.mark.parametrize("option", ["fp8_output", "fp8_grad"])
def test_quantized_results_need_a_recipe(option: str) -> None:
    with pytest.raises(RuntimeError, match=f"{option}=True needs a recipe"):
        layer()(tokens(), **{option: True})


def test_the_output_alone_may_be_scaled_with_delay() -> None:
    def factory(role: nc.QuantizerRole) -> Any:
        if role.tensor_type == "output":
            return nc.recipe.DelayedScalingRequest(amax_history_len=2)
        return nc.Float8CurrentScalingQuantizer(nc.DType.kFloat8E4M3)

    module, recipe = layer(name="proj"), nc.recipe.CustomRecipe(qfactory=factory)
    plain = forward(module, tokens(), nc.recipe.Float8CurrentScaling())
    largest = plain.detach().abs().max()
    scale = torch.div(448, largest)  # 448 / tensor multiplies by a reciprocal
    for _ in range(2):  # nothing was seen, and the same was seen
        out = forward(module, tokens(), recipe, fp8_output=True)
        assert isinstance(out, nc.Float8Tensor)
        assert torch.equal(out._scale_inv, 1 / scale.reshape(1))
        expected = (plain.detach() * scale).to(torch.float8_e4m3fn).float() / scale
        torch.testing.assert_close(out.dequantize(), expected, rtol=1e-6, atol=0)
        assert module.amax[1] == largest
        out.dequantize().sum().backward()
        nc.renew_delayed_scaling(module)


@pytest.mark.parametrize("shape", [(3, 5, K), (0, K), (2, 0, K)], ids=str)
@pytest.mark.parametrize("name", QUANTIZED)
def test_quantized_input_and_output_of_any_shape(name: str, shape: tuple[int, ...]) -> None:
    recipe = RECIPES["current"] if name == "delayed" else RECIPES[name]
    quantizer = linear_plan(recipe, "", True, True, module_type="linear").input.quantizer
    module, x = layer(), torch.randn(shape, requires_grad=True)
    out = forward(module, quantizer.quantize(x), recipe, fp8_output=True)
    assert out.shape == (*shape[:-1], N)
    out.dequantize().square().sum().backward()
    assert x.grad.shape == shape and module.weight.grad.shape == (N, K)


# -- the weight cache without the flag ------------------------------------------------------------------------------


def optimizer_step(module: nc.Linear) -> None:
    module.weight.grad = torch.ones_like(module.weight)
    torch.optim.SGD([module.weight], lr=0.1).step()


def load(module: nc.Linear) -> None:
    state = module.state_dict()
    module.load_state_dict({**state, "weight": state["weight"] + 0.1})


def edit(module: nc.Linear) -> None:
    with torch.no_grad():
        module.weight.add_(0.1)


def assign_data(module: nc.Linear) -> None:
    module.weight.data = module.weight.data + 0.1


def edit_data(module: nc.Linear) -> None:
    module.weight.data.add_(0.1)


def replace(module: nc.Linear) -> None:
    module.weight = torch.nn.Parameter(module.weight.detach() + 0.1)


def cast(module: nc.Linear) -> None:
    module.to(torch.bfloat16).to(torch.float32)


CHANGES = [optimizer_step, load, edit, assign_data, edit_data, replace, cast]


@pytest.mark.covering(1)
@pytest.mark.parametrize("name", kinds(QUANTIZED))
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_weight_is_never_taken_from_the_cache(name: str, compiled: bool, change: Any) -> None:
    """A cache is there, the weight changes, and the next call sees the new weight: with True and without the flag."""
    module, recipe = layer(bias=False), RECIPES[name]
    run: Any = torch.compile(module, fullgraph=True, backend="aot_eager") if compiled else module
    x = tokens().detach()
    with torch.no_grad():
        before = forward(run, x, recipe, is_first_microbatch=True)
        change(module)
        fresh = layer(bias=False)
        fresh.load_state_dict(module.state_dict())
        expected = forward(fresh, x, recipe)
        assert not torch.equal(expected, before)
        assert torch.equal(forward(run, x, recipe), expected)
        assert torch.equal(forward(run, x, recipe, is_first_microbatch=True), expected)


@pytest.mark.parametrize("change", [load, replace, cast])
def test_what_replaces_the_weight_empties_the_cache(change: Any) -> None:
    """For a later microbatch, too; what changes it in place: ``functional/test_kept_weights.py``."""
    module, x = layer(), tokens()
    forward(module, x, RECIPES["current"], is_first_microbatch=True)
    change(module)
    later = forward(module, x, RECIPES["current"], is_first_microbatch=False)
    assert torch.equal(later, forward(module, x, RECIPES["current"]))


# -- state ----------------------------------------------------------------------------------------------------------


def test_options_add_nothing_to_the_state_dict() -> None:
    module = layer(fuse_wgrad_accumulation=True, delay_wgrad_compute=True, save_original_input=True)
    module.weight.main_grad = torch.zeros(N, K)
    train(module, tokens(), RECIPES["current"], is_first_microbatch=True)
    assert set(module.state_dict()) == {"weight", "bias"}


@pytest.mark.parametrize("name", QUANTIZED)
def test_kept_high_precision_value_survives_training(name: str) -> None:
    with nc.quantized_model_init(recipe=RECIPES[name], preserve_high_precision_init_val=True):
        module = layer()
    kept = module.weight.get_high_precision_init_val()
    train(module, tokens(), RECIPES[name])
    assert torch.equal(kept, layer().weight) and module.weight.grad.shape == (N, K)
    module.weight.clear_high_precision_init_val()
    assert module.weight.get_high_precision_init_val() is None
