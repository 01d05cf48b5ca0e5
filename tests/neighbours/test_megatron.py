"""Megatron-LM finds Transformer Engine's names, and its models train in FP8."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path


def test_a_gpt_trains_in_fp8_as_it_is(tmp_path: Path) -> None:
    script = Path(__file__).with_name("megatron_rank.py")
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "CUDA_VISIBLE_DEVICES": ""}
    start = "import runpy, sys, narrowcast.compat as c; c.install_transformer_engine(); runpy.run_path(sys.argv.pop(1))"
    launch = [sys.executable, "-c", start, script, tmp_path / "store"]
    done = subprocess.run(launch, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    results = json.loads(re.findall(r"^results: (.*)$", done.stdout, re.MULTILINE)[0])
    assert results.pop("graphs") is True
    plain = results.pop("plain")
    for name, losses in results.items():
        assert losses != plain and losses[-1] < losses[0] - 0.5, (name, losses)
        assert max(abs(a - b) for a, b in zip(losses, plain)) < 0.05, (losses, plain)
    for recipe in ("delayed", "tensorwise"):
        assert results[recipe] == results[f"{recipe}, recomputed"]
    assert results["delayed"] != results["tensorwise"]
