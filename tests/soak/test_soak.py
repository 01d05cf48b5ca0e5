"""A slice of the soak in every run of the tests: fixed seeds, so that it finds the same today and tomorrow."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from recipes import DEVICE

from . import suites
from .draw import Draw
from .runner import Suite, report, run, run_case

# Suite, seed of the first case, number of cases.
SLICES = [
    ("products", 0, 150),
    ("encodings", 0, 20),
    ("encodings", 1000, 20),
    ("special", 0, 120),
    ("semantics", 2000, 40),
    ("semantics", 2100, 40),
    ("options", 0, 60),
    pytest.param("compiled", 0, 5, marks=pytest.mark.requested),
    pytest.param("cycles", 0, 1, marks=pytest.mark.requested),
    pytest.param("resume", 0, 1, marks=pytest.mark.requested),
]


@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled")
@pytest.mark.parametrize(("name", "seed", "cases"), SLICES)
def test_slice(name: str, seed: int, cases: int) -> None:
    suite = next(suite for suite in suites.all_suites() if suite.name == name)
    for index in range(cases):
        run_case(suite, seed + index, DEVICE, effort=0.03)
    if suite.skipped:
        pytest.skip(suite.skipped)
    assert not suite.failures, "\n".join(
        f"{f['error']}\n  {f['drawn']}\n  {f['repro']}" for f in suite.failures
    )


def test_a_case_is_a_function_of_its_seed() -> None:
    def drawn(seed: int) -> list[str]:
        draw = Draw("products", seed, DEVICE)
        layer = draw.layer(draw.size("features"), draw.recipe(), draw.dtype())
        return [*draw.notes, *(str(p.sum().item()) for p in layer.parameters())]

    assert drawn(5) == drawn(5) != drawn(6)


def test_failures_are_reported(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """With what was drawn, the command that repeats the case alone, and in the log."""

    def broken(draw: Draw) -> dict[str, float]:
        assert draw.pick("number", (1,)) == 2, "one is not two"
        return {}

    record = Suite("broken", broken, 1.0)
    fine = Suite("fine", lambda draw: {"seed": float(draw.seed)}, 1.0)
    run([record, fine], device="cpu", minutes=0.0, seed=3, cases=2, effort=1.0)
    report([record, fine], "cpu", tmp_path / "log.json")
    assert "--suite broken --seed 4 --cases 1" in capsys.readouterr().out
    log = json.loads((tmp_path / "log.json").read_text())
    assert [suite["cases"] for suite in log["suites"]] == [2, 2]
    assert log["suites"][0]["failures"][0]["drawn"] == "number=1"
    assert log["suites"][1]["figures"] == {"seed": 4.0}
    run([fine], device="cpu", minutes=0.001, seed=0, cases=None, effort=1.0)
    assert fine.cases > 2
