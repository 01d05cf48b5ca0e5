"""``torch.distributed.checkpoint`` of sharded models: saved by two ranks, loaded by two, four and one."""

from __future__ import annotations

import copy
import datetime
import os
import shutil
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from ranks import start_method
from torch.distributed.checkpoint import FileSystemWriter

import narrowcast as nc
from narrowcast.distributed import load_checkpoint, save_checkpoint, shard

from .blocks import make_model, train
from .ranks_checks import of_all, run_checks
from .test_shard import against_plain, stored

pytestmark = [
    pytest.mark.skipif(not dist.is_available(), reason="this PyTorch has no torch.distributed"),
    pytest.mark.slow,
]

# what is saved: recipe, whether weights are gathered quantized
CASES = {
    "delayed": ("delayed", True),
    "block": ("block", True),
    "plain": ("current", False),
    "stored": ("mxfp8", True),
    "codes": ("current", True),
}
SHAPES = {"block": (512, 512, 1), "stored": (128, 128, 1)}
BEFORE, AFTER = 3, 3


def make(case: str, mesh: Any) -> tuple[Any, Any, int]:
    """(model, optimizer, width)."""
    recipe, quantized = CASES[case]
    shape = SHAPES.get(case, (64, 96, 2))
    model: Any = make_model(recipe, *shape, quantized=case == "stored")
    if mesh is not None:
        shard(model, mesh, blocks=model.blocks, quantized_gather=quantized)
    if case == "stored":
        optimizer = nc.optimizers.FusedAdam(model.parameters(), lr=1e-3, master_weights=True)
        return model, optimizer, shape[0]
    if case == "codes":
        codes = torch.int8
        moments = {"exp_avg_dtype": codes, "exp_avg_sq_dtype": codes}
        return model, nc.optimizers.FusedAdam(model.parameters(), lr=1e-3, **moments), shape[0]
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3), shape[0]


def save(case: str, folder: Path, mesh: Any, asynchronous: bool = False) -> dict[str, Any]:
    """Train, save, train on: the losses after the save, and what kinds of tensors a checkpoint holds."""
    model, optimizer, width = make(case, mesh)
    train(model, BEFORE, width=width, optimizer=optimizer)
    kinds = {type(getattr(value, "_local_tensor", value)).__name__ for value in model.state_dict().values()}
    group = dist.new_group(backend="gloo") if asynchronous else None
    extra = {"step": BEFORE, "note": case, "tensor": torch.arange(3)}
    if mesh is not None:
        from torch.distributed.tensor import DTensor, Partial

        pending = [Partial()] * mesh.ndim  # a sum still to be made, as the norm of gradients was
        extra["sum"] = DTensor.from_local(torch.tensor(1 / mesh.size()), mesh, pending)
    path = folder / (f"{case}-async" if asynchronous else case)
    saving = save_checkpoint(path, model, optimizer, extra=extra, group=group, asynchronous=asynchronous)
    losses = train(model, AFTER, width=width, optimizer=optimizer, start=BEFORE)  # while it is written
    saving.result()
    return {"losses": losses, "kinds": kinds}


def load(case: str, folder: Path, mesh: Any, name: str = "") -> list[float]:
    """The losses of a run that starts from the checkpoint, in as many ranks as there are now."""
    model, optimizer, width = make(case, mesh)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    extra = load_checkpoint(folder / (name or case), model, optimizer)
    assert extra["step"] == BEFORE and extra["note"] == case and extra["tensor"].tolist() == [0, 1, 2]
    assert extra.get("sum", torch.ones(())).item() == 1.0
    return train(model, AFTER, width=width, optimizer=optimizer, start=BEFORE)


