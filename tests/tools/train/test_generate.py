"""Generating from a checkpoint: the cache changes nothing, choices are as told, and what is missing is told."""

from __future__ import annotations

import io
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console

from narrowcast_tools.cli import main
from narrowcast_tools.train import generate as room
from narrowcast_tools.train.asked import Choice
from narrowcast_tools.train.config import ModelConfig, TrainConfig
from narrowcast_tools.train.data import Corpus, load_corpus
from narrowcast_tools.train.errors import SettingsError
from narrowcast_tools.train.generate import Answer, draw, generate, load_trained
from narrowcast_tools.train.progress import Lines, Progress
from narrowcast_tools.train.session import run_in

GREEDY = Choice(temperature=0)
PROMPT = torch.tensor(list(b"3 bottles"))


@pytest.fixture(scope="module")
def first_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("generate")
    text = folder / "text.txt"
    text.write_text("".join(f"{i} bottles of beer on the wall, {i * i} squared.\n" for i in range(400)))
    shape = ModelConfig(dim=32, layers=1, heads=2, kv_heads=1, hidden=48)
    config = TrainConfig(recipe="delayed", steps=20, batch_size=4, seq_len=16, lr=1e-2, warmup=2, model=shape)
    config = replace(config, eval_every=20, eval_batches=2, save_every=10)
    told = Lines(Console(file=io.StringIO()))
    run_in(folder / "run", config, load_corpus(text, seq_len=16), told, resume=False, told=False)
    return folder / "run"


@pytest.fixture
def trained_run(first_run: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(first_run, tmp_path / "run"))


def answer(run: Path, recipe: str | None = None, count: int = 12, **options) -> list[list[int]]:
    trained = load_trained(run, device="cpu", recipe=recipe)
    given = {"samples": 1, "choice": GREEDY, "seed": 0, **options}
    return torch.stack(list(generate(trained, PROMPT, count, **given)), 1).tolist()


@pytest.mark.parametrize("recipe", [None, "bf16", "mxfp8"])  # whose numbers do not depend on the other tokens
def test_the_cache_is_the_recomputation(recipe: str | None, trained_run: Path) -> None:
    trained = load_trained(trained_run, device="cpu", recipe=recipe)
    found = torch.cat(list(generate(trained, PROMPT, 7, samples=1, choice=GREEDY, seed=0))).tolist()
    tokens = PROMPT[None]
    with torch.no_grad():
        for token in found:
            assert int(trained.model(tokens)[0, -1].argmax()) == token
            tokens = torch.cat([tokens, torch.tensor([[token]])], 1)


def test_drawing_is_seeded_and_samples_differ(trained_run: Path) -> None:
    options = {"choice": Choice(1.5, 20), "samples": 3}
    first, again, other = (answer(trained_run, seed=seed, **options) for seed in (1, 1, 2))
    assert first == again != other
    assert len({tuple(row) for row in first}) == 3
    assert answer(trained_run, choice=Choice(1.0, 1)) == answer(trained_run)


def test_choices() -> None:
    scores = torch.tensor([[0.0, 3.0, 2.0, -1.0]]).expand(500, -1)
    generator = torch.Generator().manual_seed(0)
    assert set(draw(Choice(1.0, 2), scores, generator).flatten().tolist()) == {1, 2}
    assert set(draw(Choice(5.0, 0), scores, generator).flatten().tolist()) == {0, 1, 2, 3}
    assert set(draw(Choice(0), scores, generator).flatten().tolist()) == {1}
    share = draw(Choice(1.0, 0), scores, generator).eq(1).float().mean().item()
    assert share == pytest.approx(scores[0].softmax(-1)[1].item(), abs=0.08)


