"""LayerNormMLP equals norm, Linear, activation, Linear, bit for bit, eager and compiled, with and without recompute."""

from __future__ import annotations

import copy
import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from modules import (
    TOKENS,
    assert_same,
    check_no_grad,
    check_retained_graph,
    compare_compiled,
    make_input,
    randomized,
    step,
)
from recipes import DEVICE, E4M3, QUANTIZED, RECIPES, kinds
from torch import Tensor, nn

import narrowcast as nc
from narrowcast.autograd import activate
from narrowcast.reference.activation import ACTIVATIONS
from narrowcast.testing import assert_close

PAGE = Path(__file__).parents[2] / "docs" / "modules.md"
H, FFN = 48, 80  # not multiples of every block size


def make_mlp(hidden: int = H, ffn: int = FFN, **kwargs: Any) -> nc.LayerNormMLP:
    torch.manual_seed(1)
    kwargs = {"params_dtype": torch.bfloat16, "activation": "swiglu", **kwargs}
    for option in (
        "init_method",
        "output_layer_init_method",
    ):  # large enough to leave the flat part of activations
        kwargs.setdefault(option, lambda weight: nn.init.normal_(weight, std=0.3))
    return randomized(nc.LayerNormMLP(hidden, ffn, device=DEVICE, **kwargs))


class Composed(nn.Module):
    """The same block made of small modules."""

    def __init__(self, mlp: nc.LayerNormMLP) -> None:
        super().__init__()
        kind = nc.LayerNorm if mlp.norm.normalization == "LayerNorm" else nc.RMSNorm
        dtype, zero_centered = mlp.fc1_weight.dtype, mlp.norm.zero_centered_gamma
        self.norm = kind(mlp.hidden_size, zero_centered_gamma=zero_centered, device=DEVICE, dtype=dtype)
        bias = mlp.fc1_bias is not None
        rows, columns = mlp.fc1_weight.shape
        self.fc1 = nc.Linear(columns, rows, bias, params_dtype=dtype, device=DEVICE)
        self.fc2 = nc.Linear(mlp.ffn_hidden_size, columns, bias, params_dtype=dtype, device=DEVICE)
        self.activation, self.also_norm = mlp.activation, mlp.return_layernorm_output
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                parameter.copy_(getattr(mlp, RENAMED[name]))

    def forward(self, x: Tensor) -> Any:
        normalized = self.norm(x)
        out = self.fc2(activate(self.fc1(normalized), self.activation))
        return (out, normalized) if self.also_norm else out


RENAMED = {
    "norm.weight": "layer_norm_weight",
    "norm.bias": "layer_norm_bias",
    "fc1.weight": "fc1_weight",
    "fc1.bias": "fc1_bias",
    "fc2.weight": "fc2_weight",
    "fc2.bias": "fc2_bias",
}


def compare_composed(mlp: nc.LayerNormMLP, recipe: Any, steps: int = 1, **kwargs: Any) -> None:
    composed = Composed(mlp)
    for index in range(steps):
        x = make_input(mlp.hidden_size, seed=index, **kwargs)
        ours, theirs = step(mlp, x, recipe), step(composed, x, recipe)
        found = {
            "d " + RENAMED.get(name[2:], name[2:]) if name[1] == " " else name: t
            for name, t in theirs.items()
        }
        assert_same(ours, {name: found[name] for name in ours})
        assert len(ours) == len(theirs)


@pytest.mark.covering
@pytest.mark.parametrize("checkpoint", [False, True], ids=["save", "recompute"])
@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
@pytest.mark.parametrize("name", RECIPES)
def test_equals_the_small_modules(name: str, activation: str, checkpoint: bool) -> None:
    compare_composed(make_mlp(activation=activation, checkpoint=checkpoint), RECIPES[name], steps=3)


