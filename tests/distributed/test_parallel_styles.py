"""Tensor-parallel styles on DTensor parameters, alone and under FSDP2: 4 processes against one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from ranks import run_ranks
from recipes import RECIPES
from torch import Tensor, nn

import narrowcast as nc
from narrowcast.testing import assert_close

from .ranks_checks import alone_among

WORLD, SECONDS, STEPS = 4, 240, 3
HIDDEN, FFN, BATCH, SEQUENCE = 64, 128, 2, 128
pytestmark = pytest.mark.skipif(not dist.is_available(), reason="needs torch.distributed")
NAMES = ("none", "delayed", "block")


class Block(nn.Module):
    """As the blocks of models for stock plans: names are those of the plan below."""

    def __init__(self) -> None:
        super().__init__()
        self.wq = nc.LayerNormLinear(HIDDEN, HIDDEN, device="cpu", normalization="RMSNorm")
        self.wo = nc.Linear(HIDDEN, HIDDEN, device="cpu")
        self.norm = nc.LayerNorm(HIDDEN, device="cpu")
        self.w1 = nc.Linear(HIDDEN, FFN, bias=False, device="cpu")
        self.w2 = nc.Linear(FFN, HIDDEN, bias=False, device="cpu")

    def forward(self, x: Tensor) -> Tensor:
        y = x + self.wo(self.wq(x))
        return y + self.w2(F.silu(self.w1(self.norm(y))))


def plan(sequence: bool, stock: bool) -> dict[str, Any]:
    """``stock``: with PyTorch's own styles for the layers that it knows."""
    from torch.distributed.tensor import Replicate, Shard, parallel

    par: Any = parallel if stock else nc.distributed
    rows = Shard(1) if sequence else Replicate()
    styles: dict[str, Any] = {
        "wq": nc.distributed.ColwiseParallel(input_layouts=rows),
        "wo": par.RowwiseParallel(output_layouts=rows),
        "w1": par.ColwiseParallel(input_layouts=rows),
        "w2": par.RowwiseParallel(output_layouts=rows),
    }
    if sequence:
        styles["norm"] = par.SequenceParallel(use_local_output=True)
    return styles


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Block())