def test_the_decoding_step_is_one_graph(trained_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        room, "_compiled", lambda model, *_: torch.compile(model, fullgraph=True, backend="aot_eager")
    )
    torch.compiler.reset()
    assert answer(trained_run, compile=True) == answer(trained_run)


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["bf16", "delayed", "current"])
def test_replayed_graphs_decode_the_same(
    recipe: str, config: TrainConfig, corpus: Corpus, progress: Progress, tmp_path: Path
) -> None:
    config = replace(config, recipe=recipe, device="cuda", steps=20, batch_size=4, lr=1e-2, eval_every=20)
    run_in(tmp_path, config, corpus, progress, resume=False, told=False)
    trained = load_trained(tmp_path, device="cuda")
    options = {"samples": 4, "choice": Choice(1.0, 10), "seed": 3}
    rows = []
    for graphs in (False, True):
        torch.compiler.reset()
        steps = generate(trained, PROMPT, 7, compile=True, graphs=graphs, **options)
        rows.append(torch.stack([step.clone() for step in steps], 1).tolist())
    assert rows[0] == rows[1]


def test_the_command(trained_run: Path, capsys: pytest.CaptureFixture) -> None:
    words = ["generate", str(trained_run), "--prompt", "3 bottles", "--device", "cpu", "--tokens", "12"]
    assert main([*words, "--temperature", "0"]) == 0
    printed = capsys.readouterr()
    text = bytes([*PROMPT.tolist(), *answer(trained_run)[0]]).decode(errors="replace")
    assert printed.out.rstrip("\n") == text.rstrip("\n\N{REPLACEMENT CHARACTER}")
    assert "note: 21 positions, and the model was trained on 16" in printed.err
    assert "note: step 20, 12 tokens, samples: 1, " in printed.err
    run = f" generate {trained_run} --prompt '3 bottles' --device cpu --tokens 12"
    told = printed.err.splitlines()[-1]
    assert told.endswith(f"{run} --temperature 0.8   # or --recipe bf16, to compute in bf16")
    assert main([*words, "--samples", "2", "--recipe", "bf16"]) == 0
    printed = capsys.readouterr()
    assert printed.out.count("3 bottles") == 2
    assert printed.err.splitlines()[-1].endswith(f"{run} --samples 2 --recipe bf16 --seed 1")
    assert main(words) == 0
    told = capsys.readouterr().err.splitlines()[-1]
    assert told.startswith("next: ") and f"{run} --samples 4   # or" in told


def test_a_run_that_diverged_is_told(trained_run: Path) -> None:
    """Sampling raised an error of torch.multinomial, and --temperature 0 wrote zeros."""
    trained = load_trained(trained_run, device="cpu")
    next(trained.model.parameters()).data.fill_(torch.nan)
    told = (
        r"of step 20 gives scores that are not finite: its run diverged; give an earlier .* --lr below 0.01$"
    )
    for choice in (Choice(), GREEDY):
        with pytest.raises(SettingsError, match=told):
            list(generate(trained, PROMPT, 3, samples=1, choice=choice, seed=0))


