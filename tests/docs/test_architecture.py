"""The pages docs/architecture*.md name files and functions that exist, and the path that a call takes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import narrowcast as nc

PACKAGE = Path(nc.__file__).resolve().parent
DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGES = sorted(DOCS.glob("architecture*.md"))
PLACE = r"`([a-z_0-9]+/[a-z_0-9]+\.py)` `([A-Za-z_0-9.]+)`"

# The kernels in Triton's interpreter, as on a GPU; there, the dispatcher's wrapper ``run`` is not on the way.
TRACE = """
import sys
import torch
import narrowcast as nc
from narrowcast import kernels

sys.modules["narrowcast.functional._producers"].numerics_for = lambda x: kernels
layer = nc.Linear(32, 32, device="cpu", recipe=nc.recipe.MXFP8BlockScaling())
x = torch.randn(32, 32)
layer(x)
stack, way, ROOT = [], [], nc.__path__[0] + "/"


def profile(frame, event, argument):
    code = frame.f_code
    if not code.co_filename.startswith(ROOT):
        return
    if event == "return":
        stack.pop()
    elif event == "call":
        stack.append(code.co_filename[len(ROOT) :] + " " + code.co_name)
        if code.co_name == "__call__" and "launch" in code.co_filename and not way:
            way.extend(stack)


sys.setprofile(profile)
layer(x)
sys.setprofile(None)
print("\\n".join(way))
"""


def test_the_way_is_the_one_that_is_told() -> None:
    pytest.importorskip("triton")
    forward = (DOCS / "architecture-call.md").read_text().split("The gradient of the output")[0]
    told = re.findall(rf"^\d+\. {PLACE}", forward, re.MULTILINE)
    environment = {
        **os.environ,
        "TRITON_INTERPRET": "1",
        "PYTHONPATH": str(PACKAGE.parent),
        "CUDA_VISIBLE_DEVICES": "",
    }
    done = subprocess.run(
        [sys.executable, "-c", TRACE], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    taken = [line for line in done.stdout.splitlines() if line != "functional/_library.py run"]
    assert taken == [f"{file} {name.rsplit('.', 1)[-1]}" for file, name in told]


def test_files_and_names_of_the_pages_exist() -> None:
    places = [place for page in PAGES for place in re.findall(PLACE, page.read_text())]
    assert len(places) > 15
    for file, name in places:
        source = (PACKAGE / file).read_text()
        for part in name.split("."):
            assert re.search(rf"\b(def|class) {part}\b", source), f"{file} has no {name}"