def die_while_saving(rank: int, folder: str, place: str) -> None:
    """Two ranks load a checkpoint, train and save over it; the second is killed while it writes."""
    from torch.distributed.checkpoint import FileSystemWriter
    from torch.distributed.device_mesh import init_device_mesh

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=2,
        timeout=datetime.timedelta(seconds=20),
    )
    model, optimizer, width = make("delayed", init_device_mesh("cpu", (2,)))
    load_checkpoint(f"{place}/delayed", model, optimizer)
    train(model, 1, width=width, optimizer=optimizer)
    if rank == 1:
        write = FileSystemWriter.write_data

        def killed(*args: Any, **kwargs: Any) -> Any:
            write(*args, **kwargs)
            os.kill(os.getpid(), signal.SIGKILL)

        FileSystemWriter.write_data = killed  # type: ignore[method-assign]
    try:
        save_checkpoint(f"{place}/delayed", model, optimizer)
    except BaseException as error:
        Path(folder, "told").write_text(type(error).__name__)


def checks_of(folder: str, ranks: int) -> dict[str, Any]:
    from torch.distributed.device_mesh import init_device_mesh

    checks: dict[str, Any]
    mesh, place = init_device_mesh("cpu", (ranks,)), Path(folder).parent / "saved"
    if ranks == 4:
        checks = {case: lambda case=case: load(case, place, mesh) for case in CASES}
        hybrid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        for recipe in ("delayed", "block"):
            checks[f"hybrid {recipe}"] = lambda recipe=recipe: against_plain(recipe, hybrid)
        checks["hybrid stored"] = lambda: stored("nvfp4", "loaded", hybrid)
        return checks
    checks = {case: lambda case=case: save(case, place, mesh) for case in CASES}
    checks["asynchronous"] = lambda: save("delayed", place, mesh, True)
    checks["again"] = lambda: load("delayed", place, mesh, "delayed-async")
    checks["codes again"] = lambda: load("codes", place, mesh)
    return checks


def checks_of_two(folder: str) -> dict[str, Any]:
    return checks_of(folder, 2)


def checks_of_four(folder: str) -> dict[str, Any]:
    return checks_of(folder, 4)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def two(base: Path) -> list[dict[str, Any]]:
    (base / "two").mkdir()
    (base / "saved").mkdir()
    return run_checks(checks_of_two, base / "two", 2)


@pytest.fixture(scope="module")
def four(base: Path, two: list[dict[str, Any]]) -> list[dict[str, Any]]:
    (base / "four").mkdir()
    return run_checks(checks_of_four, base / "four", 4)


@pytest.mark.parametrize("case", list(CASES))
def test_saved_by_two_loaded_by_four(
    case: str, two: list[dict[str, Any]], four: list[dict[str, Any]]
) -> None:
    saved, loaded = of_all(two, case), of_all(four, case)
    assert saved[0]["kinds"] == {"Tensor"}
    for losses in loaded:
        assert losses == pytest.approx(saved[0]["losses"], rel=tolerance(case))


@pytest.mark.parametrize("case", list(CASES))
def test_saved_by_two_loaded_by_one(case: str, base: Path, two: list[dict[str, Any]]) -> None:
    """Without sharding, and without process groups."""
    losses = load(case, base / "saved", None)
    assert losses == pytest.approx(of_all(two, case)[0]["losses"], rel=tolerance(case))


def tolerance(case: str) -> float:
    """Groups of moments in codes begin anew in every shard, so other shards round again."""
    return 2e-3 if case == "codes" else 1e-6


@pytest.mark.parametrize("recipe", ["delayed", "block"])
def test_hybrid_sharding(recipe: str, four: list[dict[str, Any]]) -> None:
    """Replicas of shards: with quantized gathers, without, and in one process."""
    shape = (256, 512, 1) if recipe == "block" else (64, 96, 2)
    expected = train(make_model(recipe, *shape), width=shape[0])
    for result in of_all(four, f"hybrid {recipe}"):
        assert result["losses"] == result["expected"] and result["equal"]
        assert result["losses"] == pytest.approx(expected, rel=1e-5)


def test_hybrid_sharding_of_stored_weights(four: list[dict[str, Any]]) -> None:
    for result in of_all(four, "hybrid stored"):
        assert result["losses"] == pytest.approx(result["expected"], rel=1e-5)
        assert "NVFP4Tensor" in result["seen"]


def test_moments_in_codes_come_back_to_the_bit(two: list[dict[str, Any]]) -> None:
    for saved, loaded in zip(of_all(two, "codes"), of_all(two, "codes again")):
        assert loaded == saved["losses"]