def batch(step: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(step)
    return torch.randn(2 * BATCH, SEQUENCE, HIDDEN, generator=draw), torch.randn(
        2 * BATCH, SEQUENCE, HIDDEN, generator=draw
    )


def train(layers: nn.Module, name: str, shares: Any) -> tuple[list[float], Tensor]:
    """Losses of some steps, and the last output; ``shares`` takes this process's part of a tensor."""
    optimizer = torch.optim.AdamW(layers.parameters(), lr=1e-2)
    losses, y = [], torch.empty(0)
    for step in range(STEPS):
        x, target = (shares(tensor) for tensor in batch(step))
        with nc.autocast(enabled=RECIPES[name] is not None, recipe=RECIPES[name]):
            y = layers(x)
        loss = (y - target).square().mean()
        loss.backward()
        if len({type(parameter.grad) for parameter in layers.parameters()}) == 1:  # else PyTorch cannot
            nn.utils.clip_grad_norm_(layers.parameters(), 100.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return torch.stack(losses), y.detach()


def split(
    sequence: bool, sharded: bool, name: str, compiled: bool = False, stock: bool = False
) -> dict[str, Any]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import parallelize_module

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    if not sharded and mesh["dp"].get_local_rank():  # would repeat what the first two do
        return {}
    layers, tp = model(), mesh["tp"].get_local_rank()
    if stock:  # as documented: recipes first; with delayed scaling there are buffers from now on
        nc.set_recipe(layers, RECIPES[name])
    for block in layers:
        parallelize_module(block, mesh["tp"], plan(sequence, stock))
        if compiled:
            block.compile(fullgraph=True, backend="aot_eager")
        if sharded:
            fully_shard(block, mesh=mesh["dp"])
    if sharded:
        fully_shard(layers, mesh=mesh["dp"])

    def shares(tensor: Tensor) -> Tensor:
        if sharded:
            tensor = tensor.chunk(2, 0)[mesh["dp"].get_local_rank()]
        return tensor.chunk(2, 1)[tp] if sequence else tensor

    losses, y = train(layers, name, shares)
    group = None if sharded else mesh["tp"].get_group()
    dist.all_reduce(losses, op=dist.ReduceOp.SUM, group=group)
    parameters: dict[str, Any] = dict(layers.named_parameters())
    whole = {
        key: (parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter).detach()
        for key, parameter in parameters.items()
    }
    placed = {key: str(getattr(parameter, "placements", None)) for key, parameter in parameters.items()}
    return {"losses": losses / dist.get_world_size(group), "y": y, "whole": whole, "placed": placed}


CASES = [(True, True, name, False) for name in NAMES] + [
    (False, False, "current", False),
    (True, False, "block", True),
    (True, False, "block", False),
]
STOCK = [
    (True, True, "block", False, True),
    (True, False, "current", True, True),
    (True, True, "delayed", False, True),
]


def errors() -> dict[str, str]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, parallel
    from torch.distributed.tensor.parallel import parallelize_module

    mesh, par, found = init_device_mesh("cpu", (WORLD,)), nc.distributed, {}
    for key, layer, style in (
        ("features", nc.Linear(8, 6, device="cpu"), par.ColwiseParallel()),
        ("mlp", nc.LayerNormMLP(8, 8, device="cpu"), par.ColwiseParallel()),
        ("parts", nc.Linear(8, 8, device="cpu", parameters_split=("a", "b")), par.ColwiseParallel()),
        ("stock", nc.Linear(8, 8, device="cpu", parameters_split=("a", "b")), parallel.ColwiseParallel()),
        ("stock features", nc.Linear(6, 8, device="cpu"), parallel.RowwiseParallel()),
        ("layout", nc.Linear(8, 8, device="cpu"), par.RowwiseParallel(output_layouts=Shard(-1))),
    ):
        try:
            parallelize_module(layer, mesh, style)
        except (ValueError, NotImplementedError) as error:
            found[key] = str(error)
    plain = parallelize_module(nn.Linear(8, 8), mesh, par.ColwiseParallel())
    found["plain"] = str(tuple(plain(torch.zeros(2, 8)).shape))
    return found


def work(rank: int) -> Any:
    results: dict[Any, Any] = {case: split(*case) for case in (*CASES, *STOCK)}
    results["errors"] = errors()
    return results


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[Any, Any]]:
    return run_ranks(work, tmp_path_factory.mktemp("ranks"), WORLD, SECONDS)


def of_case(ranks: list[dict[Any, Any]], case: tuple[Any, ...]) -> list[Any]:
    """What each rank found that has a part in it: all four where the model is sharded, else two."""
    given = [found[case] for found in ranks if found[case]]
    assert len(given) == (WORLD if case[1] else WORLD // 2)
    return given


@pytest.mark.parametrize("case", [*CASES[:4], *STOCK], ids=str)
def test_trains_as_one_process_does(ranks: list[Any], case: tuple[Any, ...]) -> None:
    layers = model()
    losses, _ = train(layers, case[2], lambda tensor: tensor)
    given = of_case(ranks, case)
    for found in given:
        assert_close(found["losses"], losses, "training_loss")
        if case[2] == "none":
            assert_close(found["losses"][:1], losses[:1], "fp32_sum_order")
    for key, parameter in layers.named_parameters():
        ours = given[0]["whole"][key]
        assert all(torch.equal(ours, found["whole"][key]) for found in given), key
        if case[2] == "none":  # AdamW divides small gradients by themselves
            assert_close(ours, parameter.detach(), "fp8_flips")


def test_compiled(ranks: list[Any]) -> None:
    pairs = zip(*(of_case(ranks, (True, False, "block", one)) for one in (False, True)), strict=True)
    for eager, compiled in pairs:
        assert torch.equal(eager["y"], compiled["y"])
        assert all(torch.equal(eager["whole"][key], value) for key, value in compiled["whole"].items())


def test_parameters_are_dtensors(ranks: list[Any]) -> None:
    placed = ranks[0][True, False, "block", False]["placed"]
    assert placed["0.wq.weight"] == placed["0.wq.bias"] == placed["0.w1.weight"] == "(Shard(dim=0),)"
    assert placed["0.wo.weight"] == placed["0.w2.weight"] == "(Shard(dim=1),)"
    assert (
        placed["0.wo.bias"] == placed["0.norm.weight"] == placed["0.wq.layer_norm_weight"] == "(Replicate(),)"
    )


def test_what_cannot_be_parallelized(ranks: list[Any]) -> None:
    found = ranks[0]["errors"]
    assert found["features"].startswith("out_features=6 does not divide among tp_size=4 processes")
    assert found["mlp"].startswith("a LayerNormMLP cannot be made column parallel; make it with tp_group=")
    assert found["parts"].startswith("Linear with parameters_split cannot be parallelized")
    assert found["stock"].startswith("Linear with parameters_split cannot be parallelized by PyTorch's style")
    assert found["stock features"].startswith("in_features=6 does not divide among tp_size=4 processes")
    assert "; use Replicate(), or Shard(dim) of a dim counted from the front" in found["layout"]
    assert found["plain"] == "(2, 2)"  # PyTorch's own style


def test_a_norm_on_a_shard_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its parameters are those of the first rank; it computes on what this rank has of them."""
    from narrowcast.distributed import parallel_styles

    sources: list[Any] = []
    real = parallel_styles.distribute_tensor

    def distribute(*args: Any, src_data_rank: Any) -> Any:
        sources.append(src_data_rank)
        return real(*args, src_data_rank=src_data_rank)

    monkeypatch.setattr(parallel_styles, "distribute_tensor", distribute)
    norm = nc.LayerNorm(32, device="cpu")
    x = torch.randn(5, 32)
    expected = norm(x).detach()
    with alone_among(2, 1) as mesh:
        parallel_styles.SequenceParallel()._apply(norm, mesh)
        assert sources == [0, 0] and norm._placed
        y: Any = norm(x)
        assert torch.equal(y.to_local() if hasattr(y, "to_local") else y, expected)
