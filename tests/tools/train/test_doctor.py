"""The examination of the machine."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from narrowcast._installed import gpu_standing, minor
from narrowcast.upstream.versions import NEWEST_TORCH, OLDEST_TORCH
from narrowcast_tools import cli
from narrowcast_tools.train import doctor
from narrowcast_tools.train.doctor import examine
from narrowcast_tools.train.recipes import CHOICES, EMULATED

NOT_TESTED = f"not tested; {minor(OLDEST_TORCH)} to {minor(NEWEST_TORCH)} were"


def test_every_recipe_is_tried() -> None:
    findings = {finding.subject: finding for finding in examine()}
    assert {"python", "torch", "triton", "narrowcast", "device", *CHOICES} <= findings.keys()
    assert not [f for f in findings.values() if f.broken]
    assert all("\n" not in f.text for f in findings.values())
    assert findings["bf16"].text == "native"
    for name in EMULATED:
        assert findings[name].text.endswith("it runs emulated everywhere")


def test_what_is_wrong_comes_before_the_details(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    monkeypatch.setattr(doctor, "installed", lambda name: "" if name in ("numpy", "typer") else "1.0")
    monkeypatch.setattr(torch, "__version__", "2.99.1+cu140")
    assert doctor.doctor(json=False) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "wrong        nothing" in lines
    limits = [line for line in lines[: lines.index("")] if line.startswith("limits ")]
    assert limits[0] == f"limits       numpy, typer: {doctor.ABSENT}"
    assert limits[1] == f"limits       torch 2.99.1+cu140: {NOT_TESTED}"


def test_emulation_is_told_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    lacking = replace(CHOICES["mxfp8"], native=lambda return_reason: (False, "because"))
    assert doctor._try_recipe("mxfp8", lacking, "cpu").text == "emulated: because"


def test_an_old_torch_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.4.1+cu121")
    finding = next(f for f in examine() if f.subject == "torch")
    assert finding.broken
    assert f"install torch {minor(OLDEST_TORCH)} or newer" in finding.text


@pytest.mark.parametrize("version", [OLDEST_TORCH, "2.13.0+cpu", "2.14.0a0+git1234", "3.0.0.dev20270101"])
def test_new_torches_are_not(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    assert not doctor._torch("").broken


def test_every_gpu_has_a_line_that_says_what_was_tried() -> None:
    texts = {finding.subject: finding.text for finding in examine()}
    assert texts["sm_90"] == f"H100, H200: {gpu_standing((9, 0))}"
    assert texts["sm_80"].endswith(": not tried")
    assert texts["sm_120"].endswith(": every kernel compiles, never run")


def test_a_release_that_was_not_tested_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.99.1+cu140")
    finding = next(f for f in examine() if f.subject == "torch")
    assert finding.text == f"2.99.1+cu140: {NOT_TESTED}" and not finding.broken


def test_a_recipe_that_fails_is_broken_on_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(recipe: object, device: str) -> None:
        raise RuntimeError("first line\nsecond line")

    monkeypatch.setattr(doctor, "_one_step", fail)
    finding = doctor._try_recipe("current", CHOICES["current"], "cpu")
    assert finding.broken
    assert finding.text == "broken: RuntimeError: first line"


def test_a_gemm_that_nobody_has_run_says_so() -> None:
    for name in doctor.NEVER_RUN:
        wired = replace(CHOICES[name], native=lambda return_reason: (True, ""))
        assert "never run on such a GPU" in doctor._try_recipe(name, wired, "cpu").text


def test_a_wrong_variable_is_what_is_wrong(
    capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NARROWCAST_EMULATE", "maybe")
    assert cli.main(["doctor"]) == 1
    told = " ".join(capsys.readouterr().out.split())
    assert "wrong environment: variable NARROWCAST_EMULATE is 'maybe'; use 1 or 0" in told
    assert cli.main(["train", "--recipe", "current", "--steps", "2"]) == 2
    assert (
        capsys.readouterr().err
        == "narrowcast: environment variable NARROWCAST_EMULATE is 'maybe'; use 1 or 0\n"
    )
