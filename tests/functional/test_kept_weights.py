"""Quantized weights that are kept for later microbatches: reused while the weight is the same, never afterwards."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch._dynamo.testing
import torch.distributed as dist
from modules import LAYERS, Operators, run_layer
from torch import Tensor, nn

import narrowcast as nc
from narrowcast.functional import kept_weights
from narrowcast.recipe import DelayedScaling, Float8CurrentScaling, MXFP8BlockScaling

RECIPES: dict[str, Any] = {"current": Float8CurrentScaling(), "mxfp8": MXFP8BlockScaling()}


def run(layer: Any, x: Tensor, first: Any = None, forward: Any = None) -> Tensor:
    return run_layer(layer, x, forward, is_first_microbatch=first)


def last_weight(layer: nn.Module) -> Tensor:
    """One that is quantized; of parts, not the first."""
    return [parameter for name, parameter in layer.named_parameters() if "weight" in name][-1]


def optimizer_step(weight: Any) -> None:
    weight.grad = torch.ones_like(weight)
    torch.optim.SGD([weight], lr=0.5).step()


@torch.no_grad()
def edit(weight: Any) -> None:
    weight.mul_(2)


def assign_data(weight: Any) -> None:
    weight.data = weight.data * 2


def assign_data_twice(weight: Any) -> None:
    """An allocator gives the first address again."""
    weight.data = weight.data * 2
    weight.data = weight.data * 2


@torch.no_grad()
def set_(weight: Any) -> None:
    weight.set_(weight * 2)


def vector(weight: Any) -> None:
    nn.utils.vector_to_parameters(nn.utils.parameters_to_vector([weight]) * 2, [weight])


def fused_step(weight: Any) -> None:
    """It writes without raising a version."""
    weight.grad = torch.ones_like(weight)
    torch.optim.AdamW([weight], lr=0.5, fused=True).step()


def fused_sgd(weight: Any) -> None:
    weight.grad = torch.ones_like(weight)
    torch.optim.SGD([weight], lr=0.5, fused=True).step()


def step_of_a_master(weight: Any) -> None:
    """As Megatron's distributed optimizer and Apex's master weights do."""
    master = nn.Parameter(weight.detach().clone())
    master.grad = torch.ones_like(master)
    torch.optim.SGD([master], lr=0.5).step()
    weight.data.copy_(master.data)


def write_data(weight: Any) -> None:
    weight.data.mul_(2)


def write_one_element(weight: Any) -> None:
    """The largest, so that a scale of its own amax changes."""
    weight.data.view(-1)[3] = 9.0


def write_numpy(weight: Any) -> None:
    weight.detach().numpy()[...] *= 2


def write_storage(weight: Any) -> None:
    storage = weight.untyped_storage()
    values = torch.empty(0, dtype=weight.dtype).set_(storage)
    storage.copy_((values * 2).untyped_storage())


SEEN_ON_A_CPU = [write_data, write_one_element, write_numpy, write_storage]
LEAVING_A_TRACE = [
    *(optimizer_step, edit, assign_data, assign_data_twice, set_, vector),
    *(fused_step, fused_sgd, step_of_a_master),
]
BYTES = {True: "bytes compared", False: "as on a GPU"}


@pytest.fixture
def compares_bytes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """False: only what leaves a trace is seen, as on a GPU."""
    if not request.param:
        monkeypatch.setattr(kept_weights, "_checksum", lambda weight: None)


in_both_ways = pytest.mark.parametrize("compares_bytes", BYTES, ids=BYTES.values(), indirect=True)


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize(
    ("change", "compares_bytes"),
    [
        *((change, compares) for change in LEAVING_A_TRACE for compares in BYTES),
        *((change, True) for change in SEEN_ON_A_CPU),
    ],
    indirect=["compares_bytes"],
)
def test_a_later_microbatch_sees_a_changed_weight(change: Any, compares_bytes: None, name: str) -> None:
    layer, x = LAYERS[name](recipe=RECIPES["current"]), torch.randn(8, 32)
    before = run(layer, x, True)
    change(last_weight(layer))
    after = run(layer, x, False)
    assert torch.equal(after, run(layer, x)) and not torch.equal(after, before)
    assert torch.equal(run(layer, x, False), after)


@in_both_ways
@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_a_square_weight_that_was_transposed_in_place_is_seen(recipe: Any, compares_bytes: None) -> None:
    layer, x = nc.Linear(32, 32, device="cpu", recipe=recipe), torch.randn(8, 32)
    before = run(layer, x, True)
    layer.weight.data = layer.weight.data.t()
    after = run(layer, x, False)
    assert torch.equal(after, run(layer, x)) and not torch.equal(after, before)


@in_both_ways
def test_another_part_of_the_same_storage_is_seen(compares_bytes: None) -> None:
    """As optimizers hold parameters in one buffer."""
    layer, x = nc.Linear(32, 32, device="cpu", recipe=RECIPES["current"]), torch.randn(8, 32)
    parts = torch.randn(2, 32, 32)
    layer.weight.data = parts[0]
    before = run(layer, x, True)
    layer.weight.data = parts[1]
    after = run(layer, x, False)
    assert torch.equal(after, run(layer, x)) and not torch.equal(after, before)


@in_both_ways
def test_a_transformer_layer_sees_a_fused_step(compares_bytes: None) -> None:
    layer = nc.TransformerLayer(
        32, 64, 2, hidden_dropout=0.0, attention_dropout=0.0, device="cpu", recipe=RECIPES["current"]
    )
    x = torch.randn(4, 2, 32)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=0.5, fused=True)
    before = layer(x, is_first_microbatch=True)
    before.sum().backward()
    optimizer.step()
    after = layer(x, is_first_microbatch=False)
    assert torch.equal(after, layer(x)) and not torch.equal(after, before)


@in_both_ways
@pytest.mark.parametrize("way", ["eager", "compiled", "closure"])
def test_a_step_is_seen_however_it_is_taken(way: str, compares_bytes: None) -> None:
    layer, x = LAYERS["linear"](recipe=RECIPES["current"]), torch.randn(8, 32)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.5, fused=True)
    step = torch.compile(optimizer.step, backend="eager") if way == "compiled" else optimizer.step

    def loss() -> Tensor:
        y = run(layer, x).sum()
        y.backward()
        return y

    for _ in range(4):
        before = run(layer, x, True)
        step(loss) if way == "closure" else (loss(), step())
        after = run(layer, x, False)
        assert torch.equal(after, run(layer, x)) and not torch.equal(after, before)
        assert torch.equal(run(layer, x, False), after)


def test_counting_steps_guards_no_compiled_step() -> None:
    layer, x = LAYERS["linear"](recipe=RECIPES["current"]), torch.randn(8, 32)
    optimizer = nc.optimizers.FusedAdam(layer.parameters(), capturable=True)
    run(layer, x).sum().backward()
    optimizer.step()
    counted = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    step = torch.compile(optimizer.step, backend=counted, fullgraph=True)
    for _ in range(3):
        before = kept_weights._STEPS.count()
        step()
        assert kept_weights._STEPS.count() == before + 1
    assert counted.frame_count == 1


@pytest.mark.parametrize("name", LAYERS)
def test_compiled_code_refuses_a_weight_of_an_untold_write(name: str) -> None:
    layer, x = LAYERS[name](recipe=RECIPES["current"]), torch.randn(8, 32)
    forward = torch.compile(layer, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        for change in (fused_step, step_of_a_master, *SEEN_ON_A_CPU):
            run(layer, x, True, forward)
            change(last_weight(layer))
            with pytest.raises(RuntimeError, match="since is_first_microbatch=True"):
                run(layer, x, False, forward)
            assert torch.equal(run(layer, x, True, forward), run(layer, x))
            assert torch.equal(run(layer, x, False, forward), run(layer, x))


def test_a_write_that_was_told_of_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """What docs/compile.md names for kernels of users on a GPU, where bytes are not compared."""
    monkeypatch.setattr(kept_weights, "_checksum", lambda weight: None)
    layer, x = LAYERS["linear"](recipe=RECIPES["current"]), torch.randn(8, 32)
    before = run(layer, x, True)
    write_data(layer.weight)
    assert torch.equal(run(layer, x, False), before)
    torch.autograd.graph.increment_version(layer.weight)
    assert torch.equal(run(layer, x, False), run(layer, x))


def test_without_a_step_the_same_buffers_serve() -> None:
    layer, x = LAYERS["linear"](recipe=RECIPES["current"]), torch.randn(8, 32)
    run(layer, x, True)
    kept = layer._fp8_workspaces["weight"][1]
    optimizer = torch.optim.AdamW(layer.parameters(), fused=True)
    for _ in range(2):
        run(layer, x, False).sum().backward()
    assert layer._fp8_workspaces["weight"][1] is kept
    optimizer.step()
    run(layer, x, False)
    assert layer._fp8_workspaces["weight"][1] is not kept


@pytest.mark.parametrize("name", LAYERS)
def test_compiled_code_refuses_a_changed_weight(name: str) -> None:
    layer, x = LAYERS[name](recipe=RECIPES["current"]), torch.randn(8, 32, requires_grad=True)
    forward = torch.compile(layer, fullgraph=True, backend="aot_eager")
    expected = [run(layer, x), run(layer, x)]
    ours = [run(layer, x, first, forward) for first in (True, False)]
    assert all(map(torch.equal, ours, expected))
    sum(y.sum() for y in ours).backward()  # type: ignore[union-attr]
    for change in (edit, assign_data):
        change(last_weight(layer))
        with pytest.raises(RuntimeError, match="since is_first_microbatch=True"):
            run(layer, x, False, forward)
        assert torch.equal(run(layer, x, True, forward), run(layer, x))
        assert torch.equal(run(layer, x, False, forward), run(layer, x))
    change(last_weight(layer))
    assert torch.equal(run(layer, x, False), run(layer, x))  # eager code sees what compiled code kept


def test_it_is_quantized_once() -> None:
    layer, x = LAYERS["linear"](recipe=RECIPES["mxfp8"]), torch.randn(8, 32)
    counts = []
    for first in (True, False, False, None):
        with Operators() as operators:
            run(layer, x, first)
        counts.append(sum(n for what, n in operators.seen.items() if what not in ("fprop", "dgrad", "wgrad")))
    assert counts[1] == counts[2] == counts[0] - 1 == counts[3] - 1


@pytest.mark.parametrize("name", ["linear", "grouped"])
def test_flags_that_are_not_quite_bools(name: str) -> None:
    x = torch.randn(8, 32)
    for first, later in ((np.bool_(True), np.bool_(False)), (1, 0)):
        layer = LAYERS[name](recipe=RECIPES["current"], bias=False, fuse_wgrad_accumulation=True)
        twin = copy.deepcopy(layer)
        for module, flags in ((layer, (first, later)), (twin, (True, False))):
            for parameter in module.parameters():
                parameter.main_grad = torch.full_like(parameter, 100.0)
            for flag in flags:
                run(module, x, flag).square().sum().backward()
        for ours, theirs in zip(layer.parameters(), twin.parameters()):
            assert torch.equal(ours.main_grad, theirs.main_grad)
        assert torch.equal(run(layer, x, later), run(layer, x))


@pytest.mark.parametrize("recipe", [*RECIPES.values(), DelayedScaling()], ids=[*RECIPES, "delayed"])
@pytest.mark.parametrize("name", ["linear", "grouped", "layernorm_mlp"])
def test_kept_under_inference_mode_then_trained(name: str, recipe: Any) -> None:
    layer = LAYERS[name](recipe=recipe)
    x = torch.randn(8, 32, requires_grad=True)
    with torch.inference_mode():
        expected = run(layer.eval(), x, True)
        assert torch.equal(run(layer, x, False), expected)
    y = run(layer.train(), x, False)
    y.sum().backward()
    assert torch.equal(y, expected) and last_weight(layer).grad is not None


def test_what_is_gone_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_weights, "_MANY", 0)
    layer, x = LAYERS["linear"](recipe=RECIPES["current"]), torch.randn(8, 32)
    for _ in range(4):
        run(layer, x, True)
    assert len(kept_weights._MADE_FROM) <= 2 + sum(not kept.expired() for kept in kept_weights._MADE_FROM)


@pytest.mark.skipif(not dist.is_available(), reason="needs torch.distributed")
@pytest.mark.parametrize("way", ["fully_shard", "FSDP"])
def test_nothing_is_kept_under_fsdp(way: str, tmp_path: Path) -> None:
    """It gathers the weights of every forward into the same memory, and takes the count of versions back."""
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        mesh = dist.device_mesh.init_device_mesh("cpu", (1,))
        plain = LAYERS["linear"](recipe=RECIPES["current"])
        twin = copy.deepcopy(plain)
        model: Any = (
            fully_shard(plain, mesh=mesh)
            if way == "fully_shard"
            else FullyShardedDataParallel(plain, device_id=torch.device("cpu"), use_orig_params=True)
        )
        x = torch.randn(8, 32)
        for module in (model, twin):
            optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
            for first in (True, False):
                run(module, x, first).square().sum().backward()
                optimizer.step()
        assert plain._fp8_workspaces == {"weight": None}
        assert torch.equal(run(model, x, False), run(twin, x, False))
    finally:
        dist.destroy_process_group()
