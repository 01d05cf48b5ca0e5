"""One run in several processes: the losses of one process, and checkpoints that either goes on from."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from distributed.ranks_checks import of_all, run_checks

from narrowcast.testing import TOLERANCES
from narrowcast_tools import cli
from narrowcast_tools.train.checkpoint import load
from narrowcast_tools.train.config import TrainConfig
from narrowcast_tools.train.errors import SettingsError
from narrowcast_tools.train.ranks import require_ranks
from narrowcast_tools.words import torchrun

needs_ranks = pytest.mark.skipif(not dist.is_available(), reason="this PyTorch has no torch.distributed")

SHAPE = (
    "--dim 32 --layers 2 --heads 4 --kv-heads 2 --hidden 48 --batch-size 4 --seq-len 16 --steps 6 --warmup 2"
)
EVERY = "--eval-every 3 --eval-batches 2 --save-every 3 --lr 2e-3 --device cpu"
# what is trained by one process and by two
CASES = {
    "delayed": "--recipe delayed --accumulate 2",
    "tied": "--recipe bf16 --tie-embeddings --accumulate 2 --recompute",
}
ROUNDING = 0.1  # of one step after the other; rows in a wrong order are off by more than 1
MODES = ("fsdp", "tp", "fsdp+tp")  # the last with two that split each block


def train(folder: str | Path, name: str, case: str, *more: str) -> int:
    words = ["train", "--data", f"{folder}/text.txt", "--out", f"{folder}/{name}", *more]
    return cli.main([*words, *CASES[case].split(), *SHAPE.split(), *EVERY.split()])


def cut(folder: Path, name: str, new: str) -> None:
    """A copy of a run as it was after half of its steps."""
    shutil.copytree(folder / name, folder / new)
    (folder / new / "result.json").unlink()
    shutil.rmtree(folder / new / "checkpoints" / "step-00000006")


def checks_of_two(folder: str) -> dict[str, Any]:
    checks = {}
    for case in CASES:
        for mode in MODES:
            start = ("--parallel", mode)
            checks[f"{case}-{mode}"] = lambda c=case, m=mode, s=start: train(folder, f"{c}-{m}", c, *s)
            checks[f"{case}-{mode}-resumed"] = lambda c=case, m=mode, s=start: train(
                folder, f"{c}-{m}-resumed", c, *s, "--resume"
            )
    return checks


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of runs by one process, by two, and by two that went on from the half of one process."""
    folder = tmp_path_factory.mktemp("ranks")
    text = "".join(f"{i} bottles of beer on the wall, {i * i} squared.\n" for i in range(400))
    (folder / "text.txt").write_text(text)
    for case in CASES:
        assert train(folder, case, case) == 0
        for mode in MODES:
            cut(folder, case, f"{case}-{mode}-resumed")
    results = run_checks(checks_of_two, folder, 2)
    for name in checks_of_two(str(folder)):
        assert of_all(results, name) == [0, 0]
    return folder


def result(folder: Path, name: str) -> dict[str, Any]:
    return json.loads((folder / name / "result.json").read_text())


def distance(folder: Path, found: str, wanted: str) -> float:
    """How far weights, moments and scales of two runs are from each other: the largest relative one."""
    ours, theirs = (load(folder / name / "checkpoints" / "step-00000006").tensors for name in (found, wanted))
    assert [list(ours[part]) for part in ours] == [list(theirs[part]) for part in theirs]
    return max(
        float((ours[part][name] - value).norm() / value.norm().clamp_min(1e-12))
        for part in theirs
        for name, value in theirs[part].items()
        if value.is_floating_point()
    )


def assert_same_losses(folder: Path, found: str, wanted: str) -> None:
    ours, theirs = result(folder, found)["history"], result(folder, wanted)["history"]
    tolerance = TOLERANCES["training_loss"].relative
    assert ours["train"] == pytest.approx(theirs["train"], rel=tolerance)
    assert [loss for _, loss in ours["held_out"]] == pytest.approx(
        [loss for _, loss in theirs["held_out"]], rel=tolerance
    )


@needs_ranks
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("case", CASES)
def test_two_processes_have_the_losses_of_one(case: str, mode: str, runs: Path) -> None:
    assert_same_losses(runs, f"{case}-{mode}", case)
    assert distance(runs, f"{case}-{mode}", case) < ROUNDING
    found = result(runs, f"{case}-{mode}")
    assert found["parallel"] == {"mode": mode, "processes": 2}
    assert found["parameters"] == result(runs, case)["parameters"]


