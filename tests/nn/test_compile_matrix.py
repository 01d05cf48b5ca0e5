"""Module x recipe x option: compiled with fullgraph=True equals eager, forward and backward, bit for bit.

A row of ``MODULES`` is a module and the options it takes, a row of ``OPTIONS`` is how an option is set and exercised.
A combination that cannot exist is in ``IMPOSSIBLE`` with the error that says why, and must raise it. Every cell runs
its scenario twice, and the second time must compile nothing. As many cells run as ``meetings`` asks for; with
``--full-matrix`` all of them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal

import pytest
import torch
from covering import covering
from recipes import DEVICE, RECIPES
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.torch_version import TorchVersion
from torch.utils.checkpoint import (
    CheckpointPolicy,
    create_selective_checkpoint_contexts,
)

import narrowcast as nc
from narrowcast.recipe import linear_plan
from narrowcast.testing import assert_close

K, N, TOKENS = 48, 80, 40  # not multiples of every block size
DTYPE = torch.bfloat16


@pytest.fixture(autouse=True)
def _small_or_large_weights(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let weights count as large in every second combination of parameters: the backward quantizes them again."""
    parameters = getattr(request.node, "callspec", None)
    if parameters is not None and sum(parameters.indices.values()) % 2:
        monkeypatch.setattr("narrowcast.recipe.plan.SMALL_WEIGHT", 0)


# -- modules --------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class ModuleCase:
    """How to make a module and call it.

    ``build(**constructor arguments)``; ``call(forward, x, **forward arguments)`` returns a tensor or a tuple;
    ``options``: names of the rows of ``OPTIONS`` it takes.
    """

    build: Callable[..., nn.Module]
    options: tuple[str, ...]
    call: Callable[..., Any] = lambda forward, x, **arguments: forward(x, **arguments)
    features: int = K


LINEAR_OPTIONS = (
    "plain",
    "no_bias",
    "return_bias",
    "microbatches",
    "fuse_wgrad_accumulation",
    "fuse_wgrad_accumulation_microbatches",
    "fuse_wgrad_accumulation_dummy_grad",
    "delay_wgrad_compute",
    "delay_wgrad_compute_fused",
    "fp8_output",
    "fp8_grad",
    "quantized_input",
    "quantized_parameters",
    "quantized_parameters_kept_init",
    "quantized_parameters_fused_wgrad",
    "save_original_input",
    "override_high_precision",
    "override_dequantized",
    "frozen_weight",
    "frozen_input",
    "torch_autocast",
    "checkpoint",
    "checkpoint_fused_wgrad",
    "selective_checkpoint",
    "torch_checkpoint",
    "autocast_inside_torch_checkpoint",
    "own_recipe",
    "own_recipe_torch_checkpoint",
    "retain_graph",
    "two_forwards_then_backwards",
    "no_grad",
    "inference_mode",
    "dynamic_tokens",
    "three_dims",
    "meta_device",
    "parameters_split",
    "parameters_split_microbatches",
    "parameters_split_delay_wgrad_compute",
    "parameters_split_fuse_wgrad_accumulation",
    "parameters_split_quantized_parameters",
    "parameters_split_meta_device",
)

# a norm stands in front: there is no quantized input, nor an input that quantizing would need again
NORM_OPTIONS = tuple(
    option
    for option in LINEAR_OPTIONS
    if option not in ("fp8_output", "fp8_grad", "quantized_input", "save_original_input")
)


