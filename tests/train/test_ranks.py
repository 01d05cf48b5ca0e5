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

from narrowcast import cli
from narrowcast.testing import TOLERANCES
from narrowcast.train.config import TrainConfig
from narrowcast.train.errors import SettingsError
from narrowcast.train.ranks import require_ranks

needs_ranks = pytest.mark.skipif(not dist.is_available(), reason="this PyTorch has no torch.distributed")

SHAPE = (
    "--dim 32 --layers 2 --heads 4 --kv-heads 2 --hidden 48 --batch-size 4 --seq-len 16 --steps 6 --warmup 2"
)
EVERY = "--eval-every 3 --eval-batches 2 --save-every 3 --lr 2e-3 --device cpu"
# what is trained by one process and by two
CASES = {
    "delayed": "--recipe delayed",
    "tied": "--recipe bf16 --tie-embeddings --accumulate 2 --recompute",
}
MODES = ("fsdp",)


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
    back = f"{case}-{mode}-one"
    cut(runs, f"{case}-{mode}", back)
    assert train(runs, back, case, "--resume") == 0
    assert "made with processes 2, this is processes 1" in capfd.readouterr().err
    assert_same_losses(runs, back, f"{case}-{mode}")


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
            r"torchrun; run: torchrun --nproc-per-node 2 -m narrowcast train --device cpu --parallel fsdp",
        ),
        (2, "--parallel ddp", r"unknown mode 'ddp'; --parallel takes fsdp"),
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
