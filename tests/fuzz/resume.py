"""``narrowcast train`` killed with ``kill -9`` at any time, resumed, killed again: equal to a run left in peace."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import narrowcast as nc

from .draw import Draw
from .runner import Skip

TINY = [
    "--dim",
    "32",
    "--layers",
    "1",
    "--heads",
    "2",
    "--kv-heads",
    "1",
    "--hidden",
    "48",
    "--batch-size",
    "2",
]
TINY += ["--seq-len", "16", "--warmup", "2", "--eval-every", "5", "--eval-batches", "2"]
LIMIT = 300


def case(draw: Draw) -> dict[str, float]:
    from narrowcast_tools import cli

    if cli.MISSING is not None:
        raise Skip(f"narrowcast train needs {cli.MISSING}")
    recipe = draw.pick("recipe", ("none", "delayed", "current", "mxfp8", "block", "nvfp4"))
    words = [*TINY, "--recipe", recipe, "--device", draw.device, "--steps", str(draw.pick("steps", (10, 25)))]
    words += ["--save-every", str(draw.pick("save every", (1, 2, 3))), "--seed", str(draw.seed)]
    words += ["--emulate"] if draw.device == "cuda" else []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        text = folder / "text.txt"
        text.write_text("".join(f"{i} bottles of beer on the wall, {i * i} squared.\n" for i in range(400)))
        words += ["--data", str(text)]
        begin = time.perf_counter()
        whole = _train(folder, [*words, "--out", "whole"])
        seconds = time.perf_counter() - begin
        assert whole.wait(LIMIT) == 0, f"the whole run: {whole.communicate()[1]}"
        seconds = time.perf_counter() - begin
        kills = 0
        resume: list[str] = []
        for _ in range(draw.note("kills", draw.random.randint(1, 3 if draw.effort > 0.05 else 1))):
            process = _train(folder, [*words, "--out", "part", *resume])
            try:
                process.wait(draw.random.uniform(0.5, 1.0) * seconds)
            except subprocess.TimeoutExpired:
                os.kill(process.pid, signal.SIGKILL)
                process.wait()
                kills += 1
            process.communicate()
            resume = ["--resume"] if list((folder / "part").rglob("step-*")) else []
        last = _train(folder, [*words, "--out", "part", *resume])
        assert last.wait(LIMIT) == 0, (
            f"after {kills} kills, {resume or 'from the start'}: {last.communicate()[1]}"
        )
        last.communicate()
        histories = [
            json.loads((folder / run / "result.json").read_text())["history"] for run in ("whole", "part")
        ]
        assert histories[0] == histories[1], "the histories differ"
        newest = [max((folder / run).rglob("step-*/model.safetensors")) for run in ("whole", "part")]
        assert newest[0].read_bytes() == newest[1].read_bytes(), "the models differ"
    return {"kills": float(kills)}


def _train(folder: Path, words: list[str]) -> subprocess.Popen[str]:
    environment = {
        **os.environ,
        "PYTHONPATH": str(Path(nc.__file__).resolve().parents[1]),
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-m", "narrowcast", "train", *words]
    return subprocess.Popen(
        command, cwd=folder, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