def test_saved_while_training_goes_on(two: list[dict[str, Any]]) -> None:
    for saved, loaded in zip(of_all(two, "asynchronous"), of_all(two, "again")):
        assert loaded == saved["losses"]


def test_a_rank_that_is_killed_leaves_the_old_checkpoint(
    base: Path, two: list[dict[str, Any]], tmp_path: Path
) -> None:
    shutil.copytree(base / "saved" / "delayed", tmp_path / "delayed")
    processes: Any = mp.start_processes(
        die_while_saving, (str(tmp_path), str(tmp_path)), 2, join=False, start_method=start_method()
    )
    deadline = time.monotonic() + 120
    for process in processes.processes:
        process.join(max(deadline - time.monotonic(), 0))
        process.kill()
    codes = [process.exitcode for process in processes.processes]
    assert codes[1] == -signal.SIGKILL
    assert (tmp_path / "told").exists(), "the rank that lives is told"
    assert not [one for one in tmp_path.iterdir() if one.name.startswith("delayed.writing")]
    losses = load("delayed", tmp_path, None)
    assert losses == pytest.approx(of_all(two, "delayed")[0]["losses"], rel=1e-6)


# -- one process -------------------------------------------------------------------------------------------------------


def layer(recipe: Any = None) -> nc.Linear:
    torch.manual_seed(0)
    return nc.Linear(32, 32, device="cpu", recipe=recipe)


def test_saved_over(tmp_path: Path) -> None:
    """The second save takes the place of the first, and nothing is left beside it."""
    model = layer(nc.recipe.DelayedScaling())
    for value in (1.0, 2.0):
        with torch.no_grad():
            model.weight.fill_(value)
        save_checkpoint(tmp_path / "at", model).result()
    again = layer(nc.recipe.DelayedScaling())
    assert load_checkpoint(tmp_path / "at", again) == {}
    assert again.weight.eq(2.0).all()
    assert [entry.name for entry in tmp_path.iterdir()] == ["at"]
    (tmp_path / "at").rename(tmp_path / "at.old")  # killed between two renames
    load_checkpoint(tmp_path / "at", layer())


