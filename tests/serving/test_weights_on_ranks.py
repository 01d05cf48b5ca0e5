"""Served weights of a model that two ranks share: the bits of one process, from codes and scales that they gather."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from distributed.ranks_checks import of_all, run_checks
from recipes import QUANTIZED
from torch import Tensor, nn

import narrowcast as nc
from narrowcast.serving import shards
from serving.test_weights import Experts

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="this PyTorch has no torch.distributed")

FORMATS = {"block": "hf-fp8-block128"}
SHARDED = ("current", "delayed", "block", "mxfp8", "nvfp4")


class Layers(nn.Module):
    """Layers, of which the first two multiply the same input."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers: Any = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers[0](x) + self.layers[1](x)


def make(name: str, even: bool = False) -> Layers:
    """Odd rows, a weight of parts, and three experts for two ranks; ``even``: whole tiles for each rank."""
    torch.manual_seed(0)
    recipe, rows = QUANTIZED[name], 256 if even else 201
    parts = None if even else {"query": 128, "key": 73}
    layers = [nn.Linear(96, rows), nc.Linear(96, rows, parameters_split=parts, device="cpu")]
    model = Layers(*layers, *([] if even else [Experts(3, 96, 128)])).bfloat16()
    nc.convert(model, recipe)
    nc.set_recipe(model, recipe)
    if name == "delayed":
        x, index = torch.randn(6, 96).bfloat16(), torch.arange(6)[:, None] % 3
        (model(x).square().sum() + model.layers[2](x, index, torch.ones_like(x[:, :1])).sum()).backward()
        model.zero_grad()
        nc.renew_delayed_scaling(model)
        for parameter in model.parameters():  # as a step does: an evaluation scales weights as they are
            parameter.data *= 1.5
    return model.eval()


def served(model: nn.Module, name: str) -> dict[str, Tensor]:
    return dict(nc.serving.weights(model, FORMATS.get(name, "compressed-tensors")))


def differences(found: dict[str, Tensor], expected: dict[str, Tensor]) -> list[str]:
    assert list(found) == list(expected)
    return [
        key
        for key, value in expected.items()
        if found[key].dtype != value.dtype
        or not torch.equal(found[key].view(torch.uint8), value.view(torch.uint8))
    ]


def fully_sharded(name: str, shard: Any, **options: Any) -> list[str]:
    model, mesh = make(name, options.pop("even", False)), mesh_of_all()
    expected = served(model, name)
    for layer in model.layers:
        shard(layer, mesh=mesh, **options)
    shard(model, mesh=mesh, **options)
    return differences(served(model, name), expected)


def mesh_of_all() -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", (2,))


@contextmanager
def counted() -> Iterator[list[int]]:
    """Bytes that the gathers return."""
    found: list[int] = []
    gather = shards._gather_rows

    def counting(own: Tensor, counts: Any, group: Any) -> Tensor:
        whole = gather(own, counts, group)
        found.append(whole.nbytes)
        return whole

    with mock.patch.object(shards, "_gather_rows", counting):
        yield found


def bytes_gathered() -> list[int]:
    from torch.distributed.fsdp import fully_shard

    model = make("block", even=True)
    fully_shard(model, mesh=mesh_of_all())
    sizes = []
    with counted() as found:
        for name, tensor in nc.serving.weights(model, "hf-fp8-block128"):
            sizes += [tensor.nbytes] * ("weight" in name)
    return [sum(found), sum(sizes)]


def in_bf16() -> bool:
    """Weights in fp32 that a forward reads in bf16 are served as those of a model in bf16."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    model = make("current", even=True).float()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 1e-4)
    rounded = make("current", even=True)
    rounded.load_state_dict(model.state_dict())
    expected = served(rounded, "current")
    fully_shard(model, mesh=mesh_of_all(), mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    found = dict(nc.serving.weights(model, "compressed-tensors", dtype=torch.bfloat16))
    return differences(found, expected) == []


def split(name: str, mesh: Any = None) -> Any:
    """One column-parallel and one row-parallel layer; with a mesh of two dims, also sharded over the first."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import parallelize_module

    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(128, 256), nn.Linear(256, 128)).bfloat16()
    model[0].weight.data[:128] *= 0.5  # the first rank's rows
    nc.convert(model, QUANTIZED[name])
    expected = served(model, name)
    tp = mesh_of_all() if mesh is None else mesh["tp"]
    styles = {"0": nc.distributed.ColwiseParallel(), "1": nc.distributed.RowwiseParallel()}
    parallelize_module(model, tp, styles)
    if mesh is not None:
        fully_shard(model, mesh=mesh["dp"])
    try:
        return differences(served(model, name), expected)
    except ValueError as error:
        return [str(error)]