@needs_ranks
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("case", CASES)
def test_each_goes_on_from_the_other(case: str, mode: str, runs: Path, capfd: pytest.CaptureFixture) -> None:
    half = result(runs, case)["history"]["train"][:3]
    assert result(runs, f"{case}-{mode}-resumed")["history"]["train"][:3] == half
    assert_same_losses(runs, f"{case}-{mode}-resumed", case)
    assert distance(runs, f"{case}-{mode}-resumed", case) < ROUNDING
    back = f"{case}-{mode}-one"
    cut(runs, f"{case}-{mode}", back)
    assert train(runs, back, case, "--resume") == 0
    assert "made with processes 2, this is processes 1" in capfd.readouterr().err
    assert_same_losses(runs, back, f"{case}-{mode}")
    assert distance(runs, back, f"{case}-{mode}") < ROUNDING


def checks_of_four(folder: str) -> dict[str, Any]:
    """Two ranks split each block, and two of such share parameters and batches."""
    words = ("--parallel", "fsdp+tp")
    return {
        "four": lambda: train(folder, "delayed-four", "delayed", *words),
        "resumed": lambda: train(folder, "delayed-resumed-by-four", "delayed", *words, "--resume"),
    }


@needs_ranks
@pytest.mark.requested
def test_a_mesh_of_two_by_two(runs: Path, tmp_path: Path) -> None:
    cut(runs, "delayed-fsdp", "half")
    for name, new in (("half", "delayed-resumed-by-four"), ("delayed", "delayed")):
        shutil.copytree(runs / name, tmp_path / new)
    shutil.copy(runs / "text.txt", tmp_path)
    results = run_checks(checks_of_four, tmp_path, 4)
    assert of_all(results, "four") == of_all(results, "resumed") == [0] * 4
    for name in ("delayed-four", "delayed-resumed-by-four"):
        assert_same_losses(tmp_path, name, "delayed")
        assert distance(tmp_path, name, "delayed") < ROUNDING


@needs_ranks
def test_generating_from_a_run_of_two(runs: Path, capsys: pytest.CaptureFixture) -> None:
    words = ["generate", str(runs / "delayed-fsdp"), "--tokens", "3", "--temperature", "0", "--device", "cpu"]
    assert cli.main([*words, "--prompt", "12 bott"]) == 0
    assert capsys.readouterr().out.startswith("12 bott")


@pytest.mark.parametrize(
    ("processes", "words", "message"),
    [
        (
            None,
            "--parallel fsdp",
            rf"torchrun; run: {re.escape(torchrun()[0])} --nproc-per-node 2 -m narrowcast train --device cpu "
            "--parallel fsdp",
        ),
        (2, "--parallel ddp", r"--parallel is 'ddp'; use one of fsdp, tp or fsdp\+tp"),
        (2, "--parallel tp --tp-size 2", r"--parallel tp has none to choose; use --parallel fsdp\+tp"),
        (2, "--parallel fsdp+tp --tp-size 4", r"--tp-size is 4; it must divide the 2 processes"),
        (4, "--parallel tp", r"--kv-heads is 2, and --parallel tp splits it among 4 processes"),
        (1, "--tp-size 2", r"--tp-size is 2, and --parallel is not given; add --parallel fsdp\+tp"),
        (2, "", r"torchrun started 2 processes, and --parallel is not given; add --parallel fsdp"),
        (2, "--parallel fsdp --compile", r"communicates between blocks.*add --by-block"),
        (
            3,
            "--parallel fsdp --batch-size 4",
            r"--batch-size is 4; for 3 processes it must be a multiple of 3",
        ),
        (2, "--parallel fsdp --batch-size 4 --accumulate 4", r"in --accumulate 4 parts; .* a multiple of 8"),
    ],
)
def test_what_does_not_go_together(
    processes: int | None,
    words: str,
    message: str,
    capfd: pytest.CaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    if processes is not None:
        monkeypatch.setenv("RANK", "1")
        monkeypatch.setenv("WORLD_SIZE", str(processes))
    assert cli.main(["train", "--device", "cpu", *words.split()]) == 2
    told = capfd.readouterr().err
    assert re.search(message, told), told
    assert told.startswith("narrowcast: " if processes is None else "narrowcast, rank 1: ")


def test_graphs_are_of_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(SettingsError, match=r"--graphs replays one process's step.*leave --graphs out"):
        require_ranks(TrainConfig(graphs=True), "fsdp", command="narrowcast train")
