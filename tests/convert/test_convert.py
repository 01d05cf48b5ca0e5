"""``convert`` changes the class of modules and nothing else, runs as the layers do, and ``revert`` is exact."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from modules import assert_equal
from recipes import QUANTIZED
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.utils.parametrizations import weight_norm

import narrowcast as nc

from .models import Conv1D, Experts, Model, route

CURRENT, MXFP8 = nc.recipe.Float8CurrentScaling(), nc.recipe.MXFP8BlockScaling(emulate=True)
WORDS = torch.arange(24).view(2, 12)


def gradients(model: nn.Module, x: Tensor = WORDS) -> dict[str, Tensor]:
    """Output, and the gradients of all parameters; random numbers repeat."""
    torch.manual_seed(1)
    out = model(x)
    grads = torch.autograd.grad(out.float().square().sum(), list(model.parameters()))
    return {"out": out, **dict(zip((name for name, _ in model.named_parameters()), grads))}


@pytest.mark.parametrize("recipe", QUANTIZED.values(), ids=QUANTIZED)
def test_a_converted_model_computes_as_one_built_of_the_layers(recipe: Any) -> None:
    model = Model()
    built = copy.deepcopy(model)
    for block in built.layers:
        for name in ("up", "gate", "down"):
            old = getattr(block, name)
            new = nc.Linear(old.in_features, old.out_features, old.bias is not None, device="cpu")
            new.load_state_dict(old.state_dict())
            setattr(block, name, new)
    nc.set_recipe(built, recipe)
    plain = gradients(model)
    nc.convert(model, recipe, skip="head")
    assert_equal(gradients(model), gradients(built))
    assert not torch.equal(gradients(model)["out"], plain["out"])


@pytest.mark.parametrize("recipe", [CURRENT, nc.recipe.DelayedScaling()], ids=["current", "delayed"])
def test_revert_is_exact(recipe: Any) -> None:
    model = Model()
    before, plain = {name: (type(m), dict(m.__dict__)) for name, m in model.named_modules()}, gradients(model)
    buffers = {name: dict(m._buffers) for name, m in model.named_modules()}
    nc.convert(model, recipe)
    gradients(model)
    assert nc.revert(model) is model
    for name, module in model.named_modules():
        kind, attributes = before[name]
        assert type(module) is kind
        assert module.__dict__.keys() == attributes.keys()
        assert all(module.__dict__[key] is value for key, value in attributes.items())
        assert module._buffers == buffers[name]
        assert not module._forward_pre_hooks
    assert_equal(gradients(model), plain)


def test_a_reverted_model_trains_as_if_it_was_never_converted() -> None:
    """The steps of all optimizers renew what keeps state; what is reverted keeps none."""
    model, plain, other = Model(), Model(), nn.Linear(3, 3)
    plain.load_state_dict(model.state_dict())
    nc.revert(nc.convert(model, "delayed"))
    for one in (model, plain):
        one(WORDS).square().sum().backward()
        torch.optim.SGD(one.parameters(), lr=0.1).step()
    assert_equal(model.state_dict(), plain.state_dict())
    torch.optim.SGD(other.parameters(), lr=0.1).step()


def test_everything_about_a_module_but_its_class_stays() -> None:
    model, seen = Model(), []
    layer: Any = model.layers[0].up.bfloat16().eval()
    layer.weight.requires_grad_(False)
    layer.note, layer.name = object(), "the user's"
    handle = layer.register_forward_hook(lambda *args: seen.append(args[0]))
    kept = (layer.weight, layer.bias, layer.note, layer._forward_hooks)
    nc.convert(model, CURRENT)
    assert model.layers[0].up is layer and isinstance(layer, nc.Linear) and isinstance(layer, nn.Linear)
    assert all(a is b for a, b in zip(kept, (layer.weight, layer.bias, layer.note, layer._forward_hooks)))
    assert not layer.training and model.layers[1].up.training
    assert model.head.weight is model.embed.weight
    layer(torch.randn(4, 32, dtype=torch.bfloat16)).sum().backward()
    assert seen == [layer] and layer.weight.grad is None and layer.bias.grad is not None
    handle.remove()
    nc.revert(model)
    assert layer.name == "the user's" and type(layer) is nn.Linear


@pytest.mark.parametrize("recipe", [CURRENT, MXFP8], ids=["current", "mxfp8"])
def test_state_dicts_are_the_same_and_load_both_ways(recipe: Any) -> None:
    plain, model = Model(), Model()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    nc.convert(model, recipe)
    assert_equal(dict(model.state_dict()), before)
    plain.load_state_dict(model.state_dict(), strict=True)
    model.load_state_dict(Model().state_dict(), strict=True)
    model.load_state_dict(before, strict=True)


def test_delayed_scaling_adds_its_state_and_loads_what_lacks_it() -> None:
    model = Model()
    before = model.state_dict()
    nc.convert(model, nc.recipe.DelayedScaling())
    gradients(model)
    assert set(before) < set(model.state_dict())
    with pytest.warns(UserWarning, match="scales start anew"):
        model.load_state_dict(before, strict=True)


def test_copies_and_pickles_are_converted_and_turn_back() -> None:
    model = Model()
    plain = gradients(model)
    nc.convert(model, CURRENT)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    copies = copy.deepcopy(model), pickle.loads(pickle.dumps(model)), torch.load(file, weights_only=False)
    for other in copies:
        assert_equal(gradients(other), gradients(model))
        assert type(other.head) is type(model.head)
        assert_equal(gradients(nc.revert(other)), plain)


def test_a_converted_layer_begins_as_its_own_class_begins() -> None:
    ours, theirs = nn.Linear(32, 48), nn.Linear(32, 48)
    nc.convert(ours, nc.recipe.DelayedScaling())
    for layer in (ours, theirs):
        torch.manual_seed(3)
        layer.reset_parameters()
    assert torch.equal(ours.weight, theirs.weight) and torch.equal(ours.bias, theirs.bias)


def test_patterns_choose_and_one_that_matches_nothing_raises() -> None:
    model = Model()
    receipt = nc.receipt(
        nc.convert(model, {"layers.*": CURRENT, "layers.1.down": MXFP8}, only="layers", skip=["**.gate"])
    )
    assert nc.get_recipes(model) == {
        "layers.0.up": CURRENT,
        "layers.0.down": CURRENT,
        "layers.1.up": CURRENT,
        "layers.1.down": MXFP8,
    }
    reasons = {one.name: one.reason for one in receipt.gemms if one.decision == "kept"}
    assert reasons == {"layers.0.gate": "skip", "layers.1.gate": "skip", "head": "not in only"}
    for wrong, told in (
        ({"only": "blocks"}, "^only: 'blocks' matches no linear layer of this Model; "),
        ({"skip": ["head", "gate"]}, "^skip: 'gate' matches no linear layer of this Model; "),
    ):
        model = Model()
        with pytest.raises(ValueError, match=told):
            nc.convert(model, CURRENT, **wrong)
        assert type(model.head) is nn.Linear
    with pytest.raises(ValueError, match=r"'gate' matches no .* write '\*\*\.gate'"):
        nc.convert(Model(), CURRENT, skip="gate")
    with pytest.raises(ValueError, match="^recipe: 'embed' matches no linear layer of this Model; "):
        nc.convert(Model(), {"embed": CURRENT})


def test_functions_choose_what_is_converted() -> None:
    model = nc.convert(Model(), CURRENT, skip=lambda name, module: name.endswith("gate"), only=["**.layers"])
    assert {name.split(".")[-1] for name in nc.get_recipes(model)} == {"up", "down"}
    kept = {one.name: one.reason for one in nc.receipt(model).gemms if one.decision == "kept"}
    assert kept == {"layers.0.gate": "skip", "layers.1.gate": "skip", "head": "not in only"}
    assert type(nc.convert(Model(), CURRENT, skip="**.head").head) is nn.Linear
    nothing = lambda name, module: False  # noqa: E731
    assert nc.get_recipes(nc.convert(Model(), CURRENT, only=["head", nothing], skip=nothing)) == {
        "head": CURRENT
    }
    with pytest.raises(TypeError, match=r"no 'module_filter_fn'; use only= or skip=: .*\(name, module\)"):
        nc.convert(Model(), CURRENT, module_filter_fn=lambda module, name: True)  # type: ignore[call-overload]
    with pytest.raises(
        ValueError, match=r"chooses none of 7 modules; its functions are called with \(name, module\)"
    ):
        nc.convert(Model(), CURRENT, only=lambda a, b: isinstance(a, nn.Linear))


@pytest.mark.parametrize(
    "function",
    [
        lambda module, name: isinstance(module, nn.Embedding),
        lambda mod, fqn: fqn == "head",
        lambda m, n: n == "head",
    ],
)
@pytest.mark.parametrize("argument", ["only", "skip"])
def test_functions_in_torchao_s_order_are_refused(function: Any, argument: str) -> None:
    model = Model()
    with pytest.raises(TypeError, match=rf"^{argument} has a function of .* torchao's order; .*name, module"):
        nc.convert(model, CURRENT, **{argument: function})
    assert nc.get_recipes(model) == {}


@pytest.mark.filterwarnings("ignore:.torch.jit")
def test_what_torch_jit_compiled_stays_with_a_reason() -> None:
    compiled = torch.jit.trace(nn.Linear(64, 64), torch.ones(2, 64))
    with pytest.raises(ValueError, match="torch.jit compiled it; convert the model that it was made from"):
        nc.convert(compiled, CURRENT)
    without = nn.Linear(64, 64)
    without.weight = None  # type: ignore[assignment]
    model = nc.convert(nn.Sequential(compiled, without, nn.Linear(64, 64)), CURRENT)
    assert list(nc.get_recipes(model)) == ["2"]


@pytest.mark.parametrize("second", [MXFP8, nc.recipe.DelayedScaling()], ids=["mxfp8", "delayed"])
def test_converting_again_changes_the_recipe_of_what_is_asked_for(second: Any) -> None:
    model = Model()
    before = {name: (type(m), set(m.__dict__), set(m._buffers)) for name, m in model.named_modules()}
    nc.convert(model, CURRENT, only="layers")
    dry = nc.convert(model, second, skip="**.down", heads=True, dry_run=True)
    assert set(nc.get_recipes(model).values()) == {CURRENT}
    assert nc.receipt(nc.convert(model, second, skip="**.down", heads=True)).gemms == dry.gemms
    wanted = {f"layers.{block}.{name}": second for block in range(2) for name in ("up", "gate")}
    assert nc.get_recipes(model) == {
        **wanted,
        "layers.0.down": CURRENT,
        "layers.1.down": CURRENT,
        "head": second,
    }
    again = nc.convert(Model(), second, heads=True)
    again.load_state_dict(model.state_dict(), strict=False)
    nc.convert(model, second)
    assert_equal(gradients(model), gradients(again))
    nc.revert(model)
    assert {name: (type(m), set(m.__dict__), set(m._buffers)) for name, m in model.named_modules()} == before


def test_converting_again_names_layers_for_a_custom_recipe() -> None:
    asked = set()

    def factory(role: Any) -> Any:
        asked.add(role.name)
        return nc.custom_recipes.current_scaling_factory(role)

    model = nc.convert(nc.convert(Model(), CURRENT), nc.recipe.CustomRecipe(qfactory=factory))
    gradients(model)
    assert asked == set(nc.get_recipes(model))


def test_weights_that_are_stored_keep_their_recipe() -> None:
    model = nc.convert(nn.Sequential(nn.Linear(32, 32)).requires_grad_(False), CURRENT, weights="stored")
    nc.convert(model, CURRENT)
    with pytest.raises(
        ValueError, match=r"weight of '0' is stored .* current; call .*revert\(model\) before"
    ):
        nc.convert(model, nc.recipe.DelayedScaling())
    assert nc.receipt(model).gemms[0].stored


def test_a_conversion_that_would_change_nothing_raises_with_the_reasons() -> None:
    of_torchao = type("AffineQuantizedTensor", (torch.Tensor,), {"__module__": "torchao.dtypes.affine"})
    quantized = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    for layer in quantized:
        weight = torch.Tensor._make_subclass(of_torchao, layer.weight.detach())
        layer._parameters["weight"] = weight  # type: ignore[assignment]
    told = r"'0' and 1 more: torchao made its weight an AffineQuantizedTensor; convert the model instead"
    with pytest.raises(ValueError, match=f"would change nothing in this Sequential; {told}"):
        nc.convert(quantized, CURRENT)
    trained = type(
        "Float8Linear", (nn.Linear,), {"__module__": "torchao.float8", "forward": lambda self, x: x}
    )
    with pytest.raises(ValueError, match="'the model': torchao made it a Float8Linear"):
        nc.convert(trained(8, 8), CURRENT)
    mixed = nc.convert(nn.Sequential(trained(8, 8), nn.Linear(8, 8)), CURRENT)
    assert nc.receipt(mixed).gemms[0].reason.startswith("torchao made it a Float8Linear")
    told = r"'the model': weight is torch.float64; call model.float\(\) or model.bfloat16\(\) before"
    with pytest.raises(ValueError, match=told):
        nc.convert(nn.Linear(8, 8).double(), CURRENT)
    told = (
        r"float8_e4m3fn; call model.float\(\) or model.bfloat16\(\) before\. dry_run=True lists every reason$"
    )
    with pytest.raises(ValueError, match=told):
        nc.convert(nn.Linear(8, 8).to(torch.float8_e4m3fn), CURRENT)
    told = r"complex64; no recipe quantizes it, leave the model as it is\. dry_run=True lists every reason$"
    with pytest.raises(ValueError, match=told):
        nc.convert(nn.Linear(8, 8).to(torch.complex64), CURRENT)
    ours = nc.Linear(8, 8, device="cpu")
    with pytest.raises(ValueError, match="a layer of narrowcast already; set_recipe gives it a recipe"):
        nc.convert(ours, CURRENT)
    quantized = type("Linear", (nn.Module,), {"__module__": "torch.ao.nn.quantized.dynamic.modules.linear"})
    told = "torch.ao.quantization has made '0' a quantized Linear; load the weights into the plain model"
    for function in (nc.convert, nc.set_recipe):
        with pytest.raises(ValueError, match=told):
            function(nn.Sequential(quantized()), CURRENT)
    for nothing in ({"recipe": {"": None}}, {"recipe": CURRENT, "skip": "**"}):
        with pytest.raises(ValueError, match="convert would change nothing in this Linear; 'the model': "):
            nc.convert(nn.Linear(8, 8), **nothing)


@pytest.mark.parametrize(
    ("model", "recipe", "error", "match"),
    [
        (nn.Linear(4, 4), None, TypeError, "recipe is None"),
        (nn.Linear(4, 4), "{fp8", ValueError, "^convert: recipe: the recipes are not JSON"),
        (nn.Linear(4, 4), 8, TypeError, "convert: recipe is 8, of type int; pass one of"),
        (nn.Linear(4, 4), {"": CURRENT, "0": 8}, TypeError, "convert: '0': recipe is 8, of type int"),
        (
            nn.Linear(4, 4),
            {"0": "curent"},
            ValueError,
            "convert: '0': no recipe is named 'curent'; the nearest",
        ),
        (
            nn.Linear(4, 4),
            "bf16",
            ValueError,
            "no recipe is named 'bf16'; skip=, or None in a table, leaves layers as they are",
        ),
        (nn.Linear(4, 4), [CURRENT], TypeError, r"convert: recipe is \[Float8CurrentScaling.* of type list"),
        ([3], CURRENT, TypeError, r"model is \[3\], of type list; pass a torch.nn.Module"),
        (nn.Linear, CURRENT, TypeError, r"model is the class Linear; .* as Linear\(...\) makes"),
    ],
)
def test_what_cannot_be_raises(model: Any, recipe: Any, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        nc.convert(model, recipe)


def test_a_recipe_that_fails_for_a_layer_leaves_the_model_alone() -> None:
    def factory(role: nc.QuantizerRole) -> nc.Quantizer:
        if role.name == "head":
            raise ValueError("not the head")
        return nc.MXFP8Quantizer(nc.DType.kFloat8E4M3)

    model = Model()
    with pytest.raises(ValueError, match="not the head"):
        nc.convert(model, nc.recipe.CustomRecipe(qfactory=factory), heads=True)
    assert not nc.get_recipes(model)
    nc.convert(model, nc.recipe.CustomRecipe(qfactory=factory), skip="head")
    assert model.layers[0].up.name == "layers.0.up"  # what a custom recipe's factory is told


class OwnForward(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class OwnConv1D(Conv1D):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class OwnInit(nn.Linear):
    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)


def replaced() -> nn.Linear:
    layer = nn.Linear(32, 32)
    layer.forward = lambda x: x  # type: ignore[method-assign]
    return layer


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (OwnForward(32, 32), "OwnForward has a forward of its own"),
        (OwnConv1D(32, 32), "a parameter that OwnConv1D uses in its own code, which convert does not know"),
        (weight_norm(nn.Linear(32, 32)), "parametrized"),
        (replaced(), "replaced on the instance"),
        (nn.Linear(32, 32, dtype=torch.float64), "torch.float64"),
        (nn.LazyLinear(32), "not known before its first forward"),
        (nn.Conv2d(3, 4, 2), "convolution"),
        (nn.MultiheadAttention(32, 4), "MultiheadAttention reads its weight itself"),
        (nn.LSTM(32, 32), "a parameter that LSTM uses in its own code, which convert does not know"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
def test_what_stays_is_named_with_the_reason(module: nn.Module, reason: str) -> None:
    before = {id(m): type(m) for m in module.modules()}
    receipt = nc.receipt(nc.convert(nn.Sequential(module, nn.Linear(32, 32)), CURRENT))
    assert any(reason in one.reason for one in receipt.gemms if one.decision == "kept")
    assert {id(m): type(m) for m in module.modules()} == before


class Readers(nn.Module):
    """Reads weights of what it holds: as values, as attributes, under conditions, in a method, of a child's child."""

    slices, exact = 1, False

    def __init__(self) -> None:
        super().__init__()
        self.init_weights()
        for name in ("multiplied", "asked", "sliced", "trained", "helped", "made", "written"):
            setattr(self, name, nn.Linear(32, 32))
        self.inner = nn.Sequential()
        self.inner.deep = nn.Linear(32, 32)
        self.init_weights()

    def init_weights(self) -> None:
        if hasattr(self, "made"):
            nn.init.normal_(self.made.weight)

    def merge_adapter(self) -> None:
        self.made.weight.data += self.helped.bias

    def helper(self, x: Tensor) -> Tensor:
        return self.helped.weight @ x @ self.inner.deep.weight.t()

    def forward(self, x: Tensor) -> Tensor:
        if isinstance(self.asked.weight, Tensor) and self.asked.weight.dtype != x.dtype:
            x = x.to(self.asked.weight.dtype)
        if self.slices > 1 and self.exact:
            x = x @ self.sliced.weight
        elif self.training and self.exact is not None:
            x = torch.nn.functional.linear(x, self.trained.weight)
        self.written.weight = self.written.weight if self.exact else self.made.weight.requires_grad
        return x @ self.multiplied.weight.t()


