"""Adapters of PEFT over weights that ranks share: the sums of one process, or an error before anything changed."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed.ranks_checks import of_all, run_checks
from recipes import QUANTIZED

import narrowcast as nc

from .test_adapters import adapted, inputs

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="this PyTorch has no torch.distributed")


REFUSED = {
    "stored": ["is stored as codes, and ranks share it", "narrowcast.distributed.save_checkpoint"],
    "plain": ["the PEFT model was sharded by itself", "model.get_base_model()"],
}


def made(weights: Any) -> Any:
    rows = (201, 73) if weights == "plain" else (202, 74)  # FSDP2 shards codes only in equal shares
    return adapted(QUANTIZED["current"], weights, 96, *rows)


def sharded(weights: Any, wrapper: bool = False) -> Any:
    """Return a model whose base is sharded, or all of it; a forward leaves the weights of its root gathered."""
    from torch.distributed.fsdp import fully_shard

    model = made(weights)
    fully_shard(model if wrapper else model.model, mesh=dist.device_mesh.init_device_mesh("cpu", (2,)))
    model(inputs(96).detach())
    return model


def merges() -> list[Any]:
    """Return whether a sharded model gives what one process does, again and again, and has its weights."""
    merged: Any = nc.merge_adapters(sharded("plain"))
    alone: Any = nc.merge_adapters(made("plain"))
    x = inputs(96).detach()
    same = [torch.equal(merged(x), alone(x)) for _ in range(2)]
    merged.reshard()  # type: ignore[operator]
    for layer, mine in zip(merged, alone, strict=True):
        same += [torch.equal(layer.weight.full_tensor(), mine.weight), not layer.weight.requires_grad]  # type: ignore[operator]
    return same


def exports(merge: str, folder: Path) -> list[Any]:
    model, paths = (
        sharded("plain", wrapper=True),
        [folder / f"{merge}", folder / f"{merge}-alone{dist.get_rank()}"],
    )
    model.reshard()
    before = [parameter.full_tensor().clone() for parameter in model.parameters()]
    options: dict[str, Any] = {"format": "compressed-tensors", "merge": merge}
    nc.export(model, paths[0], **options)
    nc.export(made("plain"), paths[1], **options)
    files = [(path / "model.safetensors").read_bytes() for path in paths]
    same = all(torch.equal(a, b.full_tensor()) for a, b in zip(before, model.parameters()))
    return [files[0] == files[1], same]


def refuses(weights: str, wrapper: bool) -> list[Any]:
    model = sharded(weights, wrapper)
    layers, said = [*model.model], ""
    try:
        nc.merge_adapters(model)
    except ValueError as error:
        said = str(error)
    return [said, all(a is b for a, b in zip(layers, model.model, strict=True))]


def merges_what_was_saved(folder: Path) -> bool:
    """Return whether codes that ranks share, saved and loaded whole, merge as those of one process."""
    alone: Any = made("stored")
    saved: Any = sharded("stored")
    saved.model.reshard()
    for model in (alone, saved):
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.data.mul_(1.5)
    nc.distributed.save_checkpoint(folder / "adapted", saved)
    loaded: Any = made("stored")
    nc.distributed.load_checkpoint(folder / "adapted", loaded)
    x = inputs(96).detach()
    before = loaded(x)
    same = torch.equal(nc.merge_adapters(loaded)(x), nc.merge_adapters(alone)(x))
    return same and not torch.equal(before, made("stored")(x))


def writes_beside(folder: Path) -> list[Any]:
    """Return what a rank is told of adapters that PEFT would write as this rank has them, and what is there then."""
    try:
        nc.export(sharded("plain", wrapper=True), folder / "beside", format="bf16", merge="beside")
    except ValueError as error:
        return [str(error), (folder / "beside").exists()]
    return ["", True]


def checks(folder: str) -> dict[str, Any]:
    kept = {f"export {merge}": functools.partial(exports, merge, Path(folder)) for merge in ("kept", "new")}
    refused = {
        f"refuses {weights}": functools.partial(refuses, weights, weights == "plain") for weights in REFUSED
    }
    saved = functools.partial(merges_what_was_saved, Path(folder))
    return {
        "merges": merges,
        "saved": saved,
        "beside": functools.partial(writes_beside, Path(folder)),
        **kept,
        **refused,
    }


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_checks(checks, tmp_path_factory.mktemp("ranks"), 2)


def test_merged_weights_are_those_of_one_process_and_survive_the_next_gather(results: list[Any]) -> None:
    assert all(all(found) for found in of_all(results, "merges"))


@pytest.mark.parametrize("merge", ["kept", "new"])
def test_an_export_of_ranks_merges_as_one_process_and_leaves_the_model(
    results: list[Any], merge: str
) -> None:
    assert all(all(found) for found in of_all(results, f"export {merge}"))


@pytest.mark.parametrize("weights", REFUSED)
def test_what_the_merge_would_lose_is_refused_before_anything_changed(
    results: list[Any], weights: str
) -> None:
    for said, same in of_all(results, f"refuses {weights}"):
        assert all(part in said for part in REFUSED[weights]) and same


def test_what_is_refused_merges_from_a_checkpoint(results: list[Any]) -> None:
    assert of_all(results, "saved") == [True, True]


def test_adapters_of_which_ranks_hold_parts_are_not_written_by_one(results: list[Any]) -> None:
    for said, there in of_all(results, "beside"):
        assert "of which each rank holds a part; save with narrowcast.distributed.save_checkpoint" in said
        assert not there
