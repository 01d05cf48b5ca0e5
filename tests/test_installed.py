"""Versions, and whether they were tested; what a bug report shows."""

from __future__ import annotations

import platform
import re

import pytest
import torch

import narrowcast as nc
from narrowcast import _installed
from narrowcast._installed import gpu_standing, minor, versions, with_standing
from narrowcast.upstream.versions import NEWEST_TORCH, OLDEST_TORCH, TESTED_TORCH


@pytest.mark.parametrize(
    "version, expected",
    [
        ("2.15.0", "2.15"),
        ("2.15.1+cu132", "2.15"),
        ("3.9", "3.9"),
        ("2.16.0a0+git1", ""),
        ("2.16.0.dev2", ""),
    ],
)
def test_the_minor_release_of_a_version(version: str, expected: str) -> None:
    assert minor(version) == expected


@pytest.mark.parametrize("version", [OLDEST_TORCH, "2.14.0", "2.14.1", f"{minor(NEWEST_TORCH)}.3+cpu"])
def test_a_patch_of_a_tested_release_is_tested(version: str) -> None:
    assert with_standing(version, TESTED_TORCH) == f"{version}: tested"


@pytest.mark.parametrize(
    "version", ["2.10.1", "2.99.0", f"{NEWEST_TORCH}a0+git1234", "3.0.0.dev20270101", f"1{NEWEST_TORCH}"]
)
def test_other_releases_are_not(version: str) -> None:
    assert (
        with_standing(version, TESTED_TORCH)
        == f"{version}: not tested; {minor(OLDEST_TORCH)} to {minor(NEWEST_TORCH)} were"
    )


def test_an_absent_triton_says_what_runs_instead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_installed, "installed", lambda name: "")
    assert versions()["triton"] == "not installed; the reference numerics run instead"


def test_gpus() -> None:
    assert [gpu_standing(c) for c in ((8, 0), (12, 0), (99, 9))] == [
        "not tried", "every kernel compiles, never run", "not tried",
    ]  # fmt: skip
    assert re.match(
        r"GPU tests on .*H200, PyTorch 2\..*: \d+ passed, \d+ failed, .* not run$", gpu_standing((9, 0))
    )


@pytest.mark.parametrize(
    "version, standing",
    [("2.11.3+cu130", "tested on CPUs, on GPUs"), ("2.15.0", "tested on CPUs, not on GPUs")],
)
def test_a_release_that_no_gpu_test_ran_with_says_so(version: str, standing: str) -> None:
    assert with_standing(version, ["2.11.0", "2.15.0"], on_gpus=["2.11.0"]) == f"{version}: {standing}"


def test_show_versions(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.setenv("NARROWCAST_INLINE", "0")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    monkeypatch.setenv("NVIDIA_API_KEY", "secret")
    monkeypatch.setenv("HOME_TORCH", "unrelated")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: f"GPU {index}")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, 0) if index else (8, 0))
    assert nc.show_versions() is None
    lines = capsys.readouterr().out.splitlines()
    facts = {line.split("  ")[0]: line for line in lines}
    assert lines[0].split()[:2] == ["python", platform.python_version() + ":"]
    for name, text in {
        "torch": torch.__version__,
        "narrowcast": nc.__version__,
        "gpu 0": "GPU 0, sm_80: not tried",
        "gpu 1": "GPU 1, sm_90: GPU tests on",
        "NARROWCAST_INLINE": "0",
        "CUDA_VISIBLE_DEVICES": "3",
    }.items():
        assert facts[name].removeprefix(name).strip().startswith(text)
    assert "secret" not in "".join(lines) and "unrelated" not in "".join(lines)
