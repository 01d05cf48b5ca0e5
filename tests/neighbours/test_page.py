"""The code of docs/neighbours.md runs against the packages that it names, with and without the conversion."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import narrowcast as nc

PAGE = Path(__file__).resolve().parents[2] / "docs" / "neighbours.md"
SECTION = re.compile(r"^## (.*?)\n(.*?)(?=^## |\Z)", re.MULTILINE | re.DOTALL)
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PROGRAMS = {title: "\n".join(BLOCK.findall(text)) for title, text in SECTION.findall(PAGE.read_text())}
PROGRAMS = {title: program for title, program in PROGRAMS.items() if program}


def run(title: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Run a section's blocks in ``folder``, from the same seed each time, and return their names."""
    folder.mkdir()
    monkeypatch.chdir(folder)
    torch.manual_seed(0)
    namespace: dict[str, Any] = {"__name__": f"section_{title}"}
    exec(compile(PROGRAMS[title], f"{PAGE} ({title})", "exec"), namespace)
    return namespace


@pytest.mark.parametrize("title", [title for title in PROGRAMS if title != "torchtitan"])
def test_converted_models_train_as_plain_ones_do(
    title: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    converted = run(title, tmp_path / "converted", monkeypatch)
    losses = converted["losses"]
    assert any(one.decision == "converted" for one in nc.receipt(converted["model"]).gemms)
    if title == "torchao":
        assert "torchao made" in capsys.readouterr().out
    with monkeypatch.context() as patched:
        patched.setattr(nc, "convert", lambda model, *_, **__: model)
        plain = run(title, tmp_path / "plain", monkeypatch)["losses"]
    assert len(losses) == len(plain) > 4
    assert losses != plain
    fallen = plain[0] - min(plain)
    assert losses[-1] < losses[0] - 0.1 * abs(losses[0]), losses
    assert max(abs(a - b) for a, b in zip(losses, plain)) < 0.2 * fallen, (losses, plain)


def test_torchtitan_shards_trains_and_resumes_a_converted_model(tmp_path: Path) -> None:
    (tmp_path / "narrowcast_titan.py").write_text(PROGRAMS["torchtitan"])
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    script = Path(__file__).with_name("titan_ranks.py")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run([*launch, script], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    results = json.loads(re.findall(r"^results: (.*)$", done.stdout, re.MULTILINE)[0])
    plain, quantized = results["plain"], results["quantized"]
    assert (plain["converted"], quantized["converted"]) == (
        0,
        30,
    )  # five of each of six blocks; the head stays
    assert quantized["resumed"] == quantized["losses"][-len(quantized["resumed"]) :]
    assert quantized["losses"] != plain["losses"]
    assert quantized["losses"][-1] < quantized["losses"][0] - 1
    assert max(abs(a - b) for a, b in zip(quantized["losses"], plain["losses"])) < 0.1
