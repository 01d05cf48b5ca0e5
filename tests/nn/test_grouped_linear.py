"""GroupedLinear equals linear layers of their own, group by group, and compiles for every recipe."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
import torch.utils.checkpoint
from modules import assert_equal
from recipes import DEVICE, EMULATE, QUANTIZED, RECIPES, kinds
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

import narrowcast as nc
from narrowcast.testing import assert_close

K, N = 48, 80  # not multiples of every block size
SPLITS = [24, 0, 9, 40]
GROUPS = len(SPLITS)
FORMS_OF_WEIGHTS = pytest.mark.parametrize("single", [False, True], ids=["per_group", "single"])
CPU_ONLY = pytest.mark.skipif(DEVICE != "cpu", reason="the order of sums within a GEMM is the CPU's only")

DETERMINISTIC = dict(RECIPES) | {
    "nvfp4": nc.recipe.NVFP4BlockScaling(disable_stochastic_rounding=True, emulate=EMULATE)
}


def make_layer(groups: int = GROUPS, **kwargs: Any) -> nc.GroupedLinear:
    torch.manual_seed(1)
    layer = nc.GroupedLinear(groups, K, N, device=DEVICE, **{"params_dtype": torch.bfloat16, **kwargs})
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            if name.startswith("bias"):
                parameter.normal_()
    return layer


def make_input(rows: int = sum(SPLITS), seed: int = 2, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, K, generator=generator).to(DEVICE, dtype).requires_grad_(True)


def linears_of(layer: nc.GroupedLinear) -> list[nc.Linear]:
    """A linear layer per group, with the group's parameters."""
    made = []
    weights, biases = layer._parts_of("weight"), layer._parts_of("bias")
    for group in range(layer.num_gemms):
        dtype = weights[0].dtype
        linear = nc.Linear(K, N, bias=bool(biases), params_dtype=dtype, device=DEVICE)
        with torch.no_grad():
            linear.weight.copy_((weights[0] if len(weights) == 1 else weights)[group])
            if biases:
                linear.bias.copy_((biases[0] if len(biases) == 1 else biases)[group])
        made.append(linear)
    return made


def step(
    layer: Any,
    name: str | nc.recipe.Recipe | None,
    x: Tensor,
    splits: Any,
    forward: Any = None,
    **kwargs: Any,
) -> Tensor:
    recipe = DETERMINISTIC[name] if isinstance(name, str) else name
    with nc.autocast(enabled=recipe is not None, recipe=recipe):
        return (layer if forward is None else forward)(x, splits, **kwargs)


def gradients(y: Tensor, wanted: list[Tensor], **kwargs: Any) -> list[Tensor]:
    return [y.detach(), *torch.autograd.grad(y.float().square().sum(), wanted, **kwargs)]


def run(layer: Any, name: Any, x: Tensor, splits: Any, forward: Any = None, **kwargs: Any) -> list[Tensor]:
    """Output and gradients; the seed makes stochastic rounding repeat."""
    torch.manual_seed(7)
    y = step(layer, name, x, splits, forward, **kwargs)
    return gradients(y, [t for t in (x, *parameters_of(layer)) if t.requires_grad])


def parameters_of(layer: nc.GroupedLinear) -> list[Tensor]:
    """All weights, then all biases."""
    return [*layer._parts_of("weight"), *layer._parts_of("bias")]