def without_split(options: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(option for option in options if not option.startswith("parameters_split"))


# its input is quantized group by group, and its output and the gradient of its input stay in high precision
GROUPED_OPTIONS = tuple(
    option for option in without_split(LINEAR_OPTIONS) if option not in ("fp8_output", "fp8_grad")
)


def in_groups(forward: Callable[..., Any], x: Tensor, **arguments: Any) -> Any:
    """Call with splits for the rows there are: an empty group, and rows that belong to none."""
    rows = x.numel() // x.shape[-1]
    return forward(x, torch.tensor([rows // 2, 0, rows // 4], device=DEVICE), **arguments)


class Block(nc.TransformerLayer):
    """A Transformer layer on one sequence (tokens, features), as the cells call a module."""

    def __init__(self, **options: Any) -> None:
        sizes = {"num_gqa_groups": 2, "fuse_qkv_params": True, "qk_norm_type": "RMSNorm"}
        super().__init__(K, N, 4, hidden_dropout=0.0, attention_dropout=0.0, **sizes, **options)

    def forward(self, x: Tensor, **arguments: Any) -> Tensor:
        return super().forward(x[:, None], **arguments)[:, 0]


BLOCK_OPTIONS = (
    "plain",
    "no_grad",
    "microbatches",
    "quantized_parameters",
    "dynamic_tokens",
    "torch_checkpoint",
    "autocast_inside_torch_checkpoint",
    "retain_graph",
    "frozen_weight",
)


MODULES: dict[str, ModuleCase] = {
    "Linear": ModuleCase(functools.partial(nc.Linear, K, N), LINEAR_OPTIONS),
    "LayerNormLinear": ModuleCase(functools.partial(nc.LayerNormLinear, K, N), NORM_OPTIONS),
    "LayerNormMLP-gelu": ModuleCase(
        functools.partial(nc.LayerNormMLP, K, N, activation="gelu"), without_split(NORM_OPTIONS)
    ),
    "LayerNormMLP-swiglu": ModuleCase(
        functools.partial(nc.LayerNormMLP, K, N, activation="swiglu", normalization="RMSNorm"),
        without_split(NORM_OPTIONS),
    ),
    "GroupedLinear": ModuleCase(functools.partial(nc.GroupedLinear, 3, K, N), GROUPED_OPTIONS, in_groups),
    "GroupedLinear(single)": ModuleCase(
        functools.partial(nc.GroupedLinear, 3, K, N, single_grouped_parameter=True),
        GROUPED_OPTIONS,
        in_groups,
    ),
    "TransformerLayer": ModuleCase(Block, BLOCK_OPTIONS),
}


# -- scenarios: what a cell does with a module, eager or compiled ---------------------------------------------------


@dataclasses.dataclass
class Cell:
    """One module under one recipe, and how it is called: ``forward`` is the module itself or compiled.

    ``enters_autocast``: False where the module has the recipe without an autocast around the call.
    """

    case: ModuleCase
    module: nn.Module
    forward: Callable[..., Any]
    recipe: nc.recipe.Recipe | None
    arguments: dict[str, Any]
    enters_autocast: bool = True

    def __call__(self, x: Tensor, **arguments: Any) -> Tensor:
        """The (first) output under the recipe."""
        with under(self.recipe) if self.enters_autocast else contextlib.nullcontext():
            out = self.case.call(self.forward, x, **self.arguments, **arguments)
        return out[0] if isinstance(out, tuple) else out

    def input(self, *lead: int, seed: int = 2) -> Tensor:
        """A leaf with gradient."""
        generator = torch.Generator().manual_seed(seed)
        values = torch.randn(*(lead or (TOKENS,)), self.case.features, generator=generator)
        return values.to(DTYPE).to(DEVICE).requires_grad_(True)

    def gradients(self) -> list[Tensor]:
        """What arrived at the parameters, taken away from them."""
        found: list[Tensor] = []
        for _, parameter in sorted(self.module.named_parameters()):
            grads = (parameter.grad, getattr(parameter, "main_grad", None))
            found.extend(grad.clone() for grad in grads if grad is not None)
            parameter.grad = None
        return found


Scenario = Callable[[Cell], list[Tensor]]


def under(recipe: nc.recipe.Recipe | None) -> nc.autocast:
    return nc.autocast(enabled=recipe is not None, recipe=recipe)


def loss(out: Tensor) -> Tensor:
    plain = out.dequantize() if isinstance(out, nc.QuantizedTensor) else out
    return plain.float().square().sum()


def plain_values(*tensors: Tensor) -> list[Tensor]:
    return [t.detach().dequantize() if isinstance(t, nc.QuantizedTensor) else t.detach() for t in tensors]


def step(cell: Cell, x: Tensor | None = None, **arguments: Any) -> list[Tensor]:
    """Output, input gradient and parameter gradients of one step."""
    x = cell.input() if x is None else x
    out = cell(x, **arguments)
    loss(out).backward()
    return [*plain_values(out, *(() if x.grad is None else (x.grad,))), *cell.gradients()]


def dummy_gradient(cell: Cell) -> list[Tensor]:
    """A step of a data-parallel wrapper: it takes the flag back before each."""
    weights = [p for p in cell.module.parameters() if hasattr(p, "grad_added_to_main_grad")]
    for weight in weights:
        weight.grad_added_to_main_grad = False
    results = step(cell)
    assert weights and all(weight.grad_added_to_main_grad for weight in weights)
    return results


def microbatches(cell: Cell) -> list[Tensor]:
    results: list[Tensor] = []
    for first in (True, False, None):
        results += step(cell, is_first_microbatch=first)
    return results


def delayed_wgrad(cell: Cell) -> list[Tensor]:
    """Two backwards, then both weight gradients; nothing reaches the parameters before."""
    results: list[Tensor] = []
    for seed in (0, 1):
        x = cell.input(seed=seed)
        out = cell(x)
        loss(out).backward()
        results += plain_values(out, x.grad)
    assert all(p.grad is None for p in parameters_of_gemms(cell.module))
    for _ in range(2):
        cell.module.backward_dw()
    return results + cell.gradients()


def weights_of_gemms(module: nn.Module) -> list[nn.Parameter]:
    return [p for name, p in module.named_parameters() if "weight" in name and "layer_norm" not in name]


def parameters_of_gemms(module: nn.Module) -> list[nn.Parameter]:
    return [p for name, p in module.named_parameters() if "layer_norm" not in name]


def quantized_input(cell: Cell) -> list[Tensor]:
    quantizer = nc.Float8CurrentScalingQuantizer(nc.DType.kFloat8E4M3)
    if cell.recipe is not None and not cell.recipe.float8_per_tensor_scaling():
        quantizer = linear_plan(cell.recipe, "", True, True, module_type="linear").input.quantizer
    x = cell.input()
    out = cell(quantizer.quantize(x))
    loss(out).backward()
    return [*plain_values(out, x.grad), *cell.gradients()]


def without_input_gradient(cell: Cell) -> list[Tensor]:
    return step(cell, cell.input().detach())


def under_torch_autocast(cell: Cell) -> list[Tensor]:
    x = cell.input().detach().float().requires_grad_(True)
    with torch.autocast(DEVICE, dtype=DTYPE):
        out = cell(x)
    loss(out).backward()
    return [*plain_values(out, x.grad), *cell.gradients()]


def retain_graph(cell: Cell) -> list[Tensor]:
    x = cell.input()
    out = loss(cell(x))
    results: list[Tensor] = []
    for retain in (True, False):
        torch.manual_seed(7)  # stochastic rounding draws again
        out.backward(retain_graph=retain)
        results.append(x.grad.clone())  # type: ignore[union-attr]
        x.grad = None
    assert torch.equal(*results)
    return results + cell.gradients()


def two_forwards(cell: Cell) -> list[Tensor]:
    xs = [cell.input(seed=seed) for seed in (0, 1)]
    outs = [cell(x) for x in xs]
    for out in reversed(outs):
        loss(out).backward()
    return [*plain_values(*outs, *(x.grad for x in xs)), *cell.gradients()]


def without_grad(manager: Any, cell: Cell) -> list[Tensor]:
    with manager():
        out = cell(cell.input().detach())
    assert not out.requires_grad
    return plain_values(out)


def dynamic_tokens(cell: Cell) -> list[Tensor]:
    results: list[Tensor] = []
    for tokens in range(33, 53, 3):
        x = cell.input(tokens)
        torch._dynamo.mark_dynamic(x, 0)
        results += step(cell, x)
    return results


def three_dims(cell: Cell) -> list[Tensor]:
    return step(cell, cell.input(2, 1, TOKENS // 2))


# -- options --------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Option:
    """How an option is set: constructor and forward arguments, what is done to the module, the recipe or the call.

    ``autocast``: "around" the compiled call, "inside" it and inside what ``wrap`` makes of the module, or none, where
    the module has its "own" recipe. ``graphs``: how many the scenario may compile.
    """

    build: dict[str, Any] = dataclasses.field(default_factory=dict)
    call: dict[str, Any] = dataclasses.field(default_factory=dict)
    scenario: Scenario = step
    prepare: Callable[[nn.Module], None] = lambda module: None
    recipe: Callable[[Any], Any] = lambda recipe: recipe
    wrap: Callable[[Callable[..., Any]], Callable[..., Any]] = lambda forward: forward
    context: Callable[[Any], Any] | None = None
    autocast: Literal["around", "inside", "own"] = "around"
    like: str | None = None
    graphs: int = 1


def give_main_grads(module: nn.Module, dummy: bool = False) -> None:
    for weight in weights_of_gemms(module):
        weight.main_grad = torch.full(weight.shape, 0.5, device=weight.device)
        if dummy:
            weight.grad_added_to_main_grad, weight.zero_out_wgrad = False, True


def freeze_weights(module: nn.Module) -> None:
    for weight in weights_of_gemms(module):
        weight.requires_grad_(False)


def from_meta(module: nn.Module) -> None:
    module.to_empty(device=DEVICE)
    torch.manual_seed(1)
    module.reset_parameters()


def quantized_init(recipe: Any, keep: bool = False) -> Any:
    made = nc.recipe.Float8CurrentScaling() if recipe is None else recipe
    return nc.quantized_model_init(recipe=made, preserve_high_precision_init_val=keep)


def checkpointed(forward: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    def run(*inputs: Tensor, **arguments: Any) -> Any:
        return nc.checkpoint(forward, *inputs, **options, **arguments)

    return run


def torch_checkpointed(forward: Callable[..., Any]) -> Callable[..., Any]:
    """As other libraries recompute: they know of no recipe, and the backward runs outside of any autocast."""

    def run(*inputs: Tensor, **arguments: Any) -> Any:
        return torch.utils.checkpoint.checkpoint(forward, *inputs, use_reentrant=False, **arguments)

    return run


def in_autocast(forward: Callable[..., Any], recipe: Any) -> Callable[..., Any]:
    def run(*inputs: Tensor, **arguments: Any) -> Any:
        with under(recipe):
            return forward(*inputs, **arguments)

    return run


def into_a_consumer(module: nn.Module) -> Callable[..., Any]:
    """The quantized output multiplied by another layer in the same graph, where its gradient is a plain tensor."""
    torch.manual_seed(3)
    module.consumer = nc.Linear(module.out_features, 24, device=DEVICE, params_dtype=DTYPE)

    def run(x: Tensor, **arguments: Any) -> Tensor:
        out = module(x, **arguments)
        return module.consumer(out[0] if isinstance(out, tuple) else out)

    return run


def keep_gemms(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Save what the GEMMs give, compute the quantizations again."""
    return (
        CheckpointPolicy.MUST_SAVE
        if op in (torch.ops.narrowcast.gemm.default, torch.ops.narrowcast.grouped_gemm.default)
        else CheckpointPolicy.PREFER_RECOMPUTE
    )


def with_override(recipe: Any, override: str) -> Any:
    return dataclasses.replace(recipe, backward_override=override)


FUSED, DELAYED = {"fuse_wgrad_accumulation": True}, {"delay_wgrad_compute": True}
SPLIT = {"parameters_split": {"query": 33, "key": 7, "value": N - 40}}
OPTIONS: dict[str, Option] = {
    "plain": Option(),
    "no_bias": Option(build={"bias": False}),
    "return_bias": Option(build={"return_bias": True}),
    "microbatches": Option(scenario=microbatches, graphs=3),
    "fuse_wgrad_accumulation": Option(build=FUSED, prepare=give_main_grads),
    "fuse_wgrad_accumulation_microbatches": Option(
        build=FUSED, prepare=give_main_grads, scenario=microbatches, graphs=3
    ),
    "fuse_wgrad_accumulation_dummy_grad": Option(
        build=FUSED, prepare=functools.partial(give_main_grads, dummy=True), scenario=dummy_gradient
    ),
    "delay_wgrad_compute": Option(build=DELAYED, scenario=delayed_wgrad),
    "delay_wgrad_compute_fused": Option(
        build={**FUSED, **DELAYED}, prepare=give_main_grads, scenario=delayed_wgrad
    ),
    "fp8_output": Option(call={"fp8_output": True}, wrap=into_a_consumer),
    "fp8_grad": Option(call={"fp8_grad": True}),
    "quantized_input": Option(scenario=quantized_input),
    "quantized_parameters": Option(context=quantized_init),
    "quantized_parameters_kept_init": Option(context=functools.partial(quantized_init, keep=True)),
    "quantized_parameters_fused_wgrad": Option(build=FUSED, prepare=give_main_grads, context=quantized_init),
    "save_original_input": Option(build={"save_original_input": True}, like="plain"),
    "override_high_precision": Option(recipe=functools.partial(with_override, override="high_precision")),
    "override_dequantized": Option(recipe=functools.partial(with_override, override="dequantized")),
    "frozen_weight": Option(prepare=freeze_weights),
    "frozen_input": Option(scenario=without_input_gradient),
    "torch_autocast": Option(build={"params_dtype": torch.float32}, scenario=under_torch_autocast),
    "checkpoint": Option(wrap=checkpointed, like="plain"),
    "checkpoint_fused_wgrad": Option(
        build=FUSED, prepare=give_main_grads, wrap=checkpointed, like="fuse_wgrad_accumulation"
    ),
    "selective_checkpoint": Option(
        wrap=functools.partial(
            checkpointed, context_fn=functools.partial(create_selective_checkpoint_contexts, keep_gemms)
        ),
        like="plain",
    ),
    "torch_checkpoint": Option(wrap=torch_checkpointed, like="plain"),
    "autocast_inside_torch_checkpoint": Option(wrap=torch_checkpointed, autocast="inside", like="plain"),
    "own_recipe": Option(autocast="own", like="plain"),
    "own_recipe_torch_checkpoint": Option(wrap=torch_checkpointed, autocast="own", like="plain"),
    "retain_graph": Option(scenario=retain_graph),
    "two_forwards_then_backwards": Option(scenario=two_forwards),
    "no_grad": Option(scenario=functools.partial(without_grad, torch.no_grad)),
    "inference_mode": Option(scenario=functools.partial(without_grad, torch.inference_mode)),
    "dynamic_tokens": Option(scenario=dynamic_tokens),
    "three_dims": Option(scenario=three_dims),
    "meta_device": Option(build={"device": "meta"}, prepare=from_meta),
    "parameters_split": Option(build=SPLIT),
    "parameters_split_microbatches": Option(build=SPLIT, scenario=microbatches, graphs=3),
    "parameters_split_delay_wgrad_compute": Option(build={**SPLIT, **DELAYED}, scenario=delayed_wgrad),
    "parameters_split_fuse_wgrad_accumulation": Option(build={**SPLIT, **FUSED}),
    "parameters_split_quantized_parameters": Option(build=SPLIT, context=quantized_init),
    "parameters_split_meta_device": Option(build={**SPLIT, "device": "meta"}),
}


# -- what cannot exist ----------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Reason:
    """The error of an impossible combination, and which recipes and modules it concerns; of modules, () is all.

    ``compiled``: eager code can.
    """

    recipes: tuple[str, ...]
    error: type[Exception]
    match: str
    modules: tuple[str, ...] = ()
    compiled: bool = False


IMPOSSIBLE: dict[str, tuple[Reason, ...]] = {
    "quantized_input": (
        Reason(
            tuple(name for name in RECIPES if name not in ("mxfp8", "block", "custom")),
            TypeError,
            "GroupedLinear quantizes its input itself",
            ("GroupedLinear", "GroupedLinear(single)"),
        ),
        Reason(
            ("mxfp8", "block", "custom"),
            torch._dynamo.exc.Unsupported,
            "GroupedLinear quantizes its input itself",
            ("GroupedLinear", "GroupedLinear(single)"),
            compiled=True,
        ),
    ),
    "parameters_split_fuse_wgrad_accumulation": (
        Reason(tuple(RECIPES), ValueError, "no parameter has the main_grad of the whole weight"),
    ),
    "parameters_split_quantized_parameters": (
        Reason(tuple(RECIPES), RuntimeError, "parameters_split inside quantized_model_init"),
    ),
    "parameters_split_meta_device": (
        Reason(tuple(RECIPES), RuntimeError, "parameters_split with device='meta'"),
    ),
    "fp8_output": (Reason(("none",), RuntimeError, "fp8_output=True needs a recipe; give the layer one"),),
    "fp8_grad": (Reason(("none",), RuntimeError, "fp8_grad=True needs a recipe; give the layer one"),),
    "save_original_input": (Reason(("delayed",), ValueError, "does not work with DelayedScaling"),),
    "override_high_precision": (
        Reason(("delayed",), ValueError, "DelayedScaling takes no backward_override"),
        Reason(("none",), TypeError, "dataclass"),  # the override is a field of the recipe, and there is none
    ),
    "override_dequantized": (
        Reason(("delayed",), ValueError, "DelayedScaling takes no backward_override"),
        Reason(("none",), TypeError, "dataclass"),
    ),
}


def reason_against(module: str, recipe: str, option: str) -> Reason | None:
    reasons = (
        reason
        for reason in IMPOSSIBLE.get(option, ())
        if recipe in reason.recipes and module in (reason.modules or MODULES)
    )
    return next(reasons, None)


# -- the matrix -----------------------------------------------------------------------------------------------------


def make_cell(
    module: str, recipe: str, option: Option, compile: Callable[..., Any] = lambda forward: forward
) -> Cell:
    case = MODULES[module]
    chosen = option.recipe(RECIPES[recipe])
    torch.manual_seed(1)
    arguments = {"device": DEVICE, "params_dtype": DTYPE, **option.build}
    if option.context is None:
        made = case.build(**arguments)
    else:
        with option.context(chosen):
            made = case.build(**arguments)
    option.prepare(made)
    if option.autocast == "own":
        made.recipe = chosen
    forward = in_autocast(made, chosen) if option.autocast == "inside" else made
    return Cell(case, made, compile(option.wrap(forward)), chosen, option.call, option.autocast == "around")


def run_twice(cell: Cell, option: Option, between: Callable[[], None] = lambda: None) -> list[Tensor]:
    results: list[Tensor] = []
    for _ in range(2):
        torch.manual_seed(7)
        results += option.scenario(cell)
        between()
    return results


def assert_equal(ours: list[Tensor], theirs: list[Tensor]) -> None:
    assert len(ours) == len(theirs) and any(t.float().abs().sum() > 0 for t in theirs)
    for a, b in zip(ours, theirs, strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype
        assert torch.equal(a, b), f"differ by {(a.float() - b.float()).abs().max()}"


CELLS = [
    (module, recipe, option)
    for module, case in MODULES.items()
    for option in case.options
    for recipe in RECIPES
]


@pytest.mark.parametrize(
    ("module", "recipe", "option"), [cell for cell in CELLS if reason_against(*cell)], ids=str
)
def test_impossible(module: str, recipe: str, option: str) -> None:
    reason, row = reason_against(module, recipe, option), OPTIONS[option]
    assert reason is not None
    compiler = functools.partial(torch.compile, backend="eager", fullgraph=True)
    with pytest.raises(reason.error, match=reason.match):
        row.scenario(make_cell(module, recipe, row, *[compiler] * reason.compiled))


POSSIBLE = [cell for cell in CELLS if not reason_against(*cell)]
WITHOUT_GRADIENTS = ("no_grad", "inference_mode")
# nothing that changes what is outside compiles there; autocast says so, and what works
CHECKPOINT_REFUSES_MUTATION = TorchVersion(torch.__version__) < "2.13"


# modules that share their class, and recipes whose quantizers have no state and scale blocks
KINDS = {
    **dict.fromkeys(("LayerNormMLP-gelu", "LayerNormMLP-swiglu"), "mlp"),
    **dict.fromkeys(("GroupedLinear", "GroupedLinear(single)"), "grouped"),
    **dict.fromkeys(("mxfp8", "block", "nvfp4", "custom"), "blocks"),
}


def meetings(module: str, recipe: str, option: str) -> tuple[Any, ...]:
    """What a cell brings together: every such meeting is in a cell that runs."""
    without_gradients, scenario = option in WITHOUT_GRADIENTS, OPTIONS[option].scenario
    every = ((module, scenario), (recipe, scenario), (KINDS.get(module, module), option))
    if without_gradients:
        return every
    return *every, (KINDS.get(recipe, recipe), option), (module, recipe, without_gradients)


CHOSEN = covering([meetings(*cell) for cell in POSSIBLE], 1)


@pytest.mark.parametrize(
    ("module", "recipe", "option"),
    [
        pytest.param(*cell, id="-".join(cell), marks=() if index in CHOSEN else pytest.mark.requested)
        for index, cell in enumerate(POSSIBLE)
    ],
)
def test_cell(module: str, recipe: str, option: str) -> None:
    """Forward and backward, so that every module is trained under every recipe; or without gradients."""
    compare_compiled_with_eager(module, recipe, option)


def compare_compiled_with_eager(module: str, recipe: str, option: str) -> None:
    row = OPTIONS[option]
    counter = CompileCounterWithBackend("aot_eager")
    compiled = functools.partial(torch.compile, fullgraph=True, backend=counter)
    theirs = run_twice(make_cell(module, recipe, row), row)
    frames: list[int] = []
    cell = make_cell(module, recipe, row, compiled)
    if option == "autocast_inside_torch_checkpoint" and CHECKPOINT_REFUSES_MUTATION:
        with pytest.raises(
            RuntimeError, match=r"give the layers their own recipe .* or enter autocast around"
        ):
            row.scenario(cell)
        return
    ours = run_twice(cell, row, lambda: frames.append(counter.frame_count))
    assert_equal(ours, theirs)
    assert frames[0] <= row.graphs, f"{frames[0]} graphs, at most {row.graphs}"
    assert frames[1] == frames[0], "compiled again in the steady state"
    if row.like is not None:
        assert_equal(ours, run_twice(make_cell(module, recipe, OPTIONS[row.like]), OPTIONS[row.like]))


def training_run(cell: Cell, between: Callable[[], None] = lambda: None) -> list[Tensor]:
    """Steps and evaluations, with weights quantized for each, for the first microbatch and kept for later ones."""
    results: list[Tensor] = []
    for _ in range(2):
        torch.manual_seed(7)
        for first in (None, True, False):
            results += step(cell, is_first_microbatch=first)
            with torch.no_grad():
                results += plain_values(cell(cell.input(), is_first_microbatch=first))
        between()
    return results


@pytest.mark.covering(1)
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("module", [name for name in MODULES if name != "TransformerLayer"])
def test_training_run(module: str, recipe: str) -> None:
    """At most one graph per {grad on or off, first or later microbatch or neither}, however often they alternate, and
    one more for other token counts."""
    counter = CompileCounterWithBackend("aot_eager")
    compiled = functools.partial(torch.compile, fullgraph=True, backend=counter)
    frames: list[int] = []
    cell = make_cell(module, recipe, OPTIONS["plain"], compiled)
    ours = training_run(cell, lambda: frames.append(counter.frame_count))
    assert_equal(ours, training_run(make_cell(module, recipe, OPTIONS["plain"])))
    assert frames[0] <= 6 and frames[1] == frames[0], frames
    for tokens in range(33, 53, 3):
        step(cell, cell.input(tokens))
    assert counter.frame_count <= frames[0] + 1


INDUCTOR_OPTIONS = (
    "fuse_wgrad_accumulation",
    "delay_wgrad_compute",
    "fp8_output",
    "save_original_input",
    "checkpoint",
)


INDUCTOR_CELLS = [
    (module, option)
    for module, case in MODULES.items()
    for option in INDUCTOR_OPTIONS
    if option in case.options
]


@pytest.mark.covering(1)
@pytest.mark.inductor
@pytest.mark.parametrize(("module", "option"), INDUCTOR_CELLS, ids=str)
def test_inductor(module: str, option: str) -> None:
    """What depends on how the compiler treats memory: buffers written in the backward, operands kept beyond it."""
    row = OPTIONS[option]
    cell = make_cell(module, "current", row, functools.partial(torch.compile, fullgraph=True))
    ours, theirs = run_twice(cell, row), run_twice(make_cell(module, "current", row), row)
    assert len(ours) == len(theirs)
    for a, b in zip(ours, theirs, strict=True):
        assert_close(a, b, "bf16_output")


def test_every_option_is_taken_by_a_module() -> None:
    taken = {option for case in MODULES.values() for option in case.options}
    assert taken == set(OPTIONS) and set(IMPOSSIBLE) <= taken