@pytest.mark.parametrize("name", ["none", "delayed", "mxfp8"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_every_activation(activation: str, name: str) -> None:
    mlp = make_mlp(activation=activation, normalization="RMSNorm", zero_centered_gamma=True)
    compare_composed(mlp, RECIPES[name], steps=2)


def test_the_page_lists_the_thirteen_activations() -> None:
    (row,) = (line for line in PAGE.read_text().splitlines() if line.startswith("| `activation` |"))
    plain, gated = (set(re.findall(r"`(\w+)`", part)) - {"activation"} for part in row.split("gated:"))
    assert plain | gated == set(ACTIVATIONS) and len(ACTIVATIONS) == 13
    assert gated == {name for name in ACTIVATIONS if make_mlp(activation=name).fc1_weight.shape[0] == 2 * FFN}


@pytest.mark.parametrize("name", ["none", "current"])
def test_activation_params(name: str) -> None:
    mlp = make_mlp(activation="clamped_swiglu", activation_params={"limit": 0.25, "glu_linear_offset": 0.5})
    assert mlp.activation.parameters == (0.25, 1.702, 0.5)
    compare_composed(mlp, RECIPES[name])
    default = step(make_mlp(activation="clamped_swiglu"), make_input(H), RECIPES[name])
    assert not torch.equal(step(mlp, make_input(H), RECIPES[name])["out0"], default["out0"])


@pytest.mark.parametrize("checkpoint", [False, True], ids=["save", "recompute"])
@pytest.mark.parametrize("name", RECIPES)
def test_gradient_of_the_returned_norm_output_counts(name: str, checkpoint: bool) -> None:
    compare_composed(make_mlp(return_layernorm_output=True, checkpoint=checkpoint), RECIPES[name])


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_other_dtypes(name: str, dtype: torch.dtype) -> None:
    compare_composed(make_mlp(params_dtype=dtype), RECIPES[name], dtype=dtype)


@pytest.mark.parametrize("override", ["high_precision", "dequantized"])
@pytest.mark.parametrize("kind", kinds(["current", "mxfp8", "block", "nvfp4"]))
def test_backward_override(kind: str, override: str) -> None:
    recipe = dataclasses.replace(RECIPES[kind], backward_override=override)  # type: ignore[type-var]
    compare_composed(make_mlp(), recipe)
    compare_composed(make_mlp(checkpoint=True), recipe)


@pytest.mark.parametrize("name", QUANTIZED)
def test_mixed_override_of_a_norm_that_is_frozen(name: str) -> None:
    """Nothing in front of fc1 wants a gradient: fc1 has no dgrad, the norm no backward."""
    mlp, x = make_mlp(), make_input(H)
    everything = step(mlp, x, RECIPES[name])
    mlp.layer_norm_weight.requires_grad_(False)
    mlp.layer_norm_bias.requires_grad_(False)
    results = step(mlp, x.detach(), RECIPES[name])
    assert results.keys() == everything.keys() - {"d input", "d layer_norm_weight", "d layer_norm_bias"}
    if name not in ("delayed", "nvfp4"):  # scales move between the steps; other random bits
        assert_same(results, {key: everything[key] for key in results})


def test_is_torchs_block_in_high_precision() -> None:
    mlp = make_mlp(params_dtype=torch.float32, activation="silu", normalization="RMSNorm")
    x = make_input(H, dtype=torch.float32)
    hidden = F.silu(F.linear(F.rms_norm(x, (H,), mlp.layer_norm_weight, 1e-5), mlp.fc1_weight, mlp.fc1_bias))
    expected = F.linear(hidden, mlp.fc2_weight, mlp.fc2_bias)
    assert_close(mlp(x).detach(), expected.detach(), "fp32_sum_order")


@pytest.mark.covering
@pytest.mark.parametrize("checkpoint", [False, True], ids=["save", "recompute"])
@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("lead", [(1,), (0,), (3, 5), (2, 0, 4)], ids=str)
@pytest.mark.parametrize(("hidden", "ffn"), [(48, 80), (5, 3), (130, 1), (1, 17)])
def test_any_shape(name: str, lead: tuple[int, ...], hidden: int, ffn: int, checkpoint: bool) -> None:
    mlp, x = make_mlp(hidden, ffn, checkpoint=checkpoint), make_input(hidden, *lead)
    ours, theirs = step(mlp, x, RECIPES[name]), step(Composed(mlp), x, RECIPES[name])
    assert ours["out0"].shape == ours["d input"].shape == x.shape
    for key, value in theirs.items():
        key = "d " + RENAMED.get(key[2:], key[2:]) if key[1] == " " else key
        assert torch.equal(ours[key], value), key


# -- compiled ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", kinds(RECIPES))
def test_recomputation_compiled(name: str) -> None:
    compare_compiled(make_mlp(checkpoint=True), H, RECIPES[name], steps=3)


@pytest.mark.inductor
def test_recomputation_under_inductor() -> None:
    compare_compiled(make_mlp(checkpoint=True), H, RECIPES["delayed"], backend="inductor")


@pytest.mark.parametrize("name", ["none", "delayed"])
def test_compiled_with_dynamic_shapes(name: str) -> None:
    mlp = make_mlp(activation="gelu", return_layernorm_output=True, return_bias=True)
    compare_compiled(mlp, H, RECIPES[name], steps=3, dynamic=True)


@pytest.mark.parametrize("name", kinds(["delayed", "mxfp8"]))
def test_recomputation_compiled_with_dynamic_shapes(name: str) -> None:
    compare_compiled(make_mlp(checkpoint=True), H, RECIPES[name], steps=3, dynamic=True)


@pytest.mark.parametrize(
    "activation",
    [
        pytest.param(name, marks=() if name in ("srelu", "geglu", "situ_glu") else pytest.mark.requested)
        for name in sorted(set(ACTIVATIONS) - {"gelu", "swiglu"})
    ],
)
def test_every_activation_compiled(activation: str) -> None:
    compare_compiled(make_mlp(activation=activation), H, RECIPES["current"], steps=1)


@pytest.mark.parametrize("name", ["none", "current"])
@pytest.mark.parametrize("changed", ["fc1_weight", "fc2_weight", "fc1_bias", "layer_norm_weight", "input"])
def test_recomputation_notices_what_was_changed(name: str, changed: str) -> None:
    mlp, x = make_mlp(checkpoint=True), make_input(H)
    inp = x * 1
    with nc.autocast(enabled=name != "none", recipe=RECIPES[name]):
        out = mlp(inp)
    with torch.no_grad():
        (inp if changed == "input" else getattr(mlp, changed)).mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.float().sum().backward()


def test_recomputation_with_kept_weights_compiled() -> None:
    calls = [{"is_first_microbatch": first} for first in (True, False, False, True, None)]
    compare_compiled(make_mlp(checkpoint=True), H, RECIPES["delayed"], calls=calls)


@pytest.mark.parametrize("name", QUANTIZED)
def test_cached_weights_give_the_same_numbers(name: str) -> None:
    mlp, x = make_mlp(), make_input(H)
    results = []
    for first in (None, True, False):
        mlp.reset_delayed_scaling()
        results.append(step(mlp, x, RECIPES[name], is_first_microbatch=first))
    assert set(mlp._fp8_workspaces) == {"fc1_weight", "fc2_weight"}
    assert_same(results[1], results[0])
    assert_same(results[2], results[0])


@pytest.mark.covering(1)
@pytest.mark.parametrize("name", ["delayed", "block"])
@pytest.mark.parametrize("checkpoint", [False, True], ids=["save", "recompute"])
@pytest.mark.parametrize(
    "frozen",
    ["fc1_weight", "fc2_weight+fc2_bias", "input", "fc1_weight+fc1_bias+fc2_weight", "all but fc2_bias"],
)
def test_frozen(name: str, frozen: str, checkpoint: bool) -> None:
    mlp, x = make_mlp(checkpoint=checkpoint), make_input(H)
    everything = step(copy.deepcopy(mlp), x, RECIPES[name])
    names = ["input", *dict(mlp.named_parameters())]
    parts = [n for n in names if n != "fc2_bias"] if frozen.startswith("all") else frozen.split("+")
    for part in parts:
        if part == "input":
            x = x.detach()
        else:
            getattr(mlp, part).requires_grad_(False)
    results = step(mlp, x, RECIPES[name])
    assert {f"d {part}" for part in parts} == everything.keys() - results.keys()
    assert_same(results, {key: everything[key] for key in results})


@pytest.mark.parametrize("checkpoint", [False, True], ids=["save", "recompute"])
@pytest.mark.parametrize("name", RECIPES)
def test_retain_graph(name: str, checkpoint: bool) -> None:
    check_retained_graph(make_mlp(checkpoint=checkpoint), make_input(H), RECIPES[name])


@pytest.mark.parametrize("name", RECIPES)
def test_no_grad(name: str) -> None:
    check_no_grad(make_mlp(checkpoint=True), make_input(H), RECIPES[name])


@pytest.mark.parametrize("name", kinds(QUANTIZED))
def test_recomputation_with_quantized_parameters(name: str) -> None:
    with nc.quantized_model_init(recipe=RECIPES[name]):
        mlp = make_mlp(checkpoint=True)
    assert isinstance(mlp.fc1_weight, nc.QuantizedTensor)
    assert isinstance(mlp.fc2_weight, nc.QuantizedTensor)
    assert all(type(value) is Tensor for value in mlp.state_dict().values())
    results = []
    for forward in (mlp, torch.compile(mlp, fullgraph=True, backend="aot_eager")):
        mlp.reset_delayed_scaling()
        results.append(step(mlp, make_input(H), RECIPES[name], forward))
    assert_same(*results)


@pytest.mark.parametrize("trained", ["fc1_bias", "fc2_bias"])
@pytest.mark.parametrize("name", ["delayed", "current", "block"])
def test_few_rows_are_recomputed_with_quantized_parameters(name: str, trained: str) -> None:
    """The GEMM quantizes few rows itself where nothing else reads them, as the first of an input without a gradient."""
    with nc.quantized_model_init(recipe=RECIPES[name]):
        mlp = make_mlp()
    for parameter, tensor in mlp.named_parameters():
        tensor.requires_grad_(parameter == trained)
    x = make_input(H, 7).detach()
    saving, compiled = copy.deepcopy(mlp), copy.deepcopy(mlp)
    mlp.checkpoint = compiled.checkpoint = True
    expected = step(saving, x, RECIPES[name])
    assert f"d {trained}" in expected
    assert_same(step(mlp, x, RECIPES[name]), expected)
    forward = torch.compile(compiled, fullgraph=True, backend="aot_eager")
    assert_same(step(compiled, x, RECIPES[name], forward), expected)


@pytest.mark.parametrize("name", ["delayed", "current"])
def test_torch_autocast(name: str) -> None:
    mlp, x = make_mlp(params_dtype=torch.float32), make_input(H, dtype=torch.float32)
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        results = step(mlp, x, RECIPES[name])
    assert results.pop("out0").dtype == torch.bfloat16
    assert all(t.dtype == torch.float32 and torch.isfinite(t).all() for t in results.values())


# -- residual ----------------------------------------------------------------------------------------------------------


class OfTwoHalves(nn.Module):
    """The block applied to the sum of the input's halves, which the norm computes, or PyTorch."""

    def __init__(self, mlp: nc.LayerNormMLP, in_the_norm: bool = True) -> None:
        super().__init__()
        self.mlp, self.in_the_norm = mlp, in_the_norm

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        added, residual = x.chunk(2)
        if self.in_the_norm:
            return self.mlp(added, residual=residual)
        summed = residual + added
        out = self.mlp(summed)
        return (*out, summed) if isinstance(out, tuple) else (out, summed)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", RECIPES)
def test_residual_is_summed_in_the_norm(name: str, dtype: torch.dtype) -> None:
    """Results are those of a sum in front, bit for bit; the gradient of the sum is rounded once instead of twice."""
    checkpoint, also_norm = name in ("current", "none"), name == "delayed"
    mlp = make_mlp(
        params_dtype=dtype, checkpoint=checkpoint, return_bias=True, return_layernorm_output=also_norm
    )
    x = make_input(H, dtype=dtype)
    ours = step(OfTwoHalves(mlp), x, RECIPES[name])
    mlp.reset_delayed_scaling()
    theirs = step(OfTwoHalves(mlp, in_the_norm=False), x, RECIPES[name])
    assert len([key for key in ours if key.startswith("out")]) == 3 + also_norm
    if dtype == torch.bfloat16:
        grad = ours.pop("d input")
        assert torch.equal(*grad.chunk(2))
        assert_close(grad, theirs.pop("d input"), "bf16_output")
    assert_same(ours, theirs)


@pytest.mark.parametrize(
    ("name", "checkpoint"),
    [
        ("delayed", False),
        *(pytest.param(*case, marks=pytest.mark.requested) for case in [("delayed", True), ("nvfp4", False)]),
    ],
)
def test_residual_compiled(name: str, checkpoint: bool) -> None:
    """Without the norm's output it is part of what test_compile_matrix.py compiles."""
    module = OfTwoHalves(make_mlp(checkpoint=checkpoint, return_layernorm_output=True))
    compare_compiled(module, H, RECIPES[name], dynamic=checkpoint)


@pytest.mark.parametrize("name", ["none", "delayed", "mxfp8"])
@pytest.mark.parametrize("wanted", ["residual", "added"])
def test_residual_alone_has_a_gradient(name: str, wanted: str) -> None:
    mlp = make_mlp()
    added, residual = (half.detach() for half in make_input(H).chunk(2))
    both = added.clone().requires_grad_(), residual.clone().requires_grad_()
    one = residual.requires_grad_() if wanted == "residual" else added.requires_grad_()
    for parameter in mlp.parameters():
        parameter.requires_grad_(False)
    grads = []
    for inputs, of in ((both, both), ((added, residual), (one,))):
        mlp.reset_delayed_scaling()
        with nc.autocast(enabled=name != "none", recipe=RECIPES[name]):
            out, summed = mlp(inputs[0], residual=inputs[1])
        grads.append(torch.autograd.grad((out * summed).float().sum(), of))
    assert torch.equal(grads[1][0], grads[0][0]) and torch.equal(*grads[0])


@pytest.mark.parametrize("name", ["delayed", "current"])
def test_residual_saves_the_sum_instead_of_the_input(name: str) -> None:
    mlp, x = make_mlp(), make_input(H)
    alone = [tensor.nbytes for tensor in saved_by(mlp, x, RECIPES[name])]
    saved = saved_by(mlp, x, RECIPES[name], residual=x.detach())
    assert [tensor.nbytes for tensor in saved] == alone
    assert x.data_ptr() not in {tensor.data_ptr() for tensor in saved}
    with nc.autocast(recipe=RECIPES[name]):
        out, summed = mlp(x, residual=x.detach())
    summed.detach().mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.float().sum().backward()


@pytest.mark.parametrize(
    "residual", [torch.zeros(1, H).bfloat16(), torch.zeros(TOKENS, H)], ids=["row", "fp32"]
)
def test_another_residual_is_told(residual: Tensor) -> None:
    with pytest.raises(ValueError, match="residual is .*add them up before the call"):
        make_mlp()(make_input(H), residual=residual.to(DEVICE))


# -- recomputation -----------------------------------------------------------------------------------------------------


def saved_by(mlp: nc.LayerNormMLP, x: Tensor, recipe: Any, **kwargs: Any) -> list[Tensor]:
    saved: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t), nc.autocast(recipe=recipe):
        mlp(x, **kwargs)
    return saved


@pytest.mark.parametrize("name", QUANTIZED)
def test_recomputation_saves_the_seven_operands(name: str) -> None:
    mlp, x = make_mlp(checkpoint=True), make_input(H)
    saved = saved_by(mlp, x, RECIPES[name])
    operands = {x.data_ptr(), *(p.data_ptr() for p in mlp.parameters())}
    others = [t for t in saved if t.data_ptr() not in operands]
    assert len(saved) - len(others) == 7
    # delayed scaling also names the layer's own scales, which the backward and its recomputation will read
    assert [t.numel() for t in others] == ([4, 4, 4, 4] if name == "delayed" else [])


@pytest.mark.parametrize("name", QUANTIZED)
def test_saves_little_without_recomputation(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Besides parameters: input and fc1's output in high precision, the rest in a byte per element or less."""
    monkeypatch.setattr("narrowcast.recipe.plan.SMALL_WEIGHT", 0)
    mlp, x = make_mlp(128, 256), make_input(128, 128)
    parameters = {parameter.data_ptr() for parameter in mlp.parameters()}
    saved = [t for t in saved_by(mlp, x, RECIPES[name]) if t.data_ptr() not in parameters]
    wide = sum(t.numel() for t in saved if t.dtype == torch.bfloat16)
    assert wide == x.numel() + 128 * 2 * 256
    payload = sum(t.numel() * t.element_size() for t in saved) - 2 * wide
    assert payload <= 1.1 * (x.numel() + 128 * 256)


@pytest.mark.parametrize("backend", [None, "aot_eager", pytest.param("inductor", marks=pytest.mark.inductor)])
def test_recomputation_uses_the_scales_of_its_forward(backend: str | None) -> None:
    """Another step of delayed scaling begins, and the scales move, between a forward and its backward."""
    results = []
    for checkpoint in (False, True):
        mlp = make_mlp(checkpoint=checkpoint)
        forward = mlp if backend is None else torch.compile(mlp, fullgraph=True, backend=backend)
        xs = [make_input(H, seed=seed) for seed in range(3)]
        with torch.no_grad():
            xs[1].mul_(20)
        outs = []
        for x in xs:
            with nc.autocast(recipe=RECIPES["delayed"]):
                outs.append(forward(x))
        grads = [
            torch.autograd.grad(out.float().square().sum(), [x, *mlp.parameters()])
            for out, x in zip(outs, xs)
        ]
        state = list(mlp.buffers())
        assert len(state) == 6
        results.append([*outs, *(g for one in grads for g in one), *(s.clone() for s in state)])
    assert all(torch.equal(a, b) for a, b in zip(*results))


@pytest.mark.parametrize("name", ["current", "delayed", "nvfp4"])
@pytest.mark.parametrize("frozen", [False, True], ids=["trained", "frozen weights"])
def test_compiled_recomputation_saves_no_activation(name: str, frozen: bool) -> None:
    """The partitioner finds nothing to share between the first forward and the recomputation.

    That waits for the gradient: recomputations of several layers could run at the begin of a graph otherwise.
    """
    from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
    from torch._dynamo.backends.common import aot_autograd

    saved: list[list[tuple[int, ...]]] = []
    waits: list[bool] = []

    def forward_compiler(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        names = {node.name for node in graph.graph.nodes if node.op == "placeholder"}
        (outputs,) = next(node for node in graph.graph.nodes if node.op == "output").args
        made = [node for node in outputs if isinstance(node, torch.fx.Node) and node.name not in names]
        saved.append([tuple(node.meta["val"].shape) for node in made])
        return make_boxed_func(graph.forward)

    def backward_compiler(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        after = {node for node in graph.graph.nodes if node.op == "placeholder" and "tangent" in node.name}
        for node in graph.graph.nodes:
            if any(needed in after for needed in node.all_input_nodes):
                after.add(node)
            waits.extend([node in after] if "norm_quantize" in str(node.target) else [])
        return make_boxed_func(graph.forward)

    backend = aot_autograd(
        fw_compiler=forward_compiler,
        bw_compiler=backward_compiler,
        partition_fn=min_cut_rematerialization_partition,
    )
    mlp, x = make_mlp(checkpoint=True), make_input(H, 3 * TOKENS)
    if frozen:
        mlp.fc1_weight.requires_grad_(False)
        mlp.fc2_weight.requires_grad_(False)
    eager = step(copy.deepcopy(mlp), x, RECIPES[name])
    assert_same(step(mlp, x, RECIPES[name], torch.compile(mlp, fullgraph=True, backend=backend)), eager)
    assert waits == [True]
    (shapes,) = saved
    by_token = [shape for shape in shapes if 3 * TOKENS in shape and shape != (3 * TOKENS, H)]
    assert not by_token, shapes
    assert shapes.count((3 * TOKENS, H)) == 1  # the output itself


def rounding_up_and_down(role: nc.QuantizerRole) -> nc.Quantizer:
    return nc.NVFP4Quantizer(stochastic_rounding=role.tensor_type == "input")


def test_recomputation_refuses_operands_that_cannot_be_made_twice() -> None:
    recipe = nc.recipe.CustomRecipe(qfactory=rounding_up_and_down, emulate=True)
    with nc.autocast(recipe=recipe):
        make_mlp()(make_input(H))
        with pytest.raises(ValueError, match="narrowcast.checkpoint"):
            make_mlp(checkpoint=True)(make_input(H))


# -- state and errors --------------------------------------------------------------------------------------------------


def test_parameter_names() -> None:
    names = ["layer_norm_weight", "layer_norm_bias", "fc1_weight", "fc1_bias", "fc2_weight", "fc2_bias"]
    mlp = make_mlp()
    assert list(mlp.state_dict()) == names
    assert mlp.fc1_weight.shape == (2 * FFN, H) and mlp.fc2_weight.shape == (H, FFN)
    step(mlp, make_input(H), RECIPES["mxfp8"])
    assert list(mlp.state_dict()) == names
    assert list(make_mlp(normalization="RMSNorm", bias=False).state_dict()) == names[::2]


def test_state_dict_of_delayed_scaling_continues() -> None:
    mlp, recipe = make_mlp(), RECIPES["delayed"]
    fresh = copy.deepcopy(mlp.state_dict())
    for seed in range(3):
        step(mlp, make_input(H, seed=seed), recipe)
        nc.renew_delayed_scaling(mlp)
    other, x = make_mlp(), make_input(H, seed=9)
    other.load_state_dict(mlp.state_dict())
    assert_same(step(other, x, recipe), step(copy.deepcopy(mlp), x, recipe))
    with pytest.warns(UserWarning, match="scales start anew"):
        mlp.load_state_dict(fresh)  # saved before the first step
    for stage in ("fc1", "fc2"):
        assert not getattr(mlp, f"{stage}_scale").any()


def test_a_copy_takes_part_in_the_update_of_scales() -> None:
    mlp, recipe = copy.deepcopy(make_mlp()), nc.recipe.DelayedScaling(amax_history_len=4, initial_scale="one")
    for seed in range(2):
        step(mlp, make_input(H, seed=seed), recipe)
        nc.renew_delayed_scaling(mlp)
    for stage in ("fc1", "fc2"):
        assert (getattr(mlp, f"{stage}_scale")[::2] != 1).all()


def test_roles_name_both_layers() -> None:
    seen: list[tuple[str, str]] = []

    def factory(role: nc.QuantizerRole) -> nc.Quantizer:
        seen.append((role.name, role.tensor_type))
        return nc.MXFP8Quantizer(E4M3)

    mlp = make_mlp(name="block3")
    step(mlp, make_input(H), nc.recipe.CustomRecipe(qfactory=factory, emulate=True))
    ours = {entry for entry in seen if entry[0].startswith("block3")}
    kinds = ("input", "weight", "grad_output")
    assert ours == {(f"block3.{layer}", kind) for layer in ("fc1", "fc2") for kind in kinds}


def test_calibration_reaches_both_layers() -> None:
    mlp = make_mlp()
    with nc.autocast(enabled=False, calibrating=True, recipe=RECIPES["delayed"]):
        mlp(make_input(H))
    assert mlp.fc1_amax[0] > 0 and mlp.fc2_amax[0] > 0


def test_meta_device() -> None:
    mlp = nc.LayerNormMLP(H, FFN, device="meta", params_dtype=torch.bfloat16)
    with pytest.raises(RuntimeError, match="reset_parameters"):
        mlp(make_input(H))
    mlp.reset_parameters()
    assert {p.device.type for p in mlp.parameters()} == {"meta"}
    mlp.to_empty(device=DEVICE).reset_parameters()
    assert {p.device.type for p in mlp.parameters()} == {DEVICE}
    step(mlp, make_input(H), RECIPES["delayed"])


def test_init_methods() -> None:
    mlp = nc.LayerNormMLP(
        H, FFN, device=DEVICE, init_method=nn.init.ones_, output_layer_init_method=nn.init.zeros_
    )
    assert (mlp.fc1_weight == 1).all() and not mlp.fc2_weight.any()


def test_return_bias() -> None:
    mlp = make_mlp(return_bias=True, return_layernorm_output=True)
    with nc.autocast(recipe=RECIPES["current"]):
        out, bias, normalized = mlp(make_input(H))
    assert bias is mlp.fc2_bias and out.shape == normalized.shape


def test_second_order_is_refused() -> None:
    mlp, x = make_mlp(), make_input(H)
    with nc.autocast(recipe=RECIPES["current"]):
        y = mlp(x)
    (dx,) = torch.autograd.grad(y.float().square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError):
        torch.autograd.grad(dx.float().sum(), x)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"activation": "tanh"}, "tanh.*swiglu"),
        ({"activation_params": {"limit": 1.0}}, "gelu has no parameter 'limit'"),
        ({"activation": "clamped_swiglu", "activation_params": {"slope": 1.0}}, "slope.*limit"),
        ({"normalization": "BatchNorm"}, "BatchNorm"),
        ({"return_layernorm_output_gathered": True}, "sequence_parallel"),
        ({"hidden_size": 0}, "hidden_size is 0"),
        ({"ffn_hidden_size": 0}, "ffn_hidden_size is 0"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_constructor_refuses(kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        nc.LayerNormMLP(**{"hidden_size": H, "ffn_hidden_size": FFN, "device": DEVICE, **kwargs})


def test_forward_refuses() -> None:
    mlp = make_mlp()
    with pytest.raises(ValueError, match="hidden_size=48"):
        mlp(make_input(H + 1))
    with pytest.raises(TypeError, match="torch.autocast"):
        mlp(make_input(H, dtype=torch.float32))