def split_by_a_group() -> list[str]:
    torch.manual_seed(0)
    whole, recipe = nn.Linear(128, 256).bfloat16(), QUANTIZED["block"]
    nc.convert(whole, recipe, heads=True)
    layer = nc.Linear(
        128, 256, tp_group=dist.group.WORLD, parallel_mode="column", device="cpu", recipe=recipe
    )
    layer.bfloat16()
    for own, all_rows in zip(layer.parameters(), whole.parameters()):
        own.data.copy_(all_rows.data.chunk(2)[dist.get_rank()])
    return differences(served(layer, "block"), served(whole, "block"))


def experts_on_ranks(name: str) -> list[str]:
    """Experts that two ranks share; of four, one has seen no token."""
    torch.manual_seed(0)
    whole: Any = nn.ModuleDict({"proj": nn.Linear(96, 96), "experts": Experts(4, 96, 128)}).bfloat16()
    nc.convert(whole, QUANTIZED[name], routers=True, small=True, heads=True)
    shared = copy.deepcopy(whole)
    nc.distributed.expert_parallel(shared, mesh_of_all(), quantizer=None)
    x, index = torch.randn(6, 96).bfloat16(), torch.arange(6)[:, None] % 3
    mine = slice(3 * dist.get_rank(), 3 * dist.get_rank() + 3)
    for model, rows in ((whole, slice(6)), (shared, mine)):
        nc.set_recipe(model, QUANTIZED[name])
        for _ in range(2):
            y = model["experts"](x[rows], index[rows], torch.ones(6, 1).bfloat16()[rows])
            (y.sum() + model["proj"](x).sum()).backward()
            nc.renew_delayed_scaling(model)
        model.eval()
    format = "fp8-static" if name == "delayed" else FORMATS.get(name, "compressed-tensors")
    expected = dict(nc.serving.weights(whole, format))
    assert "experts.3.down_proj.weight_scale" in " ".join(expected) or name == "nvfp4"
    return differences(dict(nc.serving.weights(shared, format)), expected)


def rows_of_ranks() -> list[str]:
    """A weight of as many rows as there are ranks is one matrix, not one for each rank."""
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = nc.convert(nn.Sequential(nn.Linear(96, 2)).bfloat16(), QUANTIZED["mxfp8"], heads=True, small=True)
    expected = served(model, "mxfp8")
    fully_shard(model, mesh=mesh_of_all())
    return differences(served(model, "mxfp8"), expected)


def checks_of_four(folder: str) -> dict[str, Any]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    def replicated() -> list[str]:
        model = make("block")
        expected = served(model, "block")
        fully_shard(model, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))
        return differences(served(model, "block"), expected)

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    return {"split": functools.partial(split, "block", mesh), "replicated": replicated}


def checks(folder: str) -> dict[str, Any]:
    from torch.distributed.fsdp import fully_shard

    return {
        **{f"fsdp {name}": functools.partial(fully_sharded, name, fully_shard) for name in SHARDED},
        "quantized gathers": functools.partial(fully_sharded, "block", nc.distributed.shard, even=True),
        "bytes": bytes_gathered,
        "bf16": in_bf16,
        **{f"split {name}": functools.partial(split, name) for name in ("block", "mxfp8", "current")},
        "group": split_by_a_group,
        "rows": rows_of_ranks,
        **{f"experts {name}": functools.partial(experts_on_ranks, name) for name in SHARDED},
    }


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_checks(checks, tmp_path_factory.mktemp("ranks"), 2)


@pytest.mark.parametrize(
    "case",
    [
        *(f"{kind} {name}" for kind in ("fsdp", "experts") for name in SHARDED),
        *("quantized gathers", "split block", "split mxfp8", "group", "rows"),
    ],
)
def test_ranks_serve_the_bits_of_one_process(results: list[dict[str, Any]], case: str) -> None:
    assert of_all(results, case) == [[], []]


def test_ranks_gather_codes_and_scales(results: list[dict[str, Any]]) -> None:
    for gathered, served_bytes in of_all(results, "bytes"):
        assert gathered == served_bytes > 0


def test_weights_are_served_in_the_dtype_of_their_forward(results: list[dict[str, Any]]) -> None:
    assert all(of_all(results, "bf16"))


def test_scales_of_ranks_that_differ_are_refused(results: list[dict[str, Any]]) -> None:
    for found in of_all(results, "split current"):
        assert "processes that each have a scale of their own" in found[0]


@pytest.mark.slow
def test_four_ranks_that_shard_and_split_or_replicate(tmp_path: Any) -> None:
    found = run_checks(checks_of_four, tmp_path, 4)
    assert of_all(found, "split") == of_all(found, "replicated") == [[]] * 4