@pytest.mark.covering
@CPU_ONLY
@pytest.mark.parametrize("single", [False, True], ids=["per_group", "single"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("name", RECIPES)
def test_equals_linear_layers(name: str, dtype: torch.dtype, single: bool) -> None:
    layer = make_layer(params_dtype=dtype, single_grouped_parameter=single)
    linears = linears_of(layer)
    for seed in range(2):  # delayed scaling takes its second scale from the first step
        x = make_input(seed=seed, dtype=dtype)
        y, dx, *dw = run(layer, name, x, SPLITS)
        parts = [part.detach().requires_grad_(True) for part in x.split(SPLITS)]
        recipe = DETERMINISTIC[name]
        with nc.autocast(enabled=recipe is not None, recipe=recipe):
            outs = [linear(part) for linear, part in zip(linears, parts)]
        theirs = [
            gradients(out, [part, linear.weight, linear.bias])
            for out, part, linear in zip(outs, parts, linears, strict=True)
        ]
        assert torch.equal(y, torch.cat([g[0] for g in theirs]))
        assert torch.equal(dx, torch.cat([g[1] for g in theirs]))
        wgrad = dw[0] if single else torch.stack(dw[:GROUPS])
        assert torch.equal(wgrad, torch.stack([g[2] for g in theirs]))
        bias_grad = dw[1] if single else torch.stack(dw[GROUPS:])
        expected = torch.stack([g[3] for g in theirs])
        if name == "none":  # F.linear's own gradient sums in another order
            assert torch.allclose(bias_grad.float(), expected.float(), rtol=2e-2, atol=2e-2)
        else:
            assert torch.equal(bias_grad, expected)
        assert (wgrad[SPLITS.index(0)] == 0).all() and wgrad.abs().sum() > 0


@pytest.mark.gpu
@pytest.mark.parametrize("bias", [False, True], ids=["no_bias", "bias"])
@pytest.mark.parametrize("name", RECIPES)
def test_close_to_linear_layers(name: str, bias: bool) -> None:
    """On a GPU the order of sums differs, and scales and bias may be applied after the product was rounded."""
    layer = make_layer(bias=bias)
    linears = linears_of(layer)
    for seed in range(2):
        x = make_input(seed=seed)
        ours = run(layer, name, x, SPLITS)
        parts = [part.detach().requires_grad_(True) for part in x.split(SPLITS)]
        recipe = DETERMINISTIC[name]
        with nc.autocast(enabled=recipe is not None, recipe=recipe):
            outs = [linear(part) for linear, part in zip(linears, parts)]
        wanted = [[part, *linear.parameters()] for part, linear in zip(parts, linears, strict=True)]
        theirs = [gradients(out, tensors) for out, tensors in zip(outs, wanted, strict=True)]
        columns = list(zip(*theirs, strict=True))
        expected = [
            torch.cat(columns[0]),
            torch.cat(columns[1]),
            *(g for column in columns[2:] for g in column),
        ]
        for a, b in zip(ours, expected, strict=True):
            assert_close(a, b, "fp4_flips" if name == "nvfp4" else "fp8_flips")


FORMS: dict[str, Callable[[list[int]], Any]] = {
    "list": lambda splits: splits,
    "host tensor": lambda splits: torch.tensor(splits, dtype=torch.int32),
    "device tensor": lambda splits: torch.tensor(splits, device=DEVICE),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", RECIPES)
def test_forms_of_splits(name: str, form: str) -> None:
    layer, x = make_layer(), make_input()
    expected = run(layer, name, x, SPLITS)
    layer.reset_delayed_scaling()
    assert_equal(run(layer, name, x, FORMS[form](SPLITS)), expected)


@pytest.mark.parametrize("name", RECIPES)
def test_rows_beyond_the_splits_are_zero(name: str) -> None:
    layer = make_layer()
    x = make_input(sum(SPLITS) + 13)
    y, dx, *others = run(layer, name, x, SPLITS)
    assert (y[sum(SPLITS) :] == 0).all() and (dx[sum(SPLITS) :] == 0).all()
    layer.reset_delayed_scaling()
    inner = x.detach()[: sum(SPLITS)].requires_grad_(True)
    expected = run(layer, name, inner, SPLITS)
    assert_equal([y[: sum(SPLITS)], dx[: sum(SPLITS)], *others], expected)


@pytest.mark.parametrize("name", RECIPES)
def test_all_groups_empty(name: str) -> None:
    layer, x = make_layer(), make_input(0)
    y, dx, *others = run(layer, name, x, [0] * GROUPS)
    assert y.shape == (0, N) and dx.shape == (0, K)
    assert all((other == 0).all() for other in others)


@pytest.mark.parametrize("name", RECIPES)
def test_leading_dims(name: str) -> None:
    layer, x = make_layer(2), make_input(48)
    folded = x.detach().view(3, 16, K).requires_grad_(True)
    y, dx, *others = run(layer, name, folded, [20, 28])
    assert y.shape == (3, 16, N)
    layer.reset_delayed_scaling()
    assert_equal([y.view(48, N), dx.view(48, K), *others], run(layer, name, x, [20, 28]))


@pytest.mark.parametrize("name", RECIPES)
def test_return_bias(name: str) -> None:
    layer, x = make_layer(return_bias=True), make_input()
    plain = make_layer(bias=False)
    y, biases = step(layer, name, x, SPLITS)
    assert torch.equal(y, step(plain, name, x, SPLITS))
    assert [b is p for b, p in zip(biases, layer._parts_of("bias"), strict=True)] == [True] * GROUPS


# -- compiled -----------------------------------------------------------------------------------------------------


def compare(
    name: Any,
    splits: Any,
    x_rows: list[int],
    steps: int = 2,
    dynamic: bool | None = None,
    backend: str = "aot_eager",
    **kwargs: Any,
) -> None:
    """Several steps eager and compiled, on copies of one layer."""
    eager = make_layer(**kwargs)
    compiled = copy.deepcopy(eager)
    forward = torch.compile(compiled, fullgraph=True, dynamic=dynamic, backend=backend)
    for index in range(steps):
        x = make_input(x_rows[index % len(x_rows)], seed=index)
        ours = run(compiled, name, x, splits, forward)
        theirs = run(eager, name, x, splits)
        assert_equal(ours, theirs)
        assert ours[0].abs().sum() > 0


@pytest.mark.covering(1)
@pytest.mark.parametrize("single", [False, True], ids=["per_group", "single"])
@pytest.mark.parametrize("name", kinds(RECIPES))
def test_a_list_of_splits_compiled(name: str, single: bool) -> None:
    compare(name, FORMS["list"](SPLITS), [sum(SPLITS)], single_grouped_parameter=single)


@pytest.mark.parametrize("name", ["none", "delayed"])
def test_graph_count(name: str) -> None:
    """One graph whatever the values of a tensor of splits, one more for other token counts, none after."""
    layer = make_layer(2)
    counter = CompileCounterWithBackend("aot_eager")
    forward = torch.compile(layer, fullgraph=True, backend=counter)
    for first in (10, 0, 48):
        splits = torch.tensor([first, 48 - first], device=DEVICE)
        step(layer, name, make_input(48), splits, forward).float().sum().backward()
    assert counter.frame_count == 1
    for rows in range(60, 68):
        splits = torch.tensor([20, rows - 20], device=DEVICE)
        step(layer, name, make_input(rows), splits, forward).float().sum().backward()
    assert counter.frame_count <= 2


def test_the_cache_ends_with_a_parameter() -> None:
    layer, x = make_layer(), make_input()
    step(layer, "current", x, SPLITS, is_first_microbatch=True)
    layer.weight2 = torch.nn.Parameter(torch.zeros_like(layer.weight2))
    y = step(layer, "current", x, SPLITS, is_first_microbatch=False)
    at = slice(SPLITS[0], SPLITS[0] + SPLITS[2])
    assert torch.equal(y[at], layer.bias2.expand_as(y[at]))
    assert torch.equal(y, step(layer, "current", x, SPLITS))


@pytest.mark.covering(1)
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("name", kinds(QUANTIZED))
def test_microbatch_cache(name: str, compiled: bool) -> None:
    layer, x = make_layer(), make_input()
    forward = torch.compile(layer, fullgraph=True, backend="aot_eager") if compiled else layer
    splits = FORMS["device tensor"](SPLITS)
    first = run(layer, name, x, splits, forward, is_first_microbatch=True)
    for flag in (False, None):
        layer.reset_delayed_scaling()
        assert_equal(run(layer, name, x, splits, forward, is_first_microbatch=flag), first)
    layer.load_state_dict(copy.deepcopy(layer.state_dict()))
    layer.reset_delayed_scaling()
    assert_equal(run(layer, name, x, splits, forward, is_first_microbatch=False), first)


@pytest.mark.covering
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("frozen", ["weight", "input", "bias", "weight+bias"])
@pytest.mark.parametrize("name", ["none", "current", "block"])
def test_frozen(name: str, frozen: str, compiled: bool) -> None:
    layer, x = make_layer(), make_input()
    expected = run(layer, name, x, SPLITS)
    kinds = frozen.split("+")
    for kind in kinds:
        for parameter in layer._parts_of(kind) if kind != "input" else []:
            parameter.requires_grad_(False)
    if "input" in kinds:
        x = x.detach()
    kept = [
        g
        for g, kind in zip(expected[1:], ["input", *["weight"] * GROUPS, *["bias"] * GROUPS])
        if kind not in kinds
    ]
    forward = torch.compile(layer, fullgraph=True, backend="aot_eager") if compiled else layer
    assert_equal(run(layer, name, x, SPLITS, forward), [expected[0], *kept])


@pytest.mark.covering(1)
@pytest.mark.parametrize("manager", [torch.no_grad, torch.inference_mode], ids=["no_grad", "inference_mode"])
@pytest.mark.parametrize("name", RECIPES)
def test_no_grad(name: str, manager: Any) -> None:
    layer, x = make_layer(), make_input().detach()
    expected = step(layer, name, x, SPLITS)
    with manager():
        y = step(layer, name, x, SPLITS)
    assert torch.equal(y, expected) and not y.requires_grad


@pytest.mark.parametrize("name", RECIPES)
def test_retain_graph(name: str) -> None:
    layer, x = make_layer(), make_input()
    y = step(layer, name, x, SPLITS)
    wanted = [x, *layer.parameters()]
    results = []
    for retain in (True, False):
        torch.manual_seed(7)
        results.append(gradients(y, wanted, retain_graph=retain))
    assert_equal(*results)


@pytest.mark.parametrize("name", RECIPES)
def test_recompute(name: str) -> None:
    layer, x = make_layer(), make_input()
    splits = FORMS["device tensor"](SPLITS)

    def recomputed(x: Tensor, splits: Tensor) -> Tensor:
        return nc.checkpoint(layer, x, splits)

    results = []
    for function in (layer, recomputed):
        layer.reset_delayed_scaling()
        results.append(run(layer, name, x, splits, function))
    assert_equal(*results)


@pytest.mark.parametrize("override", ["high_precision", "dequantized"])
@pytest.mark.parametrize("name", kinds(["current", "mxfp8", "block", "nvfp4"]))
def test_backward_override(name: str, override: str) -> None:
    recipe = dataclasses.replace(DETERMINISTIC[name], backward_override=override)  # type: ignore[type-var]
    layer, x = make_layer(), make_input()
    theirs = run(layer, recipe, x, SPLITS)
    weights = torch.stack(layer._parts_of("weight")).float()
    expected = [2 * dy.float() @ weight for dy, weight in zip(theirs[0].split(SPLITS), weights, strict=True)]
    relative = (theirs[1].float() - torch.cat(expected)).norm() / torch.cat(expected).norm()
    assert relative < (0.01 if override == "high_precision" else 0.15)


@pytest.mark.parametrize("name", kinds(QUANTIZED))
def test_torch_autocast(name: str) -> None:
    """fp32 parameters under torch.autocast: quantized from fp32, gradients in fp32."""
    layer = make_layer(params_dtype=torch.float32)
    x = make_input(dtype=torch.float32)
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        y, *grads = run(layer, name, x, SPLITS)
    assert y.dtype == torch.bfloat16 and all(grad.dtype == torch.float32 for grad in grads)


# -- parameters ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "single"),
    [
        *((name, True) for name in ("current", "mxfp8", "block", "nvfp4", "delayed")),
        *((name, False) for name in ("mxfp8", "block", "nvfp4", "delayed")),
    ],
)
def test_quantized_parameters(name: str, single: bool) -> None:
    plain = make_layer(single_grouped_parameter=single)
    torch.manual_seed(1)
    with nc.quantized_model_init(recipe=RECIPES[name], preserve_high_precision_init_val=True):
        layer = nc.GroupedLinear(
            GROUPS, K, N, device=DEVICE, params_dtype=torch.bfloat16, single_grouped_parameter=single
        )
    with torch.no_grad():
        for kind, other in zip(layer._parts_of("bias"), plain._parts_of("bias"), strict=True):
            kind.copy_(other)
    held: Any = nc.GroupedTensor if single else nc.QuantizedTensor
    for weight, value in zip(layer._parts_of("weight"), plain._parts_of("weight"), strict=True):
        assert isinstance(weight, held) and isinstance(weight, torch.nn.Parameter)
        assert torch.equal(weight.get_high_precision_init_val().to(DEVICE), value)
        weight.clear_high_precision_init_val()
        assert weight.get_high_precision_init_val() is None
    x = make_input()
    expected = run(plain, name, x, SPLITS)
    assert_equal(run(layer, name, x, SPLITS), expected)
    state = layer.state_dict()
    names = ["weight"] if single else [f"weight{group}" for group in range(GROUPS)]
    assert set(names) < set(state) and all(type(state[name]) is Tensor for name in names)
    other = make_layer()
    other.load_state_dict(state)
    assert torch.equal(other.weight2, state["weight"][2] if single else state["weight2"])
    y = run(layer, None, x, SPLITS)[0]
    assert torch.equal(y, run(other, None, x, SPLITS)[0])


@pytest.mark.parametrize("kind", ["linear", "layernorm_linear", "layernorm_mlp", "grouped_linear"])
def test_a_parameter_cannot_be_a_bare_storage(kind: str) -> None:
    """Of a quantizer that makes bare storages: refused with the reason, before anything is a parameter."""
    internal = nc.Float8CurrentScalingQuantizer(nc.DType.kFloat8E4M3).replace(internal=True)
    makers: dict[str, Any] = {
        "linear": lambda: nc.Linear(K, N, device=DEVICE),
        "layernorm_linear": lambda: nc.LayerNormLinear(K, N, device=DEVICE),
        "layernorm_mlp": lambda: nc.LayerNormMLP(K, N, device=DEVICE),
        "grouped_linear": lambda: nc.GroupedLinear(2, K, N, device=DEVICE, single_grouped_parameter=True),
    }
    with (
        nc.quantized_model_init(recipe=nc.recipe.CustomRecipe(qfactory=lambda role: internal)),
        pytest.raises(RuntimeError, match=r"internal=True.*bare storage.*replace\(internal=False\)"),
    ):
        makers[kind]()


def test_quantized_parameter_of_another_recipe() -> None:
    with nc.quantized_model_init(recipe=RECIPES["current"]):
        layer = nc.GroupedLinear(2, K, N, device=DEVICE, single_grouped_parameter=True)
    with pytest.raises(RuntimeError, match="recipe of quantized_model_init"):
        step(layer, "mxfp8", make_input(dtype=torch.float32), [10, 20])


def test_state_dict_between_both_forms() -> None:
    per_group, single = make_layer(), make_layer(single_grouped_parameter=True)
    with torch.no_grad():
        single.weight.normal_()
        single.bias.normal_()
    given = single.state_dict()
    keys = list(given)
    per_group.load_state_dict(given)
    assert list(given) == keys == ["weight", "bias"]
    assert torch.equal(torch.stack(per_group._parts_of("weight")), single.weight)
    assert torch.equal(torch.stack(per_group._parts_of("bias")), single.bias)
    another = make_layer(single_grouped_parameter=True)
    another.load_state_dict(per_group.state_dict())
    assert torch.equal(another.weight, single.weight) and torch.equal(another.bias, single.bias)
    expected = [f"{kind}{group}" for group in range(GROUPS) for kind in ("weight", "bias")]
    assert list(per_group.state_dict()) == expected
    assert [name for name, _ in per_group.named_parameters()] == expected
    partial = per_group.state_dict()
    del partial["weight3"]
    with pytest.raises(RuntimeError, match='Missing key.*"weight"'):
        another.load_state_dict(partial)


def test_another_number_of_groups_is_told() -> None:
    single = make_layer(2 * GROUPS, single_grouped_parameter=True)
    layer = make_layer()
    before = {name: value.clone() for name, value in layer.state_dict().items()}
    parent = torch.nn.ModuleDict({"experts": make_layer(2 * GROUPS)})
    small = torch.nn.ModuleDict({"experts": make_layer(single_grouped_parameter=True)})
    for strict in (True, False):
        message = r"size mismatch for weight: the checkpoint has one parameter of 8 groups.* this layer has 4 groups"
        with pytest.raises(RuntimeError, match=message):
            layer.load_state_dict(single.state_dict(), strict=strict)
        with pytest.raises(RuntimeError, match="size mismatch for experts.bias: .* of 4 groups.* 8 groups"):
            parent.load_state_dict(small.state_dict(), strict=strict)
    assert all(torch.equal(value, before[name]) for name, value in layer.state_dict().items())
    with pytest.raises(RuntimeError, match=r"size mismatch for weight: .*\[8, 80, 48\].*\[4, 80, 48\]"):
        make_layer(single_grouped_parameter=True).load_state_dict(single.state_dict())


def test_a_dict_with_a_grouped_tensor_loads_into_either_form() -> None:
    with nc.quantized_model_init(recipe=RECIPES["mxfp8"]):
        quantized = make_layer(single_grouped_parameter=True, bias=False)
    assert isinstance(quantized.weight, nc.GroupedTensor)
    for given in (dict(quantized.named_parameters()), {"weight": quantized.weight.detach()}):
        layer = make_layer(bias=False)
        layer.load_state_dict(given)
        expected = quantized.weight.detach().dequantize()
        assert torch.equal(torch.stack(layer._parts_of("weight")), expected)
        assert all(type(part) is torch.nn.Parameter for part in layer._parts_of("weight"))
        quantizer = nc.MXFP8Quantizer(nc.DType.kFloat8E4M3)
        members = {f"weight{group}": quantizer.quantize(own) for group, own in enumerate(expected)}
        for single in (False, True):
            again = make_layer(bias=False, single_grouped_parameter=single)
            again.load_state_dict(members)
            loaded = torch.stack([*again.state_dict().values()]).view(expected.shape)
            assert torch.equal(loaded, torch.stack([member.dequantize() for member in members.values()]))


def test_sharded_parameters_load_in_both_forms(one_rank: Any) -> None:
    """A state dict of one sharded parameter into a layer of several, sharded or not, and back."""
    from torch.distributed.fsdp import fully_shard

    single, several = make_layer(single_grouped_parameter=True), make_layer()
    plain = copy.deepcopy(several)
    for layer in (single, several):
        fully_shard(layer, mesh=one_rank)
    given = single.state_dict()
    assert hasattr(given["weight"], "full_tensor")
    for layer in (several, plain):
        layer.load_state_dict(given)
        made = layer.state_dict()
        for group in range(GROUPS):
            own = made[f"weight{group}"]
            assert hasattr(own, "full_tensor") == (layer is several)
            own = own.full_tensor() if layer is several else own
            assert torch.equal(own, given["weight"].full_tensor()[group])
    with torch.no_grad():
        plain.weight1.zero_()
    for source in (several, plain):
        single.load_state_dict(source.state_dict())
        whole = single.state_dict()["weight"].full_tensor()
        assert bool(whole[1].any()) == (source is several)


@pytest.fixture
def one_rank() -> Iterator[Any]:
    from torch import distributed
    from torch.distributed.device_mesh import init_device_mesh

    backend = "nccl" if DEVICE == "cuda" else "gloo"
    distributed.init_process_group(backend, store=distributed.HashStore(), rank=0, world_size=1)
    yield init_device_mesh(DEVICE, (1,))
    distributed.destroy_process_group()


def test_delayed_state_has_a_slot_per_group() -> None:
    layer = make_layer()
    run(layer, "delayed", make_input(), SPLITS)
    state = layer.state_dict()
    assert state["scale"].shape == (4 * GROUPS,)
    assert state["amax_history"].shape == (4, 4 * GROUPS)
    x_amax = state["amax"][:GROUPS]
    parts = make_input().detach().float().split(SPLITS)
    assert torch.equal(
        x_amax.cpu(), torch.stack([p.abs().amax() if p.numel() else p.new_zeros(()) for p in parts]).cpu()
    )
    other = make_layer()
    other.load_state_dict(layer.state_dict())
    assert_equal(run(other, "delayed", make_input(), SPLITS), run(layer, "delayed", make_input(), SPLITS))


@pytest.mark.parametrize("name", [None, "experts"])
@pytest.mark.parametrize("init_method", [None, torch.nn.init.uniform_], ids=["default", "own"])
def test_weights_are_drawn_from_a_tracker(init_method: Any, name: str | None) -> None:
    """And the numbers of everything else stay where they are."""

    class Tracker:
        forks: ClassVar[list[tuple[Any, ...]]] = []

        @contextlib.contextmanager
        def fork(self, *names: str) -> Iterator[None]:
            self.forks.append(names)
            with torch.random.fork_rng():
                torch.manual_seed(9)
                yield

    torch.manual_seed(1)
    expected = torch.rand(1)
    torch.manual_seed(1)
    layer = nc.GroupedLinear(
        2, K, N, device="cpu", init_method=init_method, get_rng_state_tracker=Tracker, rng_tracker_name=name
    )
    assert torch.equal(torch.rand(1), expected)
    assert Tracker.forks == [() if name is None else (name,)] * 2
    weight = torch.empty(N, K)
    torch.manual_seed(9)
    weight.normal_(0, 0.023) if init_method is None else init_method(weight)
    assert torch.equal(layer.weight0, weight) and torch.equal(layer.weight1, weight)
    with pytest.raises(ValueError, match="without get_rng_state_tracker"):
        nc.GroupedLinear(2, K, N, device="cpu", rng_tracker_name="experts")


def test_meta_device() -> None:
    layer = nc.GroupedLinear(2, K, N, device="meta")
    with pytest.raises(RuntimeError, match="reset_parameters"):
        layer(torch.zeros(4, K), [2, 2])
    layer.reset_parameters()
    assert layer.weight1.is_meta
    layer.to_empty(device=DEVICE)
    weights = layer._parts_of("weight")
    layer.reset_parameters()
    assert all(now is before for now, before in zip(layer._parts_of("weight"), weights, strict=True))
    assert layer.weight1.device.type == DEVICE and layer.weight1.std() > 0
    assert layer.weight0.untyped_storage().data_ptr() == layer.weight1.untyped_storage().data_ptr()


@pytest.mark.parametrize("single", [False, True], ids=["per_group", "single"])
def test_partition_dims(single: bool) -> None:
    column = nc.GroupedLinear(
        2, K, N, bias=False, parallel_mode="column", tp_size=2, single_grouped_parameter=single, device=DEVICE
    )
    row = nc.GroupedLinear(
        2, K, N, bias=False, parallel_mode="row", tp_size=2, single_grouped_parameter=single, device=DEVICE
    )
    for layer, shape, dim in ((column, (N // 2, K), 0), (row, (N, K // 2), 1)):
        for weight in layer._parts_of("weight"):
            assert tuple(weight.shape[-2:]) == shape
            assert weight.partition_dim == dim + single and weight.tensor_model_parallel


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_gemms": 0}, "num_gemms"),
        ({"parallel_mode": "rows"}, "parallel_mode"),
        ({"parallel_mode": "column", "tp_size": 3, "bias": False}, "multiple of tp_size=3"),
        ({"parallel_mode": "column", "tp_size": 2}, "bias"),
    ],
)
def test_arguments_that_cannot_be(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        nc.GroupedLinear(
            **{"num_gemms": 2, "in_features": K, "out_features": N, "device": DEVICE, **arguments}
        )


@pytest.mark.parametrize(
    ("splits", "message"),
    [
        ([10, 20, 30], "3 entries"),
        ([-1, 20], "non-negative"),
        ([40, 20], "at most the 48 rows"),
        (torch.tensor([40, 20]), "at most the 48 rows"),
        (torch.tensor([1.0, 2.0]), "torch.int32"),
        (torch.tensor([[1, 2]]), "torch.int32"),
    ],
    ids=str,
)
def test_splits_that_cannot_be(splits: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_layer(2)(make_input(48), splits)


@pytest.mark.parametrize("splits", [None, 48, [20.0, 28.0], [20, 28.5], ["20", "28"]], ids=str)
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_splits_that_are_no_ints(splits: Any, compiled: bool) -> None:
    layer = make_layer(2)
    forward = torch.compile(layer, fullgraph=True, backend="aot_eager") if compiled else layer
    with pytest.raises((TypeError, torch._dynamo.exc.Unsupported), match="m_splits is .*list of ints"):
        forward(make_input(48), splits)


def test_splits_of_other_integers() -> None:
    layer, x = make_layer(2), make_input(48)
    assert torch.equal(layer(x, list(np.array([20, 28]))), layer(x, (20, 28)))


def test_inputs_that_cannot_be() -> None:
    layer = make_layer(2)
    with pytest.raises(ValueError, match="in_features"):
        layer(torch.zeros(4, K + 1, device=DEVICE, dtype=torch.bfloat16), [2, 2])
    with pytest.raises(TypeError, match="parameters are"):
        layer(torch.zeros(4, K, device=DEVICE), [2, 2])
    quantized = nc.Float8CurrentScalingQuantizer(nc.DType.kFloat8E4M3)(make_input(4).detach())
    with pytest.raises(TypeError, match="plain tensor"):
        layer(quantized, [2, 2])


# -- where results go ---------------------------------------------------------------------------------------------


def filled(*shape: int) -> Tensor:
    return torch.full(shape, torch.nan, dtype=torch.bfloat16, device=DEVICE)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("name", kinds(RECIPES))
def test_results_go_to_buffers(name: str, compiled: bool) -> None:
    """Step after step into the same memory, which starts with nan and has room for rows of no group."""
    layer, rows = make_layer(), sum(SPLITS) + 3
    twin = copy.deepcopy(layer)
    forward = torch.compile(layer, fullgraph=True, backend="aot_eager") if compiled else layer
    out, dgrad_out = filled(rows, N), filled(rows, K)
    for seed in range(2):
        splits = FORMS["device tensor"](SPLITS)
        x = make_input(rows, seed=seed)
        results = run(layer, name, x, splits, forward, out=out, dgrad_out=dgrad_out)
        assert_equal(results, run(twin, name, x, splits))
        assert torch.equal(out, results[0]) and torch.equal(dgrad_out, results[1])
        if not compiled:
            assert results[0].data_ptr() == out.data_ptr() and results[1].data_ptr() == dgrad_out.data_ptr()
    assert not out.requires_grad and out.grad_fn is None


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_buffers_with_leading_dims_and_without_gradients(compiled: bool) -> None:
    layer, x = make_layer(2), make_input(48).detach().view(3, 16, K)
    forward = torch.compile(layer, fullgraph=True, backend="aot_eager") if compiled else layer
    out, dgrad_out = filled(3, 16, N), filled(3, 16, K)
    splits = torch.tensor([20, 28], device=DEVICE)
    expected = run(layer, "block", x.clone().requires_grad_(True), splits)
    results = run(
        layer, "block", x.clone().requires_grad_(True), splits, forward, out=out, dgrad_out=dgrad_out
    )
    assert_equal(results, expected)
    assert torch.equal(out, expected[0]) and torch.equal(dgrad_out, expected[1])
    out, dgrad_out = filled(3, 16, N), filled(3, 16, K)
    with torch.no_grad():
        y = step(layer, "block", x, splits, forward, out=out, dgrad_out=dgrad_out)
    assert torch.equal(y, expected[0]) and torch.equal(out, expected[0]) and dgrad_out.isnan().all()
    step(layer, "block", x, splits, forward, dgrad_out=dgrad_out).float().sum().backward()
    assert dgrad_out.isnan().all()  # nobody asked for the gradient of the input


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_buffers_of_outstanding_forwards(compiled: bool) -> None:
    """Each may have its own; what compiled code saved for the backward is gone once that has written to it."""
    layer = make_layer()
    forward = torch.compile(layer, fullgraph=True, backend="aot_eager") if compiled else layer
    splits, xs = FORMS["device tensor"](SPLITS), [make_input(seed=seed) for seed in range(2)]
    buffers = [filled(sum(SPLITS), K) for _ in xs]
    ys = [step(layer, "current", x, splits, forward, dgrad_out=b) for x, b in zip(xs, buffers, strict=True)]
    for y, x, buffer in zip(ys, xs, buffers, strict=True):
        (dx,) = torch.autograd.grad(y.float().square().sum(), [x], retain_graph=True)
        assert torch.equal(dx, buffer)
    assert not torch.equal(*buffers)
    if compiled:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            ys[0].float().sum().backward()
    else:
        ys[0].float().sum().backward()
        assert torch.equal(xs[0].grad, buffers[0])


@pytest.mark.parametrize(
    ("buffer", "message"),
    [
        (torch.zeros(73, N + 1, dtype=torch.bfloat16), r"out is torch.bfloat16 \(73, 81\) .* \(73, 80\)"),
        (torch.zeros(73 * N, dtype=torch.bfloat16), "the result is"),
        (torch.zeros(73, N), "out is torch.float32"),
        (torch.zeros(73, N, dtype=torch.bfloat16, device="meta"), "on meta"),
        (torch.zeros(N, 73, dtype=torch.bfloat16).t(), "strides.*contiguous"),
        (torch.zeros(73, N, dtype=torch.bfloat16, requires_grad=True), "requires a gradient"),
        (
            nc.Float8CurrentScalingQuantizer(nc.DType.kFloat8E4M3)(torch.ones(73, N, dtype=torch.bfloat16)),
            "QuantizedTensor|Float8Tensor",
        ),
    ],
    ids=["shape", "rank", "dtype", "device", "strides", "grad", "quantized"],
)
def test_buffers_that_cannot_be(buffer: Tensor, message: str) -> None:
    if buffer.device.type != "meta":
        buffer = (
            buffer.to(DEVICE) if not buffer.requires_grad else buffer.detach().to(DEVICE).requires_grad_()
        )
    layer, x = make_layer(), make_input()
    with pytest.raises(ValueError, match=message):
        layer(x, SPLITS, out=buffer)
    with pytest.raises(ValueError, match="dgrad_out"):
        layer(x, SPLITS, dgrad_out=buffer)


def overlapping(of: str, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor]:
    """An input and a buffer (4, K) that share memory in one way or another."""
    memory = torch.zeros(8 * K, dtype=dtype, device=DEVICE)
    inp = memory[: 4 * K].view(4, K)
    return inp, {
        "same": inp,
        "detached": inp.detach(),
        "last row": memory[3 * K : 7 * K].view(4, K),
        "strided input": memory[4 * K :].view(4, K),
    }[of]


@pytest.mark.parametrize("of", ["same", "detached", "last row", "strided input"])
def test_out_that_overlaps_the_input(of: str) -> None:
    layer = nc.GroupedLinear(2, K, K, device=DEVICE, dtype=torch.bfloat16)
    inp, out = overlapping(of)
    if of == "strided input":
        inp = torch.as_strided(inp, (4, K), (2 * K - 1, 1))
    for recipe in (None, RECIPES["current"]):
        with (
            pytest.raises(ValueError, match="out shares memory with inp, .* of its own"),
            nc.autocast(enabled=recipe is not None, recipe=recipe),
        ):
            layer(inp, [2, 2], out=out)
    layer(inp, [2, 2], dgrad_out=out)
    delayed = nc.GroupedLinear(2, K, K, device=DEVICE, dtype=torch.bfloat16, delay_wgrad_compute=True)
    with pytest.raises(ValueError, match="dgrad_out shares memory with inp"):
        delayed(inp, [2, 2], dgrad_out=out)


def test_neighbours_in_memory_do_not_overlap() -> None:
    layer = nc.GroupedLinear(2, K, K, device=DEVICE, dtype=torch.bfloat16)
    memory = torch.randn(8, K, device=DEVICE).bfloat16()
    expected = layer(memory[:4].clone(), [2, 2])
    assert torch.equal(layer(memory[:4], [2, 2], out=memory[4:]), expected)
    layer(memory[:0], [0, 0], out=memory[:0])


def test_out_that_is_the_input_is_refused_in_a_graph() -> None:
    layer = nc.GroupedLinear(2, K, K, device=DEVICE, dtype=torch.bfloat16)

    def in_place(x: Tensor) -> Tensor:
        return layer(x, [2, 2], out=x)

    compiled = torch.compile(in_place, fullgraph=True, backend="aot_eager")
    with pytest.raises((ValueError, torch._dynamo.exc.Unsupported), match="out shares memory with inp"):
        compiled(torch.zeros(4, K, dtype=torch.bfloat16, device=DEVICE))


# -- the weight cache ---------------------------------------------------------------------------------------------


def edit_weight(layer: nc.GroupedLinear) -> None:
    layer._parts_of("weight")[-1].add_(0.1)


def optimizer_step(layer: nc.GroupedLinear) -> None:
    for parameter in layer.parameters():
        parameter.grad = torch.full_like(parameter, 0.5)
    torch.optim.SGD(layer.parameters(), lr=1.0).step()


def load_weight(layer: nc.GroupedLinear) -> None:
    layer.load_state_dict({name: value + 0.1 for name, value in layer.state_dict().items()})


def replace_weight(layer: nc.GroupedLinear) -> None:
    name = "weight" if layer.single_grouped_weight else f"weight{layer.num_gemms - 1}"
    setattr(layer, name, torch.nn.Parameter(getattr(layer, name) + 0.1))


def cast_weight(layer: nc.GroupedLinear) -> None:
    layer.to(torch.float16).to(torch.bfloat16)
    edit_weight(layer)


EDITS, REPLACEMENTS = (edit_weight, optimizer_step), (load_weight, replace_weight, cast_weight)


@pytest.mark.covering
@FORMS_OF_WEIGHTS
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("change", [*EDITS, *REPLACEMENTS])
def test_a_changed_weight_is_never_taken_from_the_cache(change: Any, compiled: bool, single: bool) -> None:
    """Nor for a later microbatch, where the weight was replaced; ``functional/test_kept_weights.py`` has the others."""
    layer = make_layer(bias=False, single_grouped_parameter=single)
    forward = torch.compile(layer, fullgraph=True, backend="aot_eager") if compiled else layer
    x, splits = make_input().detach(), FORMS["device tensor"](SPLITS)
    with torch.no_grad():
        before = step(layer, "current", x, splits, forward, is_first_microbatch=True)
        change(layer)
        fresh = make_layer(bias=False)
        fresh.load_state_dict(layer.state_dict())
        expected = step(fresh, "current", x, splits)
        assert not torch.equal(expected, before)
        if change in REPLACEMENTS:
            later = step(layer, "current", x, splits, forward, is_first_microbatch=False)
            assert torch.equal(later, expected)
        for first in (None, True, False):
            assert torch.equal(
                step(layer, "current", x, splits, forward, is_first_microbatch=first), expected
            )


# -- where weight gradients go ------------------------------------------------------------------------------------


def give_main_grads(layer: nc.GroupedLinear, dtype: torch.dtype = torch.float32, start: float = 0.0) -> None:
    for weight in layer._parts_of("weight"):
        weight.main_grad = torch.full(weight.shape, start, dtype=dtype, device=DEVICE)


def main_grads(layer: nc.GroupedLinear) -> Tensor:
    """(G, N, K), whatever the form of the weights."""
    found = [weight.main_grad.clone() for weight in layer._parts_of("weight")]
    return found[0] if layer.single_grouped_weight else torch.stack(found)


def grads(layer: nc.GroupedLinear, kind: str = "weight") -> Tensor:
    found = [parameter.grad.clone() for parameter in layer._parts_of(kind)]
    single = layer.single_grouped_weight if kind == "weight" else layer.single_grouped_bias
    return found[0] if single else torch.stack(found)


def train(layer: Any, name: Any, x: Tensor, splits: Any, forward: Any = None, **kwargs: Any) -> Tensor:
    """A step whose gradients arrive at the parameters."""
    torch.manual_seed(7)
    y = step(layer, name, x, splits, forward, **kwargs)
    y.float().square().sum().backward()
    return y.detach()


@pytest.mark.covering
@CPU_ONLY
@FORMS_OF_WEIGHTS
@pytest.mark.parametrize("accumulator", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("name", RECIPES)
def test_main_grads_are_those_of_linear_layers(
    name: str, dtype: torch.dtype, accumulator: torch.dtype, single: bool
) -> None:
    layer = make_layer(params_dtype=dtype, single_grouped_parameter=single, fuse_wgrad_accumulation=True)
    give_main_grads(layer, accumulator, 0.5)
    expected = []
    for linear in linears_of(layer):
        linear.fuse_wgrad_accumulation = True
        linear.weight.main_grad = torch.full((N, K), 0.5, dtype=accumulator)
        expected.append(linear)
    for seed in range(2):
        x = make_input(seed=seed, dtype=dtype)
        train(layer, name, x, SPLITS)
        for linear, part in zip(expected, x.detach().split(SPLITS), strict=True):
            train(linear, name, part, None, lambda part, _, linear=linear: linear(part))
    theirs = torch.stack([linear.weight.main_grad for linear in expected])
    assert all(weight.grad is None for weight in layer._parts_of("weight"))
    if name == "none":  # the product is rounded before the sum
        assert_close(main_grads(layer), theirs, "bf16_output")
    else:
        assert torch.equal(main_grads(layer), theirs)
    assert (main_grads(layer)[SPLITS.index(0)] == 0.5).all()


@FORMS_OF_WEIGHTS
@pytest.mark.parametrize("why", ["attribute", "first microbatch"])
def test_main_grads_are_overwritten(why: str, single: bool) -> None:
    layer, x = make_layer(single_grouped_parameter=single, fuse_wgrad_accumulation=True), make_input()
    give_main_grads(layer, start=1e6)
    for weight in layer._parts_of("weight"):
        weight.overwrite_main_grad = why == "attribute"
    train(layer, "current", x, SPLITS, is_first_microbatch=None if why == "attribute" else True)
    once = main_grads(layer)
    assert once.abs().max() < 1e5 and (once[SPLITS.index(0)] == 0).all()
    train(layer, "current", x, SPLITS, is_first_microbatch=False)
    assert torch.equal(main_grads(layer), once if why == "attribute" else once + once)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("how", ["no recipe", "high_precision", "dequantized"])
@pytest.mark.parametrize("delayed", [False, True], ids=["at once", "backward_dw"])
def test_products_are_added_in_fp32(how: str, delayed: bool, compiled: bool) -> None:
    """What an fp32 main_grad is for: many steps of bf16 products, none of them rounded before the sum."""
    recipe = None
    if how != "no recipe":
        recipe = nc.recipe.Float8CurrentScaling(backward_override=how, emulate=EMULATE)
    layer = make_layer(fuse_wgrad_accumulation=True, delay_wgrad_compute=delayed, bias=False)
    linear = nc.Linear(
        K, N, bias=False, params_dtype=torch.bfloat16, device=DEVICE, fuse_wgrad_accumulation=True
    )
    with torch.no_grad():
        linear.weight.copy_(layer.weight0)
    for weight in [*layer.parameters(), linear.weight]:
        weight.main_grad = torch.zeros(N, K, device=DEVICE)
    forward = torch.compile(layer, fullgraph=True, backend="aot_eager") if compiled else layer
    exact = torch.zeros(N, K, dtype=torch.float64, device=DEVICE)
    dy = make_input(sum(SPLITS), seed=5).detach()[:, :1].expand(-1, N) * 1.3
    for seed in range(4):
        x = make_input(seed=seed)
        step(layer, recipe, x, FORMS["device tensor"](SPLITS), forward).backward(dy)
        if delayed:
            layer.backward_dw()
        own = x[: SPLITS[0]].detach()
        step(linear, recipe, own, None, lambda inp, _: linear(inp)).backward(dy[: SPLITS[0]])
        exact += dy[: SPLITS[0]].double().t() @ own.double()
    difference = (layer.weight0.main_grad - linear.weight.main_grad).abs().max()
    assert difference <= 1e-4  # a product rounded to bf16 is off by 0.05
    if how != "dequantized":
        assert torch.allclose(layer.weight0.main_grad.double(), exact, rtol=0, atol=1e-4)


def test_main_grads_that_cannot_be() -> None:
    layer, x = make_layer(fuse_wgrad_accumulation=True, name="experts"), make_input()
    with pytest.raises(RuntimeError, match=r"'weight0' of experts.*main_grad"):
        layer(x, SPLITS)
    give_main_grads(layer)
    layer.weight2.overwrite_main_grad = True
    with pytest.raises(RuntimeError, match="overwrite_main_grad is set on some weights of experts"):
        layer(x, SPLITS)
    layer.weight2.overwrite_main_grad = False
    for wrong in (torch.zeros(K, N), torch.zeros(N, K, dtype=torch.float16)):
        layer.weight1.main_grad = wrong.to(DEVICE)
        with pytest.raises(ValueError, match=r"main_grad of parameter 'weight1' is"):
            layer(x, SPLITS)
    layer.weight1.requires_grad_(False)
    layer(x, SPLITS)


@FORMS_OF_WEIGHTS
@pytest.mark.parametrize("delayed", [False, True])
@pytest.mark.parametrize("zero", [False, True])
def test_placeholder_gradients(zero: bool, delayed: bool, single: bool) -> None:
    options = {"fuse_wgrad_accumulation": True, "delay_wgrad_compute": delayed}
    layer = copy.deepcopy(make_layer(single_grouped_parameter=single, **options))
    give_main_grads(layer)
    for weight in layer._parts_of("weight"):
        weight.grad_added_to_main_grad, weight.zero_out_wgrad = False, zero
    train(layer, "current", make_input(), SPLITS)
    layer.backward_dw()
    for weight in layer._parts_of("weight"):
        assert weight.grad_added_to_main_grad is True
        assert weight.grad is None if delayed else weight.grad.shape == weight.shape
        assert delayed or not zero or not weight.grad.any()
        assert (getattr(weight, "skip_backward_post_hook", False)) is delayed


@pytest.mark.covering
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("delayed", [False, True])
@pytest.mark.parametrize("name", ["none", "current", "block", "nvfp4"])
def test_frozen_groups_in_one_main_grad_buffer(name: str, delayed: bool, compiled: bool) -> None:
    """Views of one allocation, as data-parallel wrappers make; a frozen group has none and is left alone."""
    options = {"fuse_wgrad_accumulation": True}
    reference = make_layer(**options)
    give_main_grads(reference)
    layer = make_layer(delay_wgrad_compute=delayed, **options)
    buffer = torch.zeros(GROUPS, N, K, device=DEVICE)
    for group, weight in enumerate(layer._parts_of("weight")):
        if group == 2:
            weight.requires_grad_(False)
        else:
            weight.main_grad = buffer[group]
    forward = torch.compile(layer, fullgraph=True, backend="aot_eager") if compiled else layer
    for seed in range(2):
        train(reference, name, make_input(seed=seed), SPLITS)
        train(layer, name, make_input(seed=seed), SPLITS, forward)
        layer.backward_dw()
    expected = main_grads(reference)
    assert expected[2].any()
    expected[2] = 0
    assert torch.equal(buffer, expected)
    assert layer.weight2.grad is None and torch.equal(grads(layer, "bias"), grads(reference, "bias"))


@pytest.mark.covering
@FORMS_OF_WEIGHTS
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("fused", [False, True], ids=["grad", "main_grad"])
@pytest.mark.parametrize("name", kinds(RECIPES))
def test_delayed_gradients_are_those_of_the_backward(
    name: str, fused: bool, compiled: bool, single: bool
) -> None:
    """First in, first out, accumulating; the splits may change in place once the backward is done."""
    options = {"single_grouped_parameter": single, "fuse_wgrad_accumulation": fused}
    at_once, delayed = make_layer(**options), make_layer(delay_wgrad_compute=True, **options)
    for layer in (at_once, delayed):
        give_main_grads(layer)
    forward = torch.compile(delayed, fullgraph=True, backend="aot_eager") if compiled else delayed
    splits = torch.tensor(SPLITS, device=DEVICE)
    wanted = main_grads if fused else grads
    after_each = []
    for seed, sizes in enumerate((SPLITS, [0, 30, 30, 5])):
        splits.copy_(torch.tensor(sizes))
        x, y = make_input(seed=seed), make_input(seed=seed)
        ours, theirs = train(delayed, name, x, splits, forward), train(at_once, name, y, splits)
        assert torch.equal(ours, theirs) and torch.equal(x.grad, y.grad)
        after_each.append((wanted(at_once), grads(at_once, "bias")))
    assert all(parameter.grad is None for parameter in delayed.parameters()) and not main_grads(delayed).any()
    calls: list[int] = []
    delayed.register_wgrad_accumulation_and_reduce_hooks(lambda: calls.append(1))
    assert delayed.need_backward_dw()
    for weight, bias in after_each:
        delayed.backward_dw()
        assert torch.equal(wanted(delayed), weight) and torch.equal(grads(delayed, "bias"), bias)
    with pytest.raises(RuntimeError, match="no weight gradient is waiting"):
        delayed.backward_dw()
    assert len(calls) == 2 and not at_once.need_backward_dw()


@pytest.mark.parametrize("name", ["current", "block"])
def test_delayed_gradient_of_a_quantized_parameter(name: str) -> None:
    options = {"device": DEVICE, "params_dtype": torch.bfloat16, "single_grouped_parameter": True}
    found = []
    for delayed in (False, True):
        torch.manual_seed(1)
        with nc.quantized_model_init(recipe=RECIPES[name]):
            layer = nc.GroupedLinear(GROUPS, K, N, delay_wgrad_compute=delayed, **options)
        train(layer, name, make_input(), SPLITS)
        layer.backward_dw()
        found.append(layer.weight.grad)
    assert found[0].any() and torch.equal(*found)


def test_gradients_of_a_quantized_parameter_without_a_recipe() -> None:
    """The gradient goes to main_grad and leaves nothing in grad."""
    with nc.quantized_model_init(recipe=RECIPES["current"]):
        layer = make_layer(single_grouped_parameter=True, fuse_wgrad_accumulation=True)
    give_main_grads(layer)
    train(layer, "none", make_input(), SPLITS)
    assert layer.weight.main_grad.any() and layer.weight.grad is None


@FORMS_OF_WEIGHTS
@pytest.mark.parametrize("name", ["current", "mxfp8", "block", "nvfp4", "custom"])
def test_original_input_is_all_that_is_saved_of_it(name: str, single: bool) -> None:
    x = make_input()
    expected = run(make_layer(single_grouped_parameter=single), name, x, SPLITS)
    layer = make_layer(single_grouped_parameter=single, save_original_input=True)
    saved: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        assert_equal(run(layer, name, x, SPLITS), expected)
    assert any(t.data_ptr() == x.data_ptr() for t in saved)
    assert not any(t.dtype == torch.uint8 and t.numel() == x.numel() for t in saved)


def test_original_input_under_delayed_scaling() -> None:
    layer, x = make_layer(save_original_input=True, name="experts"), make_input()
    with pytest.raises(ValueError, match="save_original_input=True does not work with DelayedScaling"):
        step(layer, "delayed", x, SPLITS)

    def factory(role: nc.QuantizerRole) -> Any:
        return (
            nc.DelayedScalingRequest()
            if role.tensor_type == "input"
            else RECIPES["current"].make_quantizer(role.tensor_type)
        )

    recipe = nc.recipe.CustomRecipe(qfactory=factory)
    with pytest.warns(UserWarning, match="save_original_input is ignored.*experts"):
        train(layer, recipe, x, SPLITS)
    assert layer.weight0.grad.any()


# -- calibration --------------------------------------------------------------------------------------------------


@pytest.mark.covering
@FORMS_OF_WEIGHTS
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_calibration_collects_what_a_step_would(dtype: torch.dtype, compiled: bool, single: bool) -> None:
    """Of every group's input, replacing what was there; the output is the high-precision one."""
    layer, other = (make_layer(params_dtype=dtype, single_grouped_parameter=single) for _ in range(2))
    forward = torch.compile(layer, fullgraph=True, backend="aot_eager") if compiled else layer
    for scale, seed in ((8.0, 0), (1.0, 1)):
        x = make_input(sum(SPLITS) + 5, seed=seed, dtype=dtype).detach() * scale
        with nc.autocast(enabled=False, calibrating=True, recipe=RECIPES["delayed"]):
            y = forward(x, torch.tensor(SPLITS, device=DEVICE))
        assert torch.equal(y, other(x, SPLITS))
    collected, initial = layer.amax.clone(), layer.scale.clone()
    assert not layer.amax_history.any() and not layer.amax[2 * GROUPS :].any()
    step(other, "delayed", x, SPLITS)
    assert torch.equal(collected, other.amax)
    assert (collected > 0).sum() == GROUPS - 1  # all inputs but the empty group's
    nc.renew_delayed_scaling(layer)
    assert torch.equal(layer.amax_history.amax(0), collected)
    assert (layer.scale[:GROUPS] != initial[:GROUPS]).any()


def test_calibration_collects_in_evaluation_without_gradients() -> None:
    layer = make_layer().eval()
    with torch.no_grad(), nc.autocast(enabled=False, calibrating=True, recipe=RECIPES["delayed"]):
        layer(make_input(), SPLITS)
    assert (layer.amax > 0).sum() == GROUPS - 1


def test_calibration_leaves_other_recipes_alone() -> None:
    layer = make_layer()
    with nc.autocast(enabled=False, calibrating=True, recipe=RECIPES["mxfp8"]):
        y = layer(make_input(), SPLITS)
    assert torch.equal(y, layer(make_input(), SPLITS))
    assert layer.amax is None and not any("amax" in name for name in layer.state_dict())


def test_options_add_nothing_to_the_state_dict() -> None:
    layer = make_layer(fuse_wgrad_accumulation=True, delay_wgrad_compute=True, save_original_input=True)
    give_main_grads(layer)
    train(layer, "current", make_input(), SPLITS, is_first_microbatch=True)
    assert set(layer.state_dict()) == set(make_layer().state_dict())
    assert list(layer._fp8_workspaces) == ["weight"] and layer._fp8_workspaces["weight"] is not None
    layer.float()
    assert layer._fp8_workspaces == {"weight": None}


# -- its own recipe -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("name", ["delayed", "current", "mxfp8"])
def test_own_recipe_is_that_of_an_autocast(name: str, compiled: bool) -> None:
    layer, other = make_layer(recipe=DETERMINISTIC[name]), make_layer()
    forward = torch.compile(layer, fullgraph=True, backend="aot_eager") if compiled else layer
    for seed in range(3):
        x, theirs = make_input(seed=seed), make_input(seed=seed)
        y = forward(x, torch.tensor(SPLITS, device=DEVICE))
        ours = gradients(y, [x, *parameters_of(layer)])
        assert_equal(ours, run(other, name, theirs, SPLITS))
    with nc.autocast(enabled=False):
        assert torch.equal(forward(x, torch.tensor(SPLITS, device=DEVICE)), other(x, SPLITS))


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", ["delayed", "current", "block"])
def test_plain_checkpoint(name: str, reentrant: bool) -> None:
    """The recomputation runs in the backward, outside of the autocast that the forward ran in."""
    layer, other = make_layer(), make_layer()
    for seed in range(2):
        x, theirs = make_input(seed=seed), make_input(seed=seed)
        with nc.autocast(recipe=DETERMINISTIC[name]):
            y = torch.utils.checkpoint.checkpoint(layer, x, SPLITS, use_reentrant=reentrant)
        y.float().square().sum().backward()
        train(other, name, theirs, SPLITS)
        assert torch.equal(x.grad, theirs.grad)
        for ours, expected in zip(layer.parameters(), other.parameters(), strict=True):
            assert torch.equal(ours.grad, expected.grad)


@FORMS_OF_WEIGHTS
def test_meta_layer_takes_a_state_dict(single: bool) -> None:
    options = {"recipe": RECIPES["delayed"], "single_grouped_parameter": single}
    layer, x = make_layer(**options), make_input()
    train(layer, "delayed", x, SPLITS)
    meta = nc.GroupedLinear(GROUPS, K, N, device="meta", dtype=torch.bfloat16, **options)
    meta.load_state_dict(layer.state_dict(), assign=True)
    assert not any(tensor.is_meta for tensor in (*meta.parameters(), *meta.buffers()))
    assert torch.equal(meta(x, SPLITS), layer(x, SPLITS))


def test_a_weight_that_is_plain_again_is_quantized() -> None:
    with nc.quantized_model_init(recipe=nc.recipe.MXFP8BlockScaling()):
        layer: Any = nc.GroupedLinear(2, 32, 64, device="cpu", single_grouped_parameter=True)
        bare: Any = nc.GroupedLinear(2, 32, 64, device="meta", single_grouped_parameter=True)
    bare.make_grouped_weights()
    assert type(bare.weight) is torch.nn.Parameter and bare.weight.is_meta
    bare.load_state_dict(layer.state_dict(), assign=True)
    bare.make_grouped_weights(defer_init=True)
    assert type(bare.weight) is torch.nn.Parameter
    bare.make_grouped_weights()
    assert isinstance(bare.weight, nc.GroupedTensor) and bare.weight.requires_grad
    assert torch.equal(bare.weight.dequantize(), layer.weight.dequantize())
    kept = bare.weight
    bare.make_grouped_weights()
    assert bare.weight is kept
    plain: Any = nc.GroupedLinear(2, 32, 64, device="cpu", single_grouped_parameter=True)
    plain.make_grouped_weights()
    assert type(plain.weight) is torch.nn.Parameter


@pytest.mark.parametrize("name", ["delayed", "current", "block"])
def test_few_rows_save_the_quantized_weights(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where reading the weights once more would take long; gradients are the same bits either way."""
    results, saved = [], []
    for limit in (1024, 0):
        monkeypatch.setattr("narrowcast.layers.grouped_layer.FEW_ROWS", limit)
        layer, x, seen = make_layer(single_grouped_parameter=True, bias=False), make_input(), []
        for _ in range(2):  # delayed scaling learns its scales in the first
            with torch.autograd.graph.saved_tensors_hooks(
                lambda t, seen=seen: seen.append(t) or t, lambda t: t
            ):
                y = step(layer, name, x, SPLITS)
            results.append(gradients(y, [x, layer.weight]))
        saved.append(any(t.data_ptr() == layer.weight.data_ptr() for t in seen))
    assert saved == [False, True]
    for first, second in zip(results[:2], results[2:], strict=True):
        assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("weight, bias", [(True, True), (True, False), (False, True)])
def test_parameters_of_groups_are_none_beside_one_for_all(weight: bool, bias: bool) -> None:
    layer = nc.GroupedLinear(2, 32, 48, device="cpu", single_grouped_weight=weight, single_grouped_bias=bias)
    for kind, single in (("weight", weight), ("bias", bias)):
        for group in range(2):
            name = f"{kind}{group}"
            assert name in layer._parameters and (getattr(layer, name) is None) == single
    assert not any(value is None for value in layer.state_dict().values())
    again = nc.GroupedLinear(2, 32, 48, device="cpu", single_grouped_weight=weight, single_grouped_bias=bias)
    again.load_state_dict(layer.state_dict(), strict=True)
    layer(torch.randn(8, 32), [3, 5]).sum().backward()


def test_codes_are_decoded_for_a_layer_in_high_precision() -> None:
    """As a dispatch hands them on."""
    layer = make_layer()
    codes = nc.MXFP8Quantizer(nc.DType.kFloat8E4M3).quantize(
        torch.randn(sum(SPLITS), K, device=DEVICE).bfloat16()
    )
    assert torch.equal(layer(codes, SPLITS), layer(codes.dequantize(), SPLITS))


@pytest.mark.parametrize("rotated", ["input", "grad_output", "weight"])
def test_rotations_that_do_not_cancel_are_refused(rotated: str) -> None:
    def factory(role: nc.QuantizerRole) -> nc.Quantizer:
        return nc.NVFP4Quantizer(with_rht=role.tensor_type == rotated)

    layer, x = make_layer(), make_input().requires_grad_()
    recipe = nc.recipe.CustomRecipe(qfactory=factory, emulate=True)
    with pytest.raises(ValueError, match="with_rht"), nc.autocast(recipe=recipe):
        layer(x, SPLITS)
    with torch.no_grad(), nc.autocast(recipe=recipe):
        layer(x, SPLITS)  # whose products read no rotated data
