"""``FusedAdam(weight_codes=)``: a training run with codes that the optimizer writes is the run without, bit for bit."""

from __future__ import annotations

import copy
import gc
from functools import partial
from typing import Any

import pytest
import torch
from recipes import QUANTIZED, kinds
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils._python_dispatch import TorchDispatchMode

import narrowcast as nc
from narrowcast.layers import WeightCodes
from narrowcast.optimizers import FusedAdam

BF16 = torch.bfloat16
STATES: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"exp_avg_dtype": BF16, "exp_avg_sq_dtype": BF16},
    "masters": {"master_weights": True},
    "remainders": {"master_weights": True, "store_param_remainders": True},
    "scaled": {"exp_avg_dtype": torch.uint8},
    "codes": {"exp_avg_dtype": torch.int8},
}


def model_of(recipe: Any, device: str = "cpu", width: int = 48, **options: Any) -> nn.Sequential:
    torch.manual_seed(0)
    options = {"params_dtype": BF16, "device": device, **options}
    model = nn.Sequential(
        nc.Linear(width, 72, bias=False, **options),
        nc.LayerNormMLP(72, 96, **options),
        nc.Linear(72, 16, **options),
    )
    nc.set_recipe(model, recipe)
    return model


class Experts(nn.Module):
    """Groups of rows through two grouped layers of an ``ops.Sequential``, and one of ``nn``."""

    def __init__(self, recipe: Any, device: str, outer: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        options = {"bias": False, "device": device, "single_grouped_weight": True}
        pair = nc.ops.GroupedLinear(3, 48, 256, dtype=BF16, **options), nc.ops.SwiGLU()
        self.pair = nc.ops.Sequential(*pair, nc.ops.GroupedLinear(3, 128, outer, dtype=BF16, **options))
        self.last = nc.GroupedLinear(3, outer, 16, params_dtype=BF16, **options)
        self.splits = torch.tensor([17, 0, 15], device=device)
        nc.set_recipe(self, recipe)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.pair(x, self.splits, self.splits), self.splits)


def optimizer_of(model: nn.Module, written: bool, **options: Any) -> FusedAdam:
    codes = model if written else None
    return FusedAdam(model.parameters(), lr=1e-2, weight_decay=0.01, weight_codes=codes, **options)


def width_of(model: nn.Module) -> int:
    return next(model.parameters()).shape[-1]


def losses(
    model: nn.Module, optimizer: FusedAdam, call: Any = None, steps: int = 4, parts: int = 1
) -> list[float]:
    """Losses of the parts of each step, and of an evaluation after the second."""
    call, found = (model if call is None else call), []
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(1)
    for index in range(steps):
        for _ in range(parts):
            x = torch.randn(32, width_of(model), generator=generator).to(device, BF16)
            loss = (call(x).float() - 1).square().mean()
            loss.backward()
            found.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
        if index == 1:
            with torch.no_grad():
                found.append(model.eval()(x).float().sum().item())
            model.train()
    return found


class WeightBytes(TorchDispatchMode):
    """Counts what operators that quantize weights read and write while it is entered."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.weights = {p.data_ptr() for p in model.parameters() if p.dim() == 2}
        self.moved = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = str(func)
        if "adam_quantize_" in name:  # what it moves beside the step's own
            self.moved += sum(buffer.nbytes for buffer in args[5])
        elif "quantize" in name and isinstance(args[0], Tensor) and args[0].data_ptr() in self.weights:
            self.moved += args[0].nbytes + sum(buffer.nbytes for buffer in out)
        return out


@pytest.mark.parametrize("name", [name for name in QUANTIZED if name not in ("nvfp4", "custom")])
def test_losses_are_those_without(name: str) -> None:
    both = []
    for written in (False, True):
        model = model_of(QUANTIZED[name])
        optimizer = optimizer_of(model, written)
        both.append(losses(model, optimizer))
        assert all(layer.codes_are_written is written for layer in model)
    assert both[0] == both[1]


@pytest.mark.parametrize("outer", [128, 80])
@pytest.mark.parametrize("name", ["current", "delayed", "block", "mxfp8"])
def test_losses_of_groups_are_those_without(name: str, outer: int) -> None:
    """Groups in blocks are written where blocks do not cross groups, others are left to their layers."""
    both = []
    for written in (False, True):
        model = Experts(QUANTIZED[name], "cpu", outer)
        optimizer = optimizer_of(model, written)
        both.append(losses(model, optimizer))
        blocks = name in ("block", "mxfp8")
        expected = [written, written and not (blocks and outer % 128), written and not blocks]
        assert [layer.codes_are_written for layer in (model.pair[0], model.pair[2], model.last)] == expected
    assert both[0] == both[1]


@pytest.mark.parametrize("when", ["written", "changed", "moved"])
@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize("name", kinds(["current", "delayed", "block"]))
def test_losses_of_operations_are_those_without(
    name: str, large: bool, when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of large weights, which are quantized again in the backward, and after codes have become old."""
    if large:
        monkeypatch.setattr("narrowcast.recipe.plan.SMALL_WEIGHT", 0)
    both = []
    for written in (False, True):
        torch.manual_seed(0)
        options = {"dtype": BF16, "device": "cpu"}
        first, last = nc.ops.Linear(48, 72, **options), nc.ops.Linear(72, 16, **options)
        model = nc.ops.Sequential(first, nc.ops.GELU(), last)
        nc.set_recipe(model, QUANTIZED[name])
        optimizer = optimizer_of(model, written)
        with torch.no_grad():
            for p in model.parameters() if when == "changed" else ():
                p.mul_(1.5)
        if when == "moved":
            model.to(BF16)
        both.append(losses(model, optimizer))
    assert both[0] == both[1]