@pytest.mark.parametrize("terminal", [True, False])
def test_a_terminal_shows_control_characters_and_obeys_none(
    terminal: bool, trained_run: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model of bytes may write what clears a screen or renames a window."""
    text = "a\x07\r\tb\n\x9b\x7f\N{GREEK SMALL LETTER ALPHA}"
    monkeypatch.setattr(Answer, "texts", lambda *_, **__: iter([text]))
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal)
    assert main(["generate", str(trained_run), "--device", "cpu"]) == 0
    shown = "a\\x07\\x0d\tb\n\\x9b\\x7f\N{GREEK SMALL LETTER ALPHA}"
    assert capsys.readouterr().out == (shown if terminal else text) + "\n"


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["absent"], ["absent does not exist; give the folder of a run"]),
        (
            ["run/checkpoints/step-00000020/model.safetensors"],
            ["/model.safetensors is a file; give the folder of its run, run"],
        ),
        (["run", "--tokens", "0"], ["--tokens is 0"]),
        (
            ["run", "--tokens", "1000000"],
            ["--tokens is 1,000,000; it must be at least 1 and at most 100,000"],
        ),
        (["run", "--samples", "-1"], ["--samples is -1"]),
        (["run", "--temperature", "-1"], ["--temperature is -1"]),
        (["run", "--temperature", "nan"], ["--temperature is nan"]),
        (["run", "--top-k", "-1"], ["--top-k is -1"]),
        (
            ["run", "--temperature", "0", "--samples", "2"],
            ["--samples is 2, and with --temperature 0 all are"],
        ),
        (["run", "--top-k", "1", "--samples", "3"], ["--samples is 3, and with --top-k 1 all are the same"]),
        (["run", "--prompt", ""], ["--prompt is empty"]),
        (["run", "--recipe", "fp7"], ["--recipe is 'fp7'"]),
        (["run", "--graphs"], ["--graphs", "leave --graphs out"]),
    ],
    ids=lambda value: " ".join(value[1:]) if isinstance(value, list) and value[0] == "run" else "",
)
def test_bad_commands(
    words: list[str],
    parts: list[str],
    trained_run: Path,
    capsys: pytest.CaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(trained_run.parent)
    assert main(["generate", *words, "--device", "cpu"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and all(part in lines[0] for part in parts), lines


def test_a_checkpoint_by_its_folder_and_a_damaged_one(
    trained_run: Path, capsys: pytest.CaptureFixture
) -> None:
    newest = load_trained(trained_run, device="cpu")
    assert newest.step == 20
    earlier = trained_run / "checkpoints" / "step-00000010"
    assert load_trained(earlier, device="cpu").step == 10
    for inside in ("checkpoints", "result.json"):
        assert load_trained(trained_run / inside, device="cpu").step == 20
        assert main(["generate", str(trained_run / inside), "--device", "cpu", "--tokens", "1"]) == 0
    (earlier / "model.safetensors").write_bytes(b"")
    with pytest.raises(SettingsError, match=r"step-00000010 cannot be read: .*give another checkpoint"):
        load_trained(earlier, device="cpu")
    newer = trained_run / "checkpoints" / "step-00000020"
    shutil.copytree(newer, trained_run / "checkpoints" / "step-00000030")
    assert main(["generate", str(trained_run), "--device", "cpu", "--tokens", "1"]) == 0
    assert "passed over" in capsys.readouterr().err
    shutil.rmtree(trained_run / "checkpoints" / "step-00000030")
    shutil.rmtree(newer)
    told = (
        r"holds no checkpoint that can be read \(passed over .*step-00000010: model.safetensors has 0 bytes"
    )
    with pytest.raises(SettingsError, match=told):
        load_trained(trained_run, device="cpu")


def test_a_comparison_is_told_from_a_run(trained_run: Path, tmp_path: Path) -> None:
    for seed in (0, 1):
        shutil.copytree(trained_run, tmp_path / "series" / f"bf16-{seed}")
    with pytest.raises(
        SettingsError, match=r"series holds 2 runs: bf16-0, bf16-1; give the folder of one, such as .*bf16-0$"
    ):
        load_trained(tmp_path / "series", device="cpu")
    shutil.rmtree(tmp_path / "series" / "bf16-0")
    words = ["generate", str(tmp_path / "series"), "--device", "cpu", "--tokens", "1"]
    assert main(words) == 0, "one run alone is taken"
    compared = tmp_path / "compared"
    compared.mkdir()
    (compared / "results.json").write_text("{}")
    with pytest.raises(
        SettingsError, match=r"holds a comparison and no checkpoint; give the folder of a run"
    ):
        load_trained(compared, device="cpu")


def test_text_comes_as_it_is_made(trained_run: Path) -> None:
    trained = load_trained(trained_run, device="cpu", recipe="bf16")
    answered = Answer(trained, "3 bottles", 5, samples=1)
    pieces = list(answered.texts(GREEDY, seed=0, compile=False, graphs=False))
    assert pieces[0] == "3 bottles"
    assert len(pieces) <= 6
    assert answered.remark == ""