def test_of_two_runs_that_save_into_one_folder_one_stays_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each has written its values when the other describes its own; what killed runs have left is removed."""
    (tmp_path / "at.writing-0").mkdir()
    both, finish = threading.Barrier(2, timeout=60), FileSystemWriter.finish

    def finish_together(self: Any, *args: Any, **named: Any) -> None:
        both.wait()
        finish(self, *args, **named)

    def run(number: int) -> None:
        model = layer()
        with torch.no_grad():
            model.weight.fill_(number)
        save_checkpoint(tmp_path / "at", model, extra={"run": number})

    monkeypatch.setattr(FileSystemWriter, "finish", finish_together)
    with ThreadPoolExecutor() as threads:
        saves = [threads.submit(run, number) for number in (1, 2)]
        assert [save.exception() for save in saves].count(None) > 0
    again = layer()
    run_of = load_checkpoint(tmp_path / "at", again)["run"]
    assert again.weight.eq(run_of).all() and saves[run_of - 1].exception() is None
    assert [entry.name for entry in tmp_path.iterdir()] == ["at"]


def test_state_that_an_autocast_brought(tmp_path: Path) -> None:
    recipe, x = nc.recipe.DelayedScaling(), torch.randn(16, 32)

    def step(model: nc.Linear) -> float:
        with nc.autocast(recipe=recipe):
            loss = model(x).square().mean()
        loss.backward()
        return loss.item()

    model = layer()
    step(model)
    step(model)
    earlier = copy.deepcopy(model)
    for name in ("scale", "amax_history", "amax"):  # each direction had its own, and weights slots
        inputs, outputs, *gradients = getattr(earlier, name).split(1, -1)
        setattr(earlier, name, None)
        earlier.register_buffer(f"{name}_fwd", torch.cat([inputs, torch.zeros_like(inputs), outputs], -1))
        earlier.register_buffer(f"{name}_bwd", torch.cat(gradients, -1))
    for number, saved in enumerate((model, earlier)):
        save_checkpoint(tmp_path / str(number), saved)
        again = layer()
        load_checkpoint(tmp_path / str(number), again)
        assert torch.equal(again.amax_history, model.amax_history)
        assert step(again) == step(copy.deepcopy(model))


def test_without_delayed_state(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "at", layer())
    model = layer(nc.recipe.DelayedScaling())
    with torch.no_grad():
        model.weight.zero_()
    with pytest.warns(UserWarning, match="no delayed-scaling state"):
        load_checkpoint(tmp_path / "at", model)
    assert torch.equal(model.weight, layer().weight)


def test_a_save_that_fails_in_its_last_step_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from narrowcast.distributed import checkpoint

    class Impatient(checkpoint.Future):  # type: ignore[name-defined,misc]
        def result(self, timeout: float | None = None) -> Any:
            return super().result(5.0)

    def replace(target: Path, writing: Path) -> None:
        raise OSError("the disk is full")

    monkeypatch.setattr(checkpoint, "Future", Impatient)
    monkeypatch.setattr(checkpoint, "_replace", replace)
    with pytest.raises(OSError, match="the disk is full"):
        save_checkpoint(tmp_path / "there", layer())


def test_a_tensor_of_extra_is_copied_without_its_graph() -> None:
    """Training that goes on changes no value that is still to be written."""
    from narrowcast.distributed.checkpoint import _plain

    parameter = torch.nn.Parameter(torch.arange(6.0).view(2, 3).t())
    plain = _plain(parameter, "extra")
    assert type(plain) is torch.Tensor and not plain.requires_grad and plain.is_contiguous()
    straight = torch.arange(6.0)
    copied = _plain(straight, "extra")
    with torch.no_grad():
        parameter.zero_()
        straight.zero_()
    assert torch.equal(plain, torch.arange(6.0).view(2, 3).t()) and torch.equal(copied, torch.arange(6.0))


def test_parts_of_a_description_are_what_they_are_for() -> None:
    """Parts must make up the tensor; a place that is just large enough will do; names of places are text or numbers."""
    from torch.distributed.checkpoint.metadata import (
        ChunkStorageMetadata,
        MetadataIndex,
        TensorProperties,
        TensorStorageMetadata,
    )

    from narrowcast.distributed import checkpoint_reader as reader

    chunk = ChunkStorageMetadata(torch.Size([0, 0]), torch.Size([2, 3]))
    whole = TensorStorageMetadata(TensorProperties(dtype=torch.float32), torch.Size([2, 3]), [chunk])
    stored = {MetadataIndex("w", chunk.offsets): reader.Extent("a", 0, 24)}
    reader._check_extents("w", whole, stored)
    stored[MetadataIndex("w", chunk.offsets)] = reader.Extent("a", 0, 23)
    with pytest.raises(ValueError, match="'w' needs 24 bytes"):
        reader._check_extents("w", whole, stored)
    assert [reader._part(one) for one in ("state", 3)] == ["state", 3]
    with pytest.raises(ValueError, match="it has float where str belongs"):
        reader._part(2.5)

    def described(sizes: tuple[int, ...], offsets: tuple[int, ...] = (0, 0)) -> Any:
        def record(name: str, state: Any) -> Any:
            made = type(name, (reader._Record,), {})()
            made.state = state
            return made

        parts = record("ChunkStorageMetadata", {"offsets": offsets, "sizes": sizes})
        properties = record("TensorProperties", (torch.float32,))
        fields = {"properties": properties, "chunks": [parts], "size": (2, 3)}
        return reader._described("w", record("TensorStorageMetadata", fields))

    assert described((2, 3)).size == (2, 3)
    for sizes, offsets in (((2, 2), (0, 0)), ((2, 3), (0, 1))):  # too little, and beyond the end
        with pytest.raises(ValueError, match="the parts of 'w' are not the tensor"):
            described(sizes, offsets)


def test_nothing_there(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="holds no checkpoint"):
        load_checkpoint(tmp_path / "at", layer())


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    def made(width: int, depth: int = 2) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        model = torch.nn.Sequential(*[nc.Linear(width, width, device="cpu") for _ in range(depth)])
        optimizer = nc.optimizers.FusedAdam(model.parameters())
        model(torch.ones(4, width)).sum().backward()
        optimizer.step()
        return model, optimizer

    model, optimizer = made(16)
    save_checkpoint(tmp_path / "model", model)
    save_checkpoint(tmp_path / "both", model, optimizer)
    for call in (save_checkpoint, load_checkpoint):
        with pytest.raises(
            ValueError, match=r"^optimizer has 4 parameters that the model has not, .*\(16, 16\); pass"
        ):
            call(tmp_path / "both", model, made(16)[1])
    told = r"other shapes than the model over all ranks: model\.0\.weight \(16, 16\), not \(32, 32\), .* more; make the"
    for other in (made(32)[:1], made(32)):
        with pytest.raises(ValueError, match=told) as raised:
            load_checkpoint(tmp_path / "both", *other)
        assert len(str(raised.value)) <= 300
    for where, other, told in (
        ("model", made(16, 3)[:1], "has no model.2.weight, model.2.bias; load into the model that was saved"),
        (
            "both",
            (model[0],),
            "has no model.weight, model.bias, and has model.0.weight instead; load into",
        ),
        (
            "model",
            made(16),
            "has no optimizer.* more; load into the optimizer that was saved, or leave optimizer out",
        ),
    ):
        with pytest.raises(ValueError, match=told):
            load_checkpoint(tmp_path / where, *other)


def test_a_quantized_parameter_is_saved_as_a_plain_tensor(tmp_path: Path) -> None:
    with nc.quantized_model_init(recipe=nc.recipe.Float8BlockScaling()):
        model = nc.Linear(128, 128, device="cpu")
    save_checkpoint(tmp_path / "at", model)
    plain = nc.Linear(128, 128, device="cpu")
    load_checkpoint(tmp_path / "at", plain)
    assert torch.equal(plain.weight, model.weight.dequantize())


def test_extra_comes_back_as_it_was(tmp_path: Path) -> None:
    tensor = torch.arange(6.0).reshape(2, 3).t()
    extra = {
        "a": {"b": 1, "c": {}, 3: "three"},
        "list": [1, tensor, [], {"x": None}],
        "tuple": (1, (2.5, "x")),
        "empty": {},
        "flag": True,
        "none": None,
        "bytes": b"\x00\xff",
        "with.dot": float("inf"),
        "bf16": torch.ones(2, dtype=torch.bfloat16),
    }
    save_checkpoint(tmp_path / "at", layer(), extra=extra)
    found = load_checkpoint(tmp_path / "at", layer())
    assert torch.equal(found["list"].pop(1), extra["list"].pop(1))  # type: ignore[attr-defined]
    assert torch.equal(found.pop("bf16"), extra.pop("bf16"))  # type: ignore[arg-type]
    assert found == extra and type(found["flag"]) is bool and type(found["tuple"]) is tuple


def test_extra_of_numpy_and_of_other_objects(tmp_path: Path) -> None:
    numpy = pytest.importorskip("numpy")
    save_checkpoint(tmp_path / "at", layer(), extra={"loss": numpy.float64(0.1), "n": numpy.int32(3)})
    found = load_checkpoint(tmp_path / "at", layer())
    assert found == {"loss": 0.1, "n": 3} and type(found["loss"]) is float
    with pytest.raises(ValueError, match=r"extra\['paths'\]\[1\] is a PosixPath, which only unpickling"):
        save_checkpoint(tmp_path / "at", layer(), extra={"paths": ["x", Path("x")]})
    assert load_checkpoint(tmp_path / "at", layer()) == found


def test_extra_of_earlier_versions(tmp_path: Path) -> None:
    """They wrote an entry for each value of it."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_model_state_dict

    state = {"model": get_model_state_dict(layer()), "extra": {"step": 3, "t": torch.arange(3)}}
    dcp.save(state, checkpoint_id=tmp_path / "at", no_dist=True)
    found = load_checkpoint(tmp_path / "at", layer())
    assert found.pop("t").tolist() == [0, 1, 2] and found == {"step": 3}
