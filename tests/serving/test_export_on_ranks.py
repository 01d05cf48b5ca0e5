"""Exports of a model that ranks share: one folder by one call of all, or an error on all that names the rank."""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from distributed.ranks_checks import of_all, run_checks
from recipes import QUANTIZED
from torch import nn

import narrowcast as nc
from narrowcast.serving import shards as SHARDS
from serving.test_interrupted_export import contents

FAILS = {0: "_safetensors", 1: "_SharedAmax"}  # a rank -> the function that fails on it
MODULE = sys.modules["narrowcast.serving.export"]  # the function has its name
pytestmark = pytest.mark.skipif(not dist.is_available(), reason="this PyTorch has no torch.distributed")


def mesh_of_all() -> Any:
    return dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))


def model() -> nn.Module:
    torch.manual_seed(0)
    made = nn.Sequential(nn.Linear(96, 201), nn.ReLU(), nn.Linear(201, 73)).bfloat16()
    return nc.convert(made, QUANTIZED["current"])


def sharded() -> Any:
    from torch.distributed.fsdp import fully_shard

    return fully_shard(model(), mesh=mesh_of_all())


def exported(made: nn.Module, path: Path, **options: Any) -> str:
    """Return "" or what was raised; every rank waits for the others."""
    try:
        nc.export(made, path, format="compressed-tensors", **options)
        said = ""
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
    dist.barrier()
    return said


def one_folder(folder: Path) -> list[Any]:
    """After a forward, which leaves the weights of the root gathered."""
    made = sharded()
    made(torch.randn(4, 96).bfloat16())
    said = [exported(made, folder / "shared"), exported(made, folder / "shared")]
    nc.export(model(), folder / f"alone{dist.get_rank()}", format="compressed-tensors")
    return [*said, contents(folder / "shared") == contents(folder / f"alone{dist.get_rank()}")]


def several_files(folder: Path) -> list[Any]:
    with mock.patch.object(MODULE, "FILE_BYTES", 20_000):
        said = exported(sharded(), folder / "files")
    files = sorted(path.name for path in (folder / "files").iterdir())
    again = nn.Sequential(nn.Linear(96, 201), nn.ReLU(), nn.Linear(201, 73)).bfloat16()
    nc.load_quantized(again, folder / "files")
    same = [torch.equal(again[i].weight.dequantize(), _served(model(), i)) for i in (0, 2)]  # type: ignore[operator]
    return [said, files, same]


def _served(made: Any, index: int) -> torch.Tensor:
    quantizer = nc.Float8CurrentScalingQuantizer(nc.DType.kFloat8E4M3)
    return quantizer.quantize(made[index].weight.detach()).dequantize()


def fails_on(rank: int, at: str, folder: Path) -> list[Any]:
    """A rank that lacks a package, or has no memory for a weight."""
    told = MemoryError("no memory") if at == "_SharedAmax" else ModuleNotFoundError("no safetensors")
    failing = mock.patch.object(SHARDS if at == "_SharedAmax" else MODULE, at, side_effect=told)
    with failing if dist.get_rank() == rank else mock.MagicMock():
        said = exported(sharded(), folder / f"failed{rank}")
    return [said, sorted(path.name for path in folder.glob("*failed*"))]


def every_rank_has_all(folder: Path) -> list[Any]:
    """A model that no ranks share is written by each that calls; one is first."""
    said = exported(model(), folder / "whole")
    return [said, contents(folder / "whole") == contents(folder / "shared")]


def local_experts(folder: Path) -> list[Any]:
    experts = nc.GroupedLinear(2, 32, 32, device="cpu")
    nc.set_recipe(experts, QUANTIZED["current"])
    nc.distributed.MoEDispatch(4, dist.group.WORLD).local_experts(experts)
    return [exported(nn.ModuleDict({"experts": experts}), folder / "experts"), (folder / "experts").exists()]


def checks(folder: str) -> dict[str, Any]:
    root = Path(folder)
    return {
        "one folder": functools.partial(one_folder, root),
        "several files": functools.partial(several_files, root),
        **{f"fails on {rank}": functools.partial(fails_on, rank, at, root) for rank, at in FAILS.items()},
        "local experts": functools.partial(local_experts, root),
        "every rank has all": functools.partial(every_rank_has_all, root),
    }


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_checks(checks, tmp_path_factory.mktemp("ranks"), 2)


def test_one_call_of_all_ranks_is_one_folder_with_the_bytes_of_one_process(results: list[Any]) -> None:
    for rank, (first, second, same) in enumerate(of_all(results, "one folder")):
        assert first == "" and same
        assert second.startswith("RuntimeError: rank 0 could not go on" if rank else "FileExistsError")
        assert "exists and is not empty" in second


def test_more_bytes_than_fit_one_file_are_several_with_an_index(results: list[Any]) -> None:
    for said, files, same in of_all(results, "several files"):
        assert said == "" and all(same)
        names = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
        assert files == ["config.json", *names, "model.safetensors.index.json"]


@pytest.mark.parametrize("rank", FAILS)
def test_an_error_on_one_rank_ends_the_call_on_all(results: list[Any], rank: int) -> None:
    for own, (said, left) in enumerate(of_all(results, f"fails on {rank}")):
        told = (
            "MemoryError: no memory"
            if FAILS[rank] == "_SharedAmax"
            else "ModuleNotFoundError: no safetensors"
        )
        assert said == (
            told if own == rank else f"RuntimeError: rank {rank} could not go on, so no rank does: {told}"
        )
        assert left == []


def test_of_ranks_that_each_have_all_one_writes_and_others_are_told(results: list[Any]) -> None:
    found = of_all(results, "every rank has all")
    said = sorted(one for one, _ in found)
    assert said[0] == "" and said[1].startswith("FileExistsError") and all(same for _, same in found)


def test_experts_that_no_rank_has_all_of_are_refused(results: list[Any]) -> None:
    for said, exists in of_all(results, "local experts"):
        assert (
            said.startswith("ValueError: 'experts' holds this rank's experts beside MoEDispatch")
            and not exists
        )