class DerivedReaders(Readers):
    slices, exact = 2, True

    def helper(self, x: Tensor) -> Tensor:
        return x


@pytest.mark.parametrize(
    ("cls", "read"),
    [
        (Readers, {"multiplied", "trained", "helped", "inner.deep"}),
        (DerivedReaders, {"multiplied", "sliced", "written"}),
    ],
)
def test_a_layer_whose_weight_another_module_reads_stays(cls: type[Readers], read: set[str]) -> None:
    receipt = nc.receipt(nc.convert(cls(), CURRENT))
    kept = {one.name: one.reason for one in receipt.gemms if one.decision == "kept"}
    assert kept == dict.fromkeys(read, f"{cls.__name__} reads its weight itself")


def test_a_subclass_without_a_forward_of_its_own_is_converted_and_stays_a_subclass() -> None:
    model = nn.Sequential(OwnInit(32, 48))
    nc.convert(model, CURRENT)
    assert isinstance(model[0], OwnInit) and isinstance(model[0], nc.Linear)
    model[0].reset_parameters()
    assert (model[0].weight == 1).all()


def test_experts_that_are_not_known_are_told() -> None:
    class Mixture(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w1 = nn.Parameter(torch.randn(4, 32, 16))

    receipt = nc.receipt(nc.convert(nn.Sequential(Mixture(), nn.Linear(8, 8)), CURRENT))
    assert receipt.gemms[0].reason == "experts that Mixture uses in its own code, which convert does not know"
    assert receipt.flops_covered < 0.1


def test_a_module_whose_class_changed_since_is_not_reverted() -> None:
    model = Model()
    nc.convert(model, CURRENT, heads=True)
    weight_norm(model.layers[1].down)
    with pytest.raises(RuntimeError, match=r"'layers\.1\.down' was converted and is a Parametrized"):
        nc.revert(model)
    assert isinstance(model.head, nc.Linear)


def test_a_model_on_meta_is_converted_and_made_real_later() -> None:
    with torch.device("meta"):
        model = Model()
    nc.convert(model, nc.recipe.DelayedScaling(), skip="head")
    model.to_empty(device="cpu")
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    assert gradients(model)["out"].isfinite().all()


def test_torch_autocast_and_checkpoint() -> None:
    model, plain = Model(), Model()
    plain.load_state_dict(model.state_dict())
    nc.convert(model, CURRENT)
    with torch.autocast("cpu", torch.bfloat16):
        out = model(WORDS)
        reference = plain(WORDS)
    assert out.dtype == torch.bfloat16
    assert torch.cosine_similarity(out.flatten().float(), reference.flatten().float(), 0) > 0.99
    once = gradients(model)["layers.0.up.weight"]
    for reentrant in (True, False):
        model.zero_grad()
        y = torch.utils.checkpoint.checkpoint(model.layers[0], model.embed(WORDS), use_reentrant=reentrant)
        model.head(model.layers[1](y)).square().sum().backward()
        assert torch.equal(model.layers[0].up.weight.grad, once)


def test_equal_blocks_share_one_graph() -> None:
    """Layers are named for custom recipes alone: a name would be a constant of the graph."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(3)))
    nc.convert(model, CURRENT)
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    for block in model:
        block.compile(backend=counter, fullgraph=True)
    model(torch.randn(8, 32, requires_grad=True)).sum().backward()
    assert counter.frame_count <= 2  # the first input is a leaf, the others are not


@pytest.mark.parametrize("recipe", QUANTIZED.values(), ids=QUANTIZED)
def test_conv1d_is_the_linear_layer_of_the_transposed_weight(recipe: Any) -> None:
    model, linear = nn.Sequential(Conv1D(48, 32)), nc.Linear(32, 48, device="cpu")
    conv = model[0]
    keys = list(model.state_dict())
    linear.load_state_dict({"weight": conv.weight.t(), "bias": conv.bias})
    linear.recipe = recipe
    receipt = nc.receipt(nc.convert(model, recipe))
    assert receipt.flops_covered == 1.0 and receipt.gemms[0].shape == (32, 48)
    assert isinstance(conv, Conv1D)
    if not recipe.delayed():
        assert list(model.state_dict()) == keys
    x = torch.randn(2, 10, 32)
    ours, theirs = gradients(conv, x), gradients(linear, x)
    assert torch.equal(ours["out"], theirs["out"])
    assert torch.equal(ours["weight"], theirs["weight"].t()) and torch.equal(ours["bias"], theirs["bias"])
    nc.revert(model)
    assert type(conv) is Conv1D


@pytest.mark.parametrize("recipe", QUANTIZED.values(), ids=QUANTIZED)
@pytest.mark.parametrize("transposed", [False, True], ids=["stored", "transposed"])
def test_experts_are_grouped_layers(recipe: Any, transposed: bool) -> None:
    experts = Experts(transposed=transposed, bias=transposed)
    first = nc.GroupedLinear(4, 32, 96, transposed, device="cpu", single_grouped_parameter=True)
    second = nc.GroupedLinear(4, 48, 32, transposed, device="cpu", single_grouped_parameter=True)
    for layer, name in ((first, "gate_up_proj"), (second, "down_proj")):
        weight = getattr(experts, name).detach()
        layer.weight.data.copy_(weight.transpose(1, 2) if transposed else weight)
        if transposed:
            layer.bias.data.copy_(getattr(experts, f"{name}_bias"))
        layer.recipe = recipe
    x, (index, weights) = torch.randn(20, 32), route(20, 4)
    plain = experts(x, index, weights)
    receipt = nc.receipt(nc.convert(experts, recipe))
    assert [one.decision for one in receipt.gemms] == ["converted", "converted"]
    order = index.flatten().argsort(stable=True)
    splits = index.flatten().bincount(minlength=4)
    torch.manual_seed(1)
    y = second(experts._apply_gate(first(x[order // 2], splits)), splits) * weights.flatten()[order, None]
    y = y[order.argsort()].view(20, 2, 32).sum(1)
    torch.manual_seed(1)
    ours = experts(x, index, weights)
    assert torch.equal(ours, y)
    assert torch.cosine_similarity(ours.flatten(), plain.flatten(), 0) > 0.95
    grads = torch.autograd.grad(ours.square().sum(), [experts.gate_up_proj, experts.down_proj])
    theirs = torch.autograd.grad(y.square().sum(), [first.weight, second.weight])
    if not getattr(recipe, "nvfp4", lambda: False)():  # whose gradients are rounded at random
        for ours_, theirs_ in zip(grads, theirs):
            assert torch.equal(ours_, theirs_.transpose(1, 2) if transposed else theirs_)
    assert nc.revert(experts)(x, index, weights).equal(plain)


def test_experts_that_say_nothing_of_a_norm_have_none() -> None:
    """Those of Transformers 5.17."""
    experts = Experts()
    x, chosen = torch.randn(20, 32), route(20, 4)
    expected = nc.convert(copy.deepcopy(experts), QUANTIZED["current"])(x, *chosen)
    del experts.has_post_expert_norm
    assert torch.equal(nc.convert(experts, QUANTIZED["current"])(x, *chosen), expected)


def test_experts_of_other_ranks_add_nothing_and_compile() -> None:
    experts = Experts()
    x, (index, weights) = torch.randn(20, 32), route(20, 4)
    index[:3], weights[:3] = 4, 0.0  # the number that stands for them
    nc.convert(experts, CURRENT)
    out = experts(x, index, weights)
    assert (out[:3] == 0).all() and (out[3:] != 0).any()
    torch._dynamo.reset()
    compiled = torch.compile(experts, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x, index, weights), out)


def test_norms_are_converted_only_where_asked() -> None:
    model = nn.Sequential(
        nn.LayerNorm(32), nn.Linear(32, 32), nn.RMSNorm(32, eps=1e-6), nn.RMSNorm(32), nn.LayerNorm((4, 32))
    )
    x = torch.randn(2, 4, 32)
    plain, keys = model(x), list(model.state_dict())
    assert not nc.receipt(nc.convert(model, CURRENT)).norms
    assert type(model[0]) is nn.LayerNorm
    nc.revert(model)
    attributes = [(set(m.__dict__), set(m._parameters)) for m in model]
    receipt = nc.receipt(nc.convert(model, CURRENT, norms=True))
    assert isinstance(model[0], nc.LayerNorm) and isinstance(model[2], nc.RMSNorm)
    assert [(one.name, one.decision) for one in receipt.norms] == [
        ("0", "converted"),
        ("2", "converted"),
        ("3", "kept"),
        ("4", "kept"),
    ]
    told = "norms: 2 converted; kept: 3 (its eps depends on the dtype of the input), 4 (it normalizes over 2 dims)"
    assert told in str(receipt)
    assert list(model.state_dict()) == keys
    copied = copy.deepcopy(model)
    with nc.autocast(enabled=False):
        assert torch.allclose(model(x), plain, atol=1e-5)
        assert torch.equal(copied(x), model(x))
    nc.revert(model)
    assert [(set(m.__dict__), set(m._parameters)) for m in model] == attributes
    assert torch.equal(model(x), plain)
    nc.convert(model, CURRENT, norms=True, skip="0")
    assert type(model[0]) is nn.LayerNorm and isinstance(model[2], nc.RMSNorm)


def test_errors_of_inputs_name_the_layer_of_the_model() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(32, 32), nn.LayerNorm(32)))
    nc.convert(model, CURRENT, norms=True)
    for layer, name in ((model[0][0], "0.0"), (model[0][1], "0.1")):
        for wrong in (torch.ones(16, 31), torch.ones(16, 32, device="meta")):
            with pytest.raises((ValueError, RuntimeError), match=f"'{name}'"):
                layer(wrong)
    with pytest.raises(TypeError, match=r"in '0.0' of \(32, 32\)"):
        model(torch.ones(16, 32, dtype=torch.float16))
    nc.revert(model)
    assert not any("_module_name" in vars(module) for module in model.modules())


def test_experts_have_the_role_of_grouped_layers() -> None:
    """Also in the receipt, in plans for its bytes, and while they calibrate."""
    asked = set()

    def factory(role: Any) -> Any:
        asked.add(role.module_type)
        return nc.custom_recipes.current_scaling_factory(role)

    experts = Experts()
    receipt = nc.receipt(nc.convert(experts, nc.recipe.CustomRecipe(qfactory=factory)))
    x = torch.randn(9, 32, requires_grad=True)
    experts(x, *route(9, 4)).square().sum().backward()
    with nc.autocast(enabled=False, calibrating=True, recipe=nc.recipe.CustomRecipe(qfactory=factory)):
        experts(x, *route(9, 4))
    assert receipt.gemms[0].covered and asked == {"grouped_linear"}


def test_a_factory_that_tells_grouped_layers_apart() -> None:
    model = nn.Sequential(Experts(), nn.Linear(32, 32))
    factory = nc.custom_recipes.nvfp4_linear_mxfp8_grouped_linear_factory
    nc.convert(model, nc.recipe.CustomRecipe(qfactory=factory))
    x, (index, weights) = torch.randn(9, 32), route(9, 4)
    ours = model[0](x, index, weights)
    nc.set_recipe(model[0], nc.recipe.MXFP8BlockScaling())
    assert torch.equal(ours, model[0](x, index, weights))


def test_a_conversion_that_skips_everything_is_refused() -> None:
    model = Model()
    with pytest.raises(ValueError, match=r"convert would change nothing in this Model; .* and \d more: skip"):
        nc.convert(model, CURRENT, skip="**")
    with pytest.raises(
        ValueError, match=r'more: skip, whose "" selects all modules\. Give another recipe=, '
    ):
        nc.convert(model, CURRENT, skip="")
    with pytest.raises(
        ValueError, match="is given for it. Give another .*; dry_run=True lists every reason$"
    ):
        nc.convert(model, {"**": None})
    listed = nc.convert(model, {"**": None}, dry_run=True)
    assert {one.reason for one in listed.gemms} == {"no recipe is given for it"}
    nc.convert(nc.convert(model, CURRENT), CURRENT, skip="**")
    assert nc.get_recipes(nc.convert(Model(), {"": CURRENT, "layers.0": None, "embed": None}))