@pytest.mark.parametrize("name", kinds(["delayed", "block"]))
def test_compiled_groups(name: str) -> None:
    torch.compiler.reset()
    weights = []
    for compiled in (False, True):
        torch.manual_seed(0)
        layer = nc.GroupedLinear(2, 32, 128, False, single_grouped_weight=True, recipe=name, device="cpu")
        optimizer = optimizer_of(layer, True)
        call = torch.compile(layer, fullgraph=True, backend="aot_eager") if compiled else layer
        for _ in range(2):
            call(torch.ones(17, 32), torch.tensor([5, 12])).square().sum().backward()
            optimizer.step()
        weights.append(layer.weight.detach())
    assert torch.equal(*weights)


@pytest.mark.parametrize("state", STATES)
def test_every_state_of_the_optimizer(state: str) -> None:
    """What is stored with scales is stepped first, and the weights are quantized after it."""
    both = []
    for written in (False, True):
        model = model_of("current")
        both.append(losses(model, optimizer_of(model, written, **STATES[state]), parts=2))
    assert both[0] == both[1]


@pytest.mark.parametrize("written, bytes_each", [(False, 6), (True, 2)])
def test_bytes_of_weights_in_a_step(written: bool, bytes_each: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers read bf16 and write a code, twice; the optimizer writes two codes of what it has."""
    monkeypatch.setattr("narrowcast.recipe.plan.SMALL_WEIGHT", 0)
    model = model_of("block")
    optimizer = optimizer_of(model, written)
    losses(model, optimizer, steps=1)
    x = torch.randn(32, 48, dtype=BF16, requires_grad=True)
    with WeightBytes(model) as counted:
        model(x).float().sum().backward()
        optimizer.step()
    elements = sum(p.numel() for p in model.parameters() if p.dim() == 2)
    assert counted.moved == pytest.approx(bytes_each * elements, rel=0.01)  # and some scales


def test_parts_of_a_step_read_the_same_codes_under_delayed_scaling() -> None:
    model = model_of("delayed")
    optimizer = optimizer_of(model, True)
    before = [buffer.clone() for buffer in model[0]._fp8_workspaces["weight"][1].rowwise]
    losses(model, optimizer, steps=1, parts=3)
    kept = model[0]._fp8_workspaces["weight"][1].rowwise
    assert not torch.equal(kept[0], before[0])  # the step wrote them


@pytest.mark.parametrize("factor", [7.0, 0.1])
@pytest.mark.parametrize("when", ["before", "written", "unwritten", "stepped"])
@pytest.mark.parametrize("own", [False, True])
def test_scales_fit_weights_that_other_code_has_written(own: bool, when: str, factor: float) -> None:
    """Written before the optimizer was made, or since, as a checkpoint loads them: a step reads no other scale."""
    made = []
    for written in (False, True):
        model = model_of("delayed")
        for layer in model if own else ():
            layer.recipe = nc.recipe.DelayedScaling()
        optimizer = optimizer_of(model, written) if when != "before" else None
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(factor)
        optimizer = optimizer_of(model, written) if optimizer is None else optimizer
        if when == "written":
            optimizer.write_weight_codes()
        elif when == "stepped":  # before any forward
            optimizer.step()
        made.append(losses(model, optimizer, steps=1 if when == "unwritten" else 3))
    assert made[0] == made[1]


def test_a_step_that_fails_leaves_no_codes_of_another_recipe() -> None:
    """Buffers of the new recipe are there before the step has written them."""
    made = []
    for written in (False, True):
        model = model_of("current")
        optimizer = optimizer_of(model, written)
        losses(model, optimizer, steps=1)
        nc.set_recipe(model, "block")
        model[0].weight.grad = torch.zeros_like(model[0].weight).to_sparse()
        with pytest.raises(RuntimeError, match="no sparse gradients"):
            optimizer.step()
        optimizer.zero_grad()
        made.append(losses(model, optimizer, steps=2))
    assert made[0] == made[1]


@pytest.mark.parametrize("name", kinds(["current", "delayed", "block"]))
def test_compiled(name: str) -> None:
    """One graph for all steps, which reads what the optimizer writes."""
    torch.compiler.reset()
    made = []
    for compiled in (False, True):
        model = model_of(QUANTIZED[name])
        graphs = CompileCounterWithBackend("aot_eager")
        call = torch.compile(model, fullgraph=True, backend=graphs) if compiled else None
        made.append(losses(model, optimizer_of(model, True), call))
    assert made[0] == made[1]
    assert graphs.frame_count == 1


def test_blocks_that_run_the_graph_of_another_read_their_own_codes() -> None:
    torch.compiler.reset()
    steps = []
    for compiled in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(*(nc.Linear(32, 32, params_dtype=BF16, device="cpu") for _ in range(3)))
        nc.set_recipe(model, "delayed")
        graphs = CompileCounterWithBackend("aot_eager")
        optimizer = optimizer_of(model, True)
        for block in model if compiled else ():
            block.compile(fullgraph=True, backend=graphs)
        steps.append((losses(model, optimizer), [dict(model.named_buffers())]))
    assert graphs.frame_count == 3  # of inputs without a gradient, of those with one, and of an evaluation
    (plain, (state,)), (found, (other,)) = steps
    assert plain == found
    for name, value in state.items():
        assert torch.equal(value, other[name])


def test_a_weight_that_other_code_changes_is_quantized_again() -> None:
    made = []
    for written in (False, True):
        model = model_of("current")
        optimizer = optimizer_of(model, written)
        losses(model, optimizer, steps=1)
        with torch.no_grad():
            model[0].weight.mul_(2.0)
        made.append(losses(model, optimizer, steps=2))
    assert made[0] == made[1]


def test_what_is_changed_under_a_compiled_model_is_told_and_written_on_demand() -> None:
    torch.compiler.reset()
    model = model_of("current")
    optimizer = optimizer_of(model, True)
    call = torch.compile(model, fullgraph=True, backend="aot_eager")
    losses(model, optimizer, call, steps=1)
    with torch.no_grad():
        model[0].weight.mul_(2.0)
    with pytest.raises(RuntimeError, match=r"write_weight_codes\(\)"):
        call(torch.randn(32, 48, dtype=BF16))
    optimizer.write_weight_codes()
    x = torch.randn(32, 48, dtype=BF16)
    assert torch.equal(call(x), model(x))


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", ["delayed", "current"])
def test_an_evaluation_with_other_weights_reads_no_codes(name: str, compiled: bool) -> None:
    """Averaged ones are swapped in and out, here much larger ones than delayed scaling has seen."""
    torch.compiler.reset()
    made: list[Any] = []
    x = torch.randn(32, 48, dtype=BF16, generator=torch.Generator().manual_seed(3))
    for written in (False, True):
        model = model_of(name)
        optimizer = optimizer_of(model, written)
        call = torch.compile(model, fullgraph=True, backend="aot_eager") if compiled else model
        found = losses(model, optimizer, call, steps=2)
        trained = [p.detach().clone() for p in model.parameters()]
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(40.0)
            model.eval()
            call(x)
            y, exact = model[0](x), x.float() @ model[0].weight.float().t()
            for p, value in zip(model.parameters(), trained, strict=True):
                p.copy_(value)
        if written:
            optimizer.write_weight_codes()
        assert (y - exact).norm() < 0.06 * exact.norm()
        made.append((found, y, losses(model.train(), optimizer, call, steps=2)))
    assert torch.equal(made[0][1], made[1][1]) and made[0][::2] == made[1][::2]


def test_copies_and_layers_whose_optimizer_is_gone_quantize_again() -> None:
    torch.compiler.reset()
    model = model_of("current")
    optimizer = optimizer_of(model, True)
    losses(model, optimizer, steps=1)
    twin = copy.deepcopy(model)
    assert not any(layer.codes_are_written for layer in twin)
    call = torch.compile(twin, fullgraph=True, backend="aot_eager")
    losses(twin, optimizer_of(twin, False), call, steps=3)  # none of these steps raises
    del optimizer
    gc.collect()
    assert not any(layer.codes_are_written for layer in model)
    assert all(kept is None for layer in model for kept in layer._fp8_workspaces.values())


def test_another_recipe_and_loaded_weights() -> None:
    made = []
    for written in (False, True):
        model = model_of("current")
        optimizer = optimizer_of(model, written)
        found = losses(model, optimizer, steps=2)
        state = {name: value.clone() for name, value in model.state_dict().items()}
        nc.set_recipe(model, "block")
        found += losses(model, optimizer, steps=2)
        model.load_state_dict(state)
        made.append([*found, *losses(model, optimizer, steps=2)])
    assert made[0] == made[1]


@pytest.mark.parametrize("compiled", [False, True])
def test_another_recipe_in_a_checkpoint(compiled: bool) -> None:
    """Between the change and a step both the forward and its recomputation quantize the weight."""
    torch.compiler.reset()
    made = []
    for written in (False, True):
        model = model_of("current")
        optimizer = optimizer_of(model, written)
        block = torch.compile(model, fullgraph=True, backend="aot_eager") if compiled else model
        call = partial(nc.checkpoint, block)
        found = losses(model, optimizer, call, steps=1)
        nc.set_recipe(model, "mxfp8")
        made.append([*found, *losses(model, optimizer, call, steps=2, parts=2)])
    assert made[0] == made[1]


@pytest.mark.parametrize("name", ["delayed", "block"])
def test_a_resumed_run_has_the_bits_of_the_uninterrupted_one(name: str) -> None:
    model = model_of(name)
    optimizer = optimizer_of(model, True)
    losses(model, optimizer, steps=3)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    with torch.random.fork_rng():
        torch.manual_seed(5)
        resumed = model_of(name)
    again = optimizer_of(resumed, True)
    resumed.load_state_dict(saved[0])
    again.load_state_dict(saved[1])
    assert losses(resumed, again) == losses(model, optimizer)


def test_a_scaler_that_finds_infinities_changes_nothing() -> None:
    model = model_of("current")
    optimizer = optimizer_of(model, True, capturable=True)
    losses(model, optimizer, steps=1)
    kept = model[0]._fp8_workspaces["weight"][1]
    before = [buffer.clone() for buffer in (*kept.rowwise, *kept.columnwise)]
    model(torch.randn(32, 48, dtype=BF16)).sum().backward()
    optimizer.grad_scale, optimizer.found_inf = torch.tensor(2.0), torch.tensor(1.0)
    optimizer.step()
    for old, new in zip(before, (*kept.rowwise, *kept.columnwise), strict=True):
        assert torch.equal(old, new)
    optimizer.found_inf = torch.tensor(0.0)
    optimizer.step()
    assert not torch.equal(before[0], kept.rowwise[0])


def test_what_is_left_to_layers() -> None:
    """Stored weights, groups and weights in several parameters; without a recipe there is nothing to write."""
    assert WeightCodes(model_of(None)).weights() == []
    assert WeightCodes(nc.GroupedLinear(2, 32, 32, recipe="current", device="cpu")).weights() == []
    parts = nc.Linear(32, 64, parameters_split=("a", "b"), recipe="current", device="cpu")
    assert WeightCodes(parts).weights() == [] and not parts.codes_are_written
    with nc.quantized_model_init(recipe="current"):
        stored = nc.Linear(32, 32, recipe="current", device="cpu")
    assert WeightCodes(stored).weights() == []
    with pytest.raises(TypeError, match="weight_codes"):
        FusedAdam([nn.Parameter(torch.ones(2))], weight_codes=3)
    with pytest.raises(ValueError, match="weight_codes is a model of other parameters"):
        FusedAdam([nn.Parameter(torch.ones(2))], weight_codes=parts)


@pytest.mark.gpu
@pytest.mark.parametrize("groups", [False, True])
@pytest.mark.parametrize("name", ["current", "delayed", "block"])
def test_a_captured_step(name: str, groups: bool) -> None:
    """Replays of a whole step, its optimizer included, are the eager steps, bit for bit."""
    weights = []
    for captured in (False, True):
        model = Experts(QUANTIZED[name], "cuda", 128) if groups else model_of(QUANTIZED[name], "cuda", 64)
        options = {"exp_avg_dtype": BF16, "exp_avg_sq_dtype": BF16, "capturable": True}
        optimizer = optimizer_of(model, captured, **options)
        generator = torch.Generator("cuda").manual_seed(3)
        x = torch.randn(32, width_of(model), device="cuda", dtype=BF16, generator=generator)

        def step(model: Any = model, optimizer: Any = optimizer, x: Tensor = x) -> None:
            (model(x).float() - 1).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for _ in range(3):
                step()
        torch.cuda.synchronize()
        if captured:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                step()
            step = graph.replay  # type: ignore[assignment]
        for _ in range(4):
            step()
        torch.cuda.synchronize()
        weights.append([p.detach().clone() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*weights, strict=True))
