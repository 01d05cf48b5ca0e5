"""Models of these layers under DDP, FSDP1 and FSDP2, as PyTorch has them: losses are those of one process."""

from __future__ import annotations

import copy
import functools
import gc
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from recipes import QUANTIZED
from torch import nn

import narrowcast as nc

from .blocks import Block, make_model, train
from .ranks_checks import of_all, run_checks

pytestmark = [
    pytest.mark.skipif(not dist.is_available(), reason="this PyTorch has no torch.distributed"),
    pytest.mark.slow,
]

LAYERS: dict[str, Any] = {
    "linear": lambda device: nc.Linear(32, 48, device=device),
    "layernorm_linear": lambda device: nc.LayerNormLinear(32, 48, device=device),
    "layernorm_mlp": lambda device: nc.LayerNormMLP(32, 48, device=device),
    "grouped": lambda device: nc.GroupedLinear(2, 32, 48, device=device),
    "grouped_single": lambda device: nc.GroupedLinear(
        2, 32, 48, device=device, single_grouped_parameter=True
    ),
    "ops": lambda device: nc.ops.Linear(32, 48, device=device),
}


def fsdp2(model: Any, mesh: Any, **options: Any) -> Any:
    from torch.distributed.fsdp import fully_shard

    for block in model.blocks:
        fully_shard(block, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def recomputed(model: Any, wrapped: Any) -> Any:
    for index, block in enumerate(model.blocks):
        model.blocks[index] = wrapped(block)
    return model


class Recomputed(nn.Module):
    """A block in ``nc.checkpoint``."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Any) -> Any:
        return nc.checkpoint(self.block, x)


def compiled(model: Any) -> Any:
    torch._dynamo.reset()
    for block in model.blocks:
        block.compile(backend="aot_eager", fullgraph=True)
    return model


def with_ddp(model: Any, mesh: Any) -> Any:
    from torch.nn.parallel import DistributedDataParallel

    return DistributedDataParallel(model)


def with_fsdp2(model: Any, mesh: Any) -> Any:
    from torch.distributed.fsdp import fully_shard

    return fully_shard(model, mesh=mesh)


ROOTS = {"ddp": with_ddp, "fsdp2": with_fsdp2}


@functools.cache
def of_one_process(recipe: str, width: int, hidden: int, blocks: int, **options: Any) -> list[float]:
    return train(make_model(recipe, width, hidden, blocks), width=width, **options)


def compare(
    recipe: str, wrap: Any, width: int = 64, hidden: int = 96, blocks: int = 2, **options: Any
) -> tuple[Any, Any]:
    """(losses of the wrapped model, of one process)."""
    expected = of_one_process(recipe, width, hidden, blocks, **options)
    model = wrap(make_model(recipe, width, hidden, blocks))
    if options.get("microbatches") and hasattr(model, "set_requires_gradient_sync"):
        options["before"] = model.set_requires_gradient_sync
    return train(model, width=width, **options), expected


def many_steps(mesh: Any) -> tuple[Any, Any]:
    losses = []
    for wrap in (lambda model: fsdp2(model, mesh), lambda model: model):
        model = wrap(make_model("delayed", 16, 16, blocks=1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        losses.append(train(model, 50, width=16, optimizer=optimizer))
    return tuple(losses)


def unequal(mesh: Any) -> dict[str, Any]:
    """Ranks that run other layers, and another number of microbatches, and collect garbage at other times."""
    torch.manual_seed(0)
    rank, recipe = dist.get_rank(), nc.recipe.DelayedScaling(amax_history_len=4)
    model = nn.ModuleList(nc.Linear(32, 32, device="cpu") for _ in range(3))
    model.append(nc.GroupedLinear(2, 32, 32, device="cpu"))
    calls = []
    for step in range(6):
        for microbatch in range(1 + 2 * rank):
            x = torch.randn(
                8, 32, generator=torch.Generator().manual_seed(step + 10 * microbatch + 100 * rank)
            )
            with nc.autocast(recipe=recipe):
                # the second layer runs everywhere, the third on one rank, the grouped one on the other, and late
                y = model[0](x)
                y = model[2](y) if rank else y
                y = model[3](y, [8 * (step % 2), 8 * (1 - step % 2)]) if step > 2 and not rank else y
            y.square().mean().backward()
            if (step + rank) % 3 == 0:
                copy.deepcopy(model)
                gc.collect()
        with mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as reductions:
            nc.reduce_delayed_scaling(model)
        calls.append(reductions.call_count)
    return {"calls": calls, "state": dict(model[0].named_buffers())}


def mixed_precision(recipe: str, mesh: Any) -> tuple[Any, Any]:
    """bf16 compute beside fp32 parameters: the first loss is that of a bf16 model."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    expected = train(make_model(recipe).to(torch.bfloat16), steps=1)
    model = fsdp2(make_model(recipe), mesh, mp_policy=policy)
    return train(model, steps=1), expected


def from_meta(name: str, delayed_first: bool, mesh: Any) -> dict[str, Any]:
    """A layer that is sharded on the meta device and then made: its scales, and how its weights are spread."""
    from torch.distributed.fsdp import fully_shard

    layer = LAYERS[name]("meta")
    if delayed_first:
        nc.set_recipe(layer, QUANTIZED["delayed"])
    fully_shard(layer, mesh=mesh)
    layer.to_empty(device="cpu")
    for module in layer.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    if not delayed_first:
        nc.set_recipe(layer, QUANTIZED["delayed"])
    scales = torch.cat([value.reshape(-1) for key, value in layer.state_dict().items() if "scale" in key])
    weights = {key: value.full_tensor() for key, value in layer.state_dict().items() if "weight" in key}
    splits = ([4, 4],) if "grouped" in name else ()
    out = layer(torch.randn(8, 32), *splits)
    out = out if isinstance(out, torch.Tensor) else out[0]
    out.square().mean().backward()
    return {"scales": scales, "weights": weights, "finite": bool(out.isfinite().all())}


class Pair(nn.Module):
    """Two layers, of a class of its own: Dynamo traces the calls of PyTorch's with their hooks."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nc.Linear(32, 48, device="cpu"), nc.Linear(48, 32, device="cpu")

    def forward(self, x: Any) -> Any:
        return self.second(self.first(x).relu())


def renewed(wrap: Any, compiles: bool) -> dict[str, Any]:
    """Train a model whose group was told once, compiled or not, with two microbatches a step."""
    torch._dynamo.reset()
    recipe, losses = nc.recipe.DelayedScaling(amax_history_len=3), []
    model = nc.set_recipe(Pair(), recipe, amax_group=dist.group.WORLD)
    if compiles:
        model.compile(backend="aot_eager")
    wrapped = wrap(model)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    for step in range(6):
        seed = 10 * step + dist.get_rank()
        loss = wrapped(torch.randn(8, 32, generator=torch.Generator().manual_seed(seed))).square().mean()
        loss.backward()
        losses.append(loss.item())
        if step % 2:
            optimizer.step()
            optimizer.zero_grad()
    return {"losses": losses, "state": dict(model.named_buffers())}


def bypassed() -> list[str]:
    """What replicas say of layers whose weight gradients they would not reduce."""
    told = []
    for option in ("fuse_wgrad_accumulation", "delay_wgrad_compute"):
        with pytest.raises(ValueError) as error:
            nn.parallel.DistributedDataParallel(
                nn.Sequential(nc.Linear(16, 16, device="cpu", **{option: True}))
            )
        told.append(str(error.value))
    return told


def checks_of_two(folder: str) -> dict[str, Any]:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy
    from torch.nn.parallel import DistributedDataParallel

    mesh = init_device_mesh("cpu", (2,))

    def fsdp1(model: Any, own_parameters: bool) -> Any:
        return FullyShardedDataParallel(
            model,
            use_orig_params=own_parameters,
            device_id=torch.device("cpu"),
            auto_wrap_policy=ModuleWrapPolicy({Block}),
        )

    checks: dict[str, Any] = {}
    for recipe in ("delayed", "mxfp8"):
        checks[f"ddp-{recipe}"] = lambda recipe=recipe: compare(recipe, DistributedDataParallel)
        checks[f"uneven-{recipe}"] = lambda recipe=recipe: compare(recipe, lambda m: fsdp2(m, mesh), 33, 67)
    ways = {
        "fsdp1": lambda m: fsdp1(m, True),
        "fsdp1_flat": lambda m: fsdp1(m, False),
        "recomputed": lambda m: fsdp2(recomputed(m, checkpoint_wrapper), mesh),
        "recomputed_after": lambda m: recomputed(fsdp2(m, mesh), checkpoint_wrapper),
        "nc_checkpoint": lambda m: fsdp2(recomputed(m, Recomputed), mesh),
    }
    for way, wrap in ways.items():
        checks[way] = lambda wrap=wrap: compare("delayed", wrap)
    checks["accumulated"] = lambda: compare("delayed", lambda m: fsdp2(m, mesh), microbatches=2)
    checks["mixed_precision"] = lambda: mixed_precision("delayed", mesh)
    for name in LAYERS:
        for first in (True, False):
            checks[f"meta-{name}-{first}"] = lambda name=name, first=first: from_meta(name, first, mesh)
    checks["compiled_before-current"] = lambda: compare(
        "current", lambda m: fsdp2(compiled(m), mesh), blocks=1
    )
    checks["compiled_after-delayed"] = lambda: compare(
        "delayed", lambda m: compiled(fsdp2(m, mesh)), blocks=1
    )
    for way, wrap in ROOTS.items():
        for compiles in (False, True):
            checks[f"renewed-{way}-{compiles}"] = lambda w=wrap, c=compiles: renewed(lambda m: w(m, mesh), c)
    checks["bypassed"] = bypassed
    checks["unequal"] = lambda: unequal(mesh)
    checks["50 steps"] = lambda: many_steps(mesh)
    return checks


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_checks(checks_of_two, tmp_path_factory.mktemp("two"), 2)


WAYS = ("fsdp1", "fsdp1_flat", "recomputed", "recomputed_after", "nc_checkpoint", "accumulated")
NAMES = [f"{way}-{recipe}" for way in ("ddp", "uneven") for recipe in ("delayed", "mxfp8")]
NAMES += [*WAYS, "mixed_precision", "compiled_before-current", "compiled_after-delayed", "50 steps"]


@pytest.mark.parametrize("name", NAMES)
def test_losses_are_those_of_one_process(name: str, two: list[dict[str, Any]]) -> None:
    for losses, expected in of_all(two, name):
        assert losses == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("delayed_first", [True, False])
@pytest.mark.parametrize("name", list(LAYERS))
def test_made_from_meta(name: str, delayed_first: bool, two: list[dict[str, Any]]) -> None:
    """Through DTensors, with the scales of the whole weight on every rank, as in one process."""
    first, second = of_all(two, f"meta-{name}-{delayed_first}")
    assert first["finite"] and second["finite"]
    assert torch.equal(first["scales"], second["scales"])
    whole = LAYERS[name]("cpu")
    nc.set_recipe(whole, QUANTIZED["delayed"])
    whole.load_state_dict(first["weights"], strict=False)
    for module in whole.modules():
        if hasattr(module, "reset_delayed_scaling"):
            module.reset_delayed_scaling()
    own = torch.cat([value.reshape(-1) for key, value in whole.state_dict().items() if "scale" in key])
    assert torch.equal(own, first["scales"])


@pytest.mark.parametrize("way", list(ROOTS))
def test_steps_reduce_before_they_renew(way: str, two: list[dict[str, Any]]) -> None:
    """With the bits of a model that is not compiled, and the same scales on all ranks."""
    plain, compiled = of_all(two, f"renewed-{way}-False"), of_all(two, f"renewed-{way}-True")
    for one, other in zip(plain, compiled, strict=True):
        assert one["losses"] == other["losses"]
        for name, value in one["state"].items():
            assert torch.equal(value, other["state"][name])
            assert torch.equal(value, compiled[0]["state"][name])
        assert one["state"]["first.scale"][0] > 0


def test_replicas_refuse_weight_gradients_that_go_past_them(two: list[dict[str, Any]]) -> None:
    for fused, delayed in of_all(two, "bypassed"):
        assert fused.startswith(
            "0 has fuse_wgrad_accumulation=True, which goes past DistributedDataParallel's"
        )
        assert delayed.startswith("0 has delay_wgrad_compute=True, which goes past")


def test_ranks_that_do_different_work_never_wait(two: list[dict[str, Any]]) -> None:
    first, second = of_all(two, "unequal")
    assert first["calls"] == second["calls"] == [1] * 6
    assert torch.equal(first["state"]["amax"], second["state"]["amax"])
    assert first["state"]["amax"][0] > 0
