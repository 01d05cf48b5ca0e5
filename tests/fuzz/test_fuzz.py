"""A slice of the fuzzer in every run of the tests: fixed seeds, and every program that failed once."""

from __future__ import annotations

import json
import random
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from recipes import DEVICE

from . import corpus, programs, runner, suites, terms
from .draw import Draw
from .runner import Suite, outcome, report, run, run_case

# Suite, seed of the first case, number of cases.
SLICES = [
    ("products", 0, 75),
    ("encodings", 0, 20),
    ("special", 0, 60),
    ("semantics", 2000, 40),
    ("options", 0, 30),
    pytest.param("ranks", 354, 4, marks=pytest.mark.slow),
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


ENTRIES = {file.stem: json.loads(file.read_text()) for file in corpus.files()}


@pytest.mark.parametrize(
    "entry",
    [
        # what takes long runs with --full-matrix alone
        pytest.param(entry, id=name, marks=pytest.mark.requested if entry.get("slow") else ())
        for name, entry in ENTRIES.items()
    ],
)
def test_what_failed_once_passes(entry: dict[str, Any]) -> None:
    suite = next(suite for suite in suites.all_suites() if suite.name == entry["suite"])
    error = outcome(suite, entry["program"])
    if error is not None:
        raise error


@pytest.mark.parametrize(
    "suite", [suite for suite in suites.all_suites() if suite.draw], ids=lambda suite: suite.name
)
def test_a_program_is_json_of_its_seed(suite: Suite) -> None:
    for seed in range(20):
        first, second = (suite.draw(random.Random(f"{suite.name} {seed}")) for _ in range(2))  # type: ignore[misc]
        assert json.loads(json.dumps(first)) == first == second


def test_a_failing_program_is_made_smaller_and_runs_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """As long as it fails in the same way; what it says nothing about passes."""

    def case(program: programs.Program) -> dict[str, float]:
        if not program["ops"]:
            raise programs.Invalid("nothing")
        if any(op["n"] > 7 for op in program["ops"]):
            raise programs.Difference(f"off by {len(program['ops'])}")
        assert program["ops"][0]["n"] != 3, "another failure"
        return {}

    def draw(rng: random.Random) -> programs.Program:
        return {"ops": [{"do": "a", "n": rng.choice((1, 3, 100))} for _ in range(8)], "flag": True}

    record = Suite("mine", case, 1.0, draw)
    run([record], device="cpu", minutes=0.0, seed=0, cases=20, effort=1.0)
    (found,) = [one for one in record.failures if "off by" in one["error"]]
    small = json.loads(found["drawn"])
    assert small["flag"] is False and len(small["ops"]) == 1 and 7 < small["ops"][0]["n"] <= 25
    assert record.seen["Difference: off by #"] > 1
    assert f"python -m tests.fuzz --suite mine --seed {found['seed']} --cases 1" in capsys.readouterr().err
    file = tmp_path / "one.json"
    file.write_text(json.dumps({"suite": "mine", "program": small}))
    assert not corpus.run_file(file, [record])
    file.write_text(json.dumps({"suite": "mine", "program": {**small, "ops": []}}))
    assert corpus.run_file(file, [record])


def test_a_case_that_does_not_end_is_stopped() -> None:
    with pytest.raises(programs.Slow), programs.limit(1):
        time.sleep(30)


@pytest.mark.parametrize("drawn", [False, True], ids=["toward zero", "drawn"])
def test_gradients_move_by_the_bound_of_their_terms(drawn: bool) -> None:
    """An element whose terms cancel may turn its sign, others move by less than they are."""
    layer = torch.nn.Linear(2, 1, dtype=torch.bfloat16)
    found = terms.Terms(layer, torch.Generator().manual_seed(1) if drawn else None)
    for rows in ([[0.1455, 1.0]], [[-0.1445, 0.5]]):
        x = torch.tensor(rows, dtype=torch.bfloat16)
        loss = (layer(x) + layer(-0.1 * x)).sum()  # two terms of each batch
        found.watch(loss)
        loss.backward()
    count, total = found.sums["weight"]
    assert count == 4 and torch.allclose(total, torch.tensor([[0.319, 1.65]], dtype=torch.float64), rtol=0.01)
    assert layer.weight.grad is not None and layer.weight.grad[0, 0].abs() < 0.003
    bound, before = found.bound("weight", layer.weight.grad), layer.weight.grad.clone()
    assert bound[0, 0] > before[0, 0].abs() and bound[0, 1] < 0.1 * before[0, 1].abs()
    found.move()
    after = layer.weight.grad
    assert ((after - before).abs() <= 1.1 * bound).all() and not torch.equal(after, before)
    assert drawn or after[0, 0] * before[0, 0] < 0
    found.move()  # of no terms: the next step's are others
    assert torch.equal(layer.weight.grad, after)


def test_room_is_of_the_difference() -> None:
    ours, theirs = torch.tensor([3.0, 1.0]), torch.tensor([3.0, 0.0])
    programs.compare(ours, theirs, "y", 0.1, room=0.8)
    with pytest.raises(programs.Difference, match="off by 0.1"):
        programs.compare(ours, theirs, "y", 0.1, room=0.6)


def test_words_that_help_are_told_from_crashes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import narrowcast as nc

    def error_of(function: object) -> BaseException:
        _, error = programs.attempt(function)  # type: ignore[arg-type]
        assert error is not None
        return error

    assert programs.refusal(error_of(lambda: nc.Linear(16, 16, device="cpu", recipe=3)))
    assert not programs.refusal(error_of(lambda: json.loads("[")))
    file = tmp_path / "ours.py"
    file.write_text(
        "(one,) = 1, 2\n"  # "expected 1" is no remedy
        "torch.ones(2) @ torch.ones(3)\n"  # nor is that of C++, which has no frame of its own
        "raise ValueError('x has no rows; pass one')\n"
        "raise RuntimeError('x cannot, expected 1') from ValueError('cannot, expected 1')\n"
    )
    monkeypatch.setattr(programs, "PACKAGE", str(tmp_path))
    for number, (line, refused) in enumerate(zip(file.read_text().splitlines(), (False, False, True, False))):
        code = compile("\n" * number + line, str(file), "exec")
        assert programs.refusal(error_of(lambda code=code: exec(code, {"torch": torch}))) is refused
    with pytest.raises(KeyError):  # a mistake of the case itself
        programs.attempt(lambda: {}["key"])
    assert runner.LIMIT > 60


def test_an_error_of_the_gpu_excuses_no_one() -> None:
    def broken() -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(torch.OutOfMemoryError):
        programs.attempt(broken)
    assert programs.is_of_the_device(RuntimeError("Triton Error [CUDA]: an illegal memory access"))
    assert not programs.is_of_the_device(RuntimeError("use another shape"))


def test_a_broken_gpu_ends_the_run_and_fails_its_case(monkeypatch: pytest.MonkeyPatch) -> None:
    cases: list[int] = []
    monkeypatch.setattr(
        programs, "error_of_the_device", lambda: RuntimeError("of the GPU") if len(cases) > 2 else None
    )
    suite = runner.Suite("broken", lambda program: cases.append(1), 1.0, draw=lambda rng: {"seed": 1})
    for times in ({"cases": 9, "minutes": 0.0}, {"cases": None, "minutes": 9.0}):
        runner.run([suite], device="cpu", seed=0, effort=1.0, **times)  # type: ignore[arg-type]
    assert len(cases) == 3 and [failure["error"] for failure in suite.failures] == [
        "RuntimeError: of the GPU"
    ]
